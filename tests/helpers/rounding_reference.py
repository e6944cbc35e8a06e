"""Defines rounding that knows the activations, in float64: one loop over groups, one over inputs.

What computes faster (steps.py, rounding/kernels/) agrees with this in every code, except where a
decision is so close that float32 may turn it. So the reference also returns by how much its closest
decision was made, for each output. A decision that turns changes all that follow in its output, and
nothing in others.
"""

from dataclasses import dataclass
from typing import Final

import torch

from nf4conv.calibrate.rounding.draft import Draft
from nf4conv.calibrate.rounding.factor import Factor
from nf4conv.calibrate.rounding.levels import FINER, Levels, first_candidates

CLOSE: Final = 2e-6
"""Below this margin a decision counts as a tie: float32 may make it differently."""

_OF_COSTS: Final = 0.1
"""Margins of costs are multiplied by this: the float32 errors of sums of squares are larger."""

_RIVAL: Final = 2.0
"""A scale whose cost is below the best by this factor could win by one decision of its own."""


@dataclass
class Chosen:
    """Ranks and scales, with inputs and groups in the order of the factor.

    Attributes:
        ranks: [in_features, outputs] int64, of the levels.
        scales: [groups, outputs] float64, as they decode.
        margins: [outputs] float64, the least margin of a decision: the distance of a quotient from
            its nearest cut, or a tenth of the relative distance of two costs.
    """

    ranks: torch.Tensor
    scales: torch.Tensor
    margins: torch.Tensor


