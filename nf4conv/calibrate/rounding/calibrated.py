"""Weights → 4 bits, for the least error of a layer's outputs.

    1. Take the nested state of a search without data. It is fixed from here on, with some room.
    2. Take the groups of inputs in the order of their energy. Choose the scales of a group together
       with its codes, and compensate its errors in the groups that follow.
    3. Sweep over all groups some times: refit the scale, then every code.

Everything between is transposed, [inputs, outputs], with inputs in the order of the factor.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Final

import torch

import nf4conv.calibrate.rounding.steps as plain_steps
from nf4conv.calibrate.rounding.draft import ROOM, Draft
from nf4conv.calibrate.rounding.factor import Factor
from nf4conv.calibrate.rounding.rounded import Rounded
from nf4conv.codec.backends import has_kernels

SWEEPS: Final = 4

_LAZY: Final = 1024
"""Inputs whose errors reach the inputs behind them in one matrix product, instead of one for each
group.
"""


def round_calibrated(
    weights: Sequence[torch.Tensor],
    searched: Sequence[Rounded],
    factor: Factor,
    sweeps: int = SWEEPS,
) -> list[Rounded]:
    """Rounds weights that have the same inputs, such as those of q, k and v.

    Args:
        weights: [out, in] each, finite, of float32, float16 or bfloat16.
        searched: the same weights with the codes and scales of the search, in the format that is
            wanted.
        factor: of the inputs.
        sweeps: how often codes and scales are improved after the first choice.
    """
    draft = Draft.beside([one.state for one in searched], factor)
    choose(draft, ordered(weights, factor), factor)
    gradient = factor.moments @ (ordered(weights, factor) - draft.values())
    for _ in range(sweeps):
        sweep(draft, gradient, factor)
    return stored(draft, searched, factor)


def ordered(weights: Sequence[torch.Tensor], factor: Factor) -> torch.Tensor:
    """Returns weights as [in_features, outputs] float32, inputs in the order of the factor."""
    columns = []
    for weight in weights:
        in_order = weight.T.index_select(0, factor.order)
        columns.append(in_order.float())
    return torch.cat(columns, dim=1)


def steps_for(device: torch.device) -> ModuleType:
    """Returns the module with `round_group` and `sweep_group` for a device."""
    if not has_kernels(device):
        return plain_steps
    import nf4conv.calibrate.rounding.kernels as kernel_steps  # importing Triton takes a second

    return kernel_steps


def choose(draft: Draft, target: torch.Tensor, factor: Factor) -> None:
    """Chooses scales and ranks group by group; all is in the order of the factor.

    The target, [in_features, outputs] float32, is overwritten.
    """
    inputs, outputs = target.shape
    blocksize = factor.blocksize
    steps = steps_for(target.device)
    lazy = lazy_inputs(inputs, blocksize)
    errors = target.new_empty((lazy, outputs))
    for start in range(0, inputs, lazy):
        stop = min(start + lazy, inputs)
        for first in range(start, stop, blocksize):
            group = slice(first, first + blocksize)
            behind = slice(first + blocksize, stop)
            upper = factor.upper[group]
            of_group = errors[first - start :][:blocksize]
            steps.round_group(
                draft.at(first // blocksize),
                target[group],
                upper[:, group],
                of_group,
            )
            target[behind].addmm_(upper[:, behind].T, of_group, alpha=-1)
        behind = slice(stop, inputs)
        upper = factor.upper[start:stop, behind]
        of_block = errors[: stop - start]
        target[behind].addmm_(upper.T, of_block, alpha=-1)


def sweep(draft: Draft, gradient: torch.Tensor, factor: Factor) -> None:
    """Improves every scale and every code once; all is in the order of the factor.

    The gradient, H·(W - Q), [in_features, outputs] float32, is replaced by that of the new draft.
    """
    inputs, outputs = gradient.shape
    blocksize = factor.blocksize
    steps = steps_for(gradient.device)
    lazy = lazy_inputs(inputs, blocksize)
    changes = gradient.new_empty((lazy, outputs))
    for start in range(0, inputs, lazy):
        stop = min(start + lazy, inputs)
        block = slice(start, stop)
        moments = factor.moments[:, block]
        inside = moments[block]
        of_block = gradient[block]
        for first in range(0, stop - start, blocksize):
            group = slice(first, first + blocksize)
            change = changes[group]
            steps.sweep_group(
                draft.at((start + first) // blocksize),
                of_block[group],
                inside[group, group],
                change,
            )
            of_block.addmm_(inside[:, group], change, alpha=-1)
        change = changes[: stop - start]
        gradient[:start].addmm_(moments[:start], change, alpha=-1)
        gradient[stop:].addmm_(moments[stop:], change, alpha=-1)


def lazy_inputs(inputs: int, blocksize: int) -> int:
    """Returns how many inputs are rounded before all others hear of it: whole groups."""
    return min(inputs, max(_LAZY, blocksize))


def stored(draft: Draft, searched: Sequence[Rounded], factor: Factor) -> list[Rounded]:
    """Returns weights as bitsandbytes stores them, whose rows are the outputs of a draft.

    Shape, options and nested offset are those of the searched weights.
    """
    places = factor.order.argsort()
    group_places = factor.groups.argsort()
    results = []
    start = 0
    for one in searched:
        state = one.state
        rows = slice(start, start + state.shape[0])
        start = rows.stop
        ranks = draft.ranks[:, rows].index_select(0, places)
        codes = draft.levels.codes.index_select(0, ranks.T.reshape(-1).int())
        packed = (codes[0::2] << 4) | codes[1::2]
        scales = draft.scales
        nested = state.state2
        if nested is not None:
            scales = draft.scale_codes
            nested = replace(nested, absmax=nested.absmax * ROOM)
        scales = scales[:, rows].index_select(0, group_places)
        found = replace(state, absmax=scales.T.reshape(-1), state2=nested)
        results.append(Rounded(packed[:, None], found))
    return results
