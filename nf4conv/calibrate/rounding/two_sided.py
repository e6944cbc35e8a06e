"""Weights → 4 bits, for the least change of what the model predicts.

The mean squared error of a layer's outputs counts all outputs alike. To second order, the
divergence of the predictions grows with tr(G·E·H·Eᵀ): H are the second moments of the inputs, and
G = Σ g·gᵀ those of the gradients at the outputs, for labels that the model itself would draw. (A
Kronecker product in the place of the Fisher matrix, as in K-FAC and YAQA.)

    1. Round outputs in blocks, those with large gradients first. What a block cannot make good is
       compensated in the outputs that follow, as calibrated.py does for inputs.
    2. Sweep over all outputs some times, every n-th at once, against targets that hold the errors
       of all others. A step is kept only if the cost falls.
"""

from collections.abc import Iterator
from typing import Final

import torch

from nf4conv.calibrate.rounding.calibrated import SWEEPS, choose, ordered, stored, sweep
from nf4conv.calibrate.rounding.draft import Draft
from nf4conv.calibrate.rounding.factor import Factor, factor, in_order
from nf4conv.calibrate.rounding.rounded import Rounded

OUTPUT_DAMPING: Final = 0.05
"""Added to the diagonal of the output moments, relative to its mean: gradients are noisier than
activations.
"""

_LEAST_BLOCK: Final = 64
_LARGEST_BLOCK: Final = 1024
"""Outputs that are rounded at once. Small blocks compensate more; large ones are faster."""

_BLOCKS: Final = 8  # of a matrix, if that makes blocks between these


def round_two_sided(
    weight: torch.Tensor,
    searched: Rounded,
    inputs: Factor,
    output_moments: torch.Tensor,
    sweeps: int = SWEEPS,
) -> Rounded:
    """Rounds a weight, knowing its inputs and how the predictions depend on its outputs.

    Args:
        weight: [out, in], finite, of float32, float16 or bfloat16.
        searched: the weight with the codes and scales of the search, in the format that is wanted.
        inputs: the factor of its inputs.
        output_moments: [out, out] float32, the mean of g·gᵀ over tokens.
        sweeps: how often codes and scales are improved after the first choice.

    Raises:
        CodecError: the moments are not finite.
    """
    outputs = factor(output_moments, 1, OUTPUT_DAMPING)
    target = ordered([weight], inputs)
    target = target.index_select(1, outputs.order)
    draft = Draft.beside([searched.state], inputs)
    draft = draft.of(outputs.order)
    _choose(draft, target.clone(), inputs, outputs)
    draft = _swept(draft, target, inputs, outputs, sweeps)
    draft = draft.of(outputs.order.argsort())
    (result,) = stored(draft, [searched], inputs)
    return result


def two_sided_cost(
    weight: torch.Tensor,
    rounded: Rounded,
    input_moments: torch.Tensor,
    output_moments: torch.Tensor,
) -> float:
    """Returns tr(G·E·H·Eᵀ) of a rounded weight, summed in float64.

    H, [in, in], and G, [out, out], are mean second moments of inputs and of gradients at outputs.
    """
    errors = rounded.errors(weight).T.contiguous()
    total = torch.zeros((), dtype=torch.float64, device=errors.device)
    spread = input_moments @ errors
    for block in _blocks(errors.shape[1]):
        products = errors[:, block].T @ spread
        products *= output_moments[block]
        total += products.sum(dtype=torch.float64)
    return float(total)


def _choose(draft: Draft, target: torch.Tensor, inputs: Factor, outputs: Factor) -> None:
    """Rounds blocks of outputs in turn, and compensates the errors of each in those that follow.

    All is in the order of both factors; the target, [in_features, out_features], is overwritten.
    """
    for block in _blocks(target.shape[1]):
        chosen = draft.of(block).copy()
        wanted = target[:, block].contiguous()
        choose(chosen, wanted.clone(), inputs)
        draft.of(block).put(chosen)
        residue = wanted - chosen.values()
        upper = outputs.upper[block]
        inside = upper[:, block]
        errors = torch.linalg.solve_triangular(inside, residue, upper=True, left=False)
        behind = slice(block.stop, None)
        target[:, behind].addmm_(errors, upper[:, behind], alpha=-1)


def _swept(
    draft: Draft, target: torch.Tensor, inputs: Factor, outputs: Factor, sweeps: int
) -> Draft:
    """Returns a draft whose scales and codes were improved, each with a view to all others."""
    apart = _apart(target.shape[1], target.device)
    draft = draft.of(apart)
    errors = target.index_select(1, apart) - draft.values()
    gains = in_order(outputs.moments, apart)
    of_each = gains.diagonal()
    of_each.add_(outputs.damping * outputs.moments.diagonal().mean())
    for _ in range(sweeps):
        for block in _blocks(target.shape[1]):
            energy = of_each[block]
            # what the errors of all outputs ask of these: the target that makes the cost least
            wanted = (errors @ gains[:, block]) / energy
            gradient = inputs.moments @ wanted
            before = gradient.clone()
            trial = draft.of(block).copy()
            values = trial.values()
            sweep(trial, gradient, inputs)
            growth = values - trial.values()  # of the errors
            slope = before * growth * energy
            change = 2 * slope.sum(dtype=torch.float64)
            curvature = growth.T @ (gradient - before)
            curvature *= gains[block, block]
            change += curvature.sum(dtype=torch.float64)
            if float(change) < 0:  # of the two-sided cost
                draft.of(block).put(trial)
                errors[:, block] += growth
    return draft.of(apart.argsort())


def _blocks(outputs: int) -> Iterator[slice]:
    """Yields blocks of outputs that are rounded at once."""
    size = min(_LARGEST_BLOCK, max(_LEAST_BLOCK, outputs // _BLOCKS))
    for start in range(0, outputs, size):
        yield slice(start, min(start + size, outputs))


def _apart(outputs: int, device: torch.device) -> torch.Tensor:
    """Returns an order in which the outputs of a block were far apart, [outputs] int64.

    Neighbours move together in their gradients, so they should not be improved at once.
    """
    blocks = len(list(_blocks(outputs)))
    places = torch.arange(outputs, device=device)
    parts = [places[first::blocks] for first in range(blocks)]
    return torch.cat(parts)