def choose_all(target: torch.Tensor, factor: Factor, draft: Draft, sweeps: int) -> Chosen:
    """Rounds weights group by group, then sweeps over them.

    Args:
        target: [in_features, outputs] float32, inputs in the order of the factor.
        factor: of the inputs.
        draft: says from which scales is chosen, with groups in the order of the factor.
        sweeps: how often codes and scales are improved after the first choice.
    """
    original = target.double()
    inputs, outputs = target.shape
    chosen = Chosen(
        ranks=torch.zeros((inputs, outputs), dtype=torch.int64),
        scales=original.new_zeros((inputs // factor.blocksize, outputs)),
        margins=original.new_full((outputs,), float("inf")),
    )
    _round_groups(original.clone(), chosen, factor, draft)
    for _ in range(sweeps):
        _sweep_groups(original, chosen, factor, draft)
    return chosen


def _round_groups(compensated: torch.Tensor, chosen: Chosen, factor: Factor, draft: Draft) -> None:
    """Makes the first choice of all scales and ranks; `compensated` is overwritten."""
    upper = factor.upper.double()
    for group in range(chosen.scales.shape[0]):
        first = group * factor.blocksize
        last = first + factor.blocksize
        block = compensated[first:last]
        inside = upper[first:last, first:last]
        scale = _best_scale(block, inside, group, chosen, draft)
        ranks, errors, distances = _round(block, inside, scale, draft.levels)
        _note(distances, scale != 0, chosen)
        chosen.scales[group] = scale
        chosen.ranks[first:last] = ranks
        compensated[last:] -= upper[first:last, last:].T @ errors


def _best_scale(
    block: torch.Tensor,
    upper: torch.Tensor,
    group: int,
    chosen: Chosen,
    draft: Draft,
) -> torch.Tensor:
    """Returns the scale of each output whose rounding of the block costs least, [outputs]."""
    base = block.abs().amax(dim=0)
    best = torch.full_like(base, float("inf"))
    scale = torch.zeros_like(base)
    tries = []
    for factors in (first_candidates(draft.levels.quant_type), FINER):
        before = scale.clone() if factors is FINER else base
        for number in factors:
            # the factors are float32 numbers
            exact = torch.tensor(number, dtype=torch.float32).double()
            tried = _snap(exact * before, group, draft, chosen)
            _, errors, distances = _round(block, upper, tried, draft.levels)
            cost = errors.square().sum(dim=0)
            tries.append((cost, distances))
            _note((cost - best).abs() / cost * _OF_COSTS, tried != scale, chosen)
            is_better = cost < best
            best = cost.where(is_better, best)
            scale = tried.where(is_better, scale)
    for cost, distances in tries:
        _note(distances, cost < _RIVAL * best, chosen)
    return scale


def _round(
    block: torch.Tensor,
    upper: torch.Tensor,
    scale: torch.Tensor,
    levels: Levels,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds a block with given scales: error j moves each later input k by error · U[j, k].

    Returns:
        ranks: [inputs, outputs] int64.
        errors: [inputs, outputs] float64, (w - q) / U[j, j].
        distances: [outputs] float64, the least distance of a quotient from a cut.
    """
    rest = block.clone()
    least = torch.full_like(scale, float("inf"))
    ranks = torch.zeros(block.shape, dtype=torch.int64)
    for j in range(block.shape[0]):
        ranks[j], distances = _nearest(rest[j], scale, levels)
        least = torch.minimum(least, distances)
        error = (rest[j] - levels.values.double()[ranks[j]] * scale) / upper[j, j]
        rest[j + 1 :] -= upper[j, j + 1 :, None] * error
        rest[j] = error
    return ranks, rest, least


def _sweep_groups(original: torch.Tensor, chosen: Chosen, factor: Factor, draft: Draft) -> None:
    """Refits the scale of every group, and moves every weight to the level that costs least."""
    levels = draft.levels
    moments = factor.moments.double()
    blocksize = factor.blocksize
    values = levels.values.double()[chosen.ranks]
    values = values * chosen.scales.repeat_interleave(blocksize, dim=0)
    gradient = moments @ (original - values)
    for group in range(chosen.scales.shape[0]):
        inputs = slice(group * blocksize, (group + 1) * blocksize)
        level = levels.values.double()[chosen.ranks[inputs]]
        curvature = (level * (moments[inputs, inputs] @ level)).sum(dim=0)
        slope = (level * gradient[inputs]).sum(dim=0)
        step = (slope / curvature).where(curvature > 0, 0)
        scale = _snap(chosen.scales[group] + step, group, draft, chosen)
        gradient -= moments[:, inputs] @ (level * (scale - chosen.scales[group]))
        chosen.scales[group] = scale
        for j in range(inputs.start, inputs.stop):
            value = levels.values.double()[chosen.ranks[j]] * scale
            wanted = value + gradient[j] / moments[j, j]
            chosen.ranks[j], distances = _nearest(wanted, scale, levels)
            _note(distances, scale != 0, chosen)
            move = levels.values.double()[chosen.ranks[j]] * scale - value
            gradient -= moments[:, j, None] * move


def _nearest(
    wanted: torch.Tensor, scale: torch.Tensor, levels: Levels
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ranks of the nearest levels, and the distances from the nearest cuts."""
    quotients = (wanted / scale).where(scale != 0, 0)
    cuts = levels.cuts.double()
    distances = (quotients[:, None] - cuts).abs().amin(dim=1)
    return torch.bucketize(quotients, cuts), distances


def _snap(wanted: torch.Tensor, group: int, draft: Draft, chosen: Chosen) -> torch.Tensor:
    """Returns the nearest storable scales, [outputs] float64.

    Which is nearest is a float32 decision; it is noted as a tie if a slightly different wish would
    have another answer.
    """
    scales, _ = draft.at(group).snap(wanted.float())
    if draft.maxima is not None:
        spread = CLOSE / 2 * draft.maxima[group].double()
        lower, _ = draft.at(group).snap((wanted - spread).float())
        higher, _ = draft.at(group).snap((wanted + spread).float())
        _note(torch.zeros_like(wanted), lower != higher, chosen)
    return scales.double()


def _note(margins: torch.Tensor, counts: torch.Tensor, chosen: Chosen) -> None:
    """Keeps the least margin of each output; those that do not count are left out."""
    chosen.margins = torch.minimum(chosen.margins, margins.where(counts, float("inf")))
