"""Weights → 4 bits, for the least error of a layer's outputs.

    1. Take the nested state of a search without data. It is fixed from here on, with some room.
    2. Take the groups of inputs in the order of their energy. Choose the scales of a group together
       with its codes, and compensate its errors in the groups that follow.
    3. Sweep over all groups some times: refit the scale, then every code.

Everything between is transposed, [inputs, outputs], with inputs in the order of the factor.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Final

import torch

import nf4conv.calibrate.rounding.steps as plain_steps
from nf4conv.calibrate.rounding.draft import Draft, empty_draft
from nf4conv.calibrate.rounding.factor import Factor
from nf4conv.calibrate.rounding.levels import Levels, levels_of
from nf4conv.calibrate.rounding.rounded import Rounded, pack
from nf4conv.calibrate.rounding.scales import StorableScales, with_room
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
    levels = levels_of(searched[0].state.quant_type, factor.order.device)
    storable = StorableScales.beside([one.state for one in searched]).in_order(groups_of(factor))
    draft = first_draft(ordered(weights, factor), factor, storable, levels)
    if sweeps:
        gradient = factor.moments @ (ordered(weights, factor) - draft.values(levels))
        for _ in range(sweeps):
            sweep(draft, gradient, factor, storable, levels)
    return packed(searched, draft, factor)


def ordered(weights: Sequence[torch.Tensor], factor: Factor) -> torch.Tensor:
    """Returns weights as [in_features, outputs] float32, inputs in the order of the factor."""
    columns = [weight.T.index_select(0, factor.order).float() for weight in weights]
    return torch.cat(columns, dim=1)


def groups_of(factor: Factor) -> torch.Tensor:
    """Returns the group at each place of the order, [groups] int64."""
    return factor.order[:: factor.blocksize] // factor.blocksize


def steps_for(device: torch.device) -> ModuleType:
    """Returns the module with `round_group` and `sweep_group` for a device."""
    if not has_kernels(device):
        return plain_steps
    import nf4conv.calibrate.rounding.kernels as kernel_steps  # importing Triton takes a second

    return kernel_steps


def first_draft(
    target: torch.Tensor, factor: Factor, storable: StorableScales, levels: Levels
) -> Draft:
    """Chooses scales and ranks group by group; all is in the order of the factor.

    The target, [in_features, outputs] float32, is overwritten.
    """
    inputs, outputs = target.shape
    blocksize = factor.blocksize
    steps = steps_for(target.device)
    draft = empty_draft(target, blocksize)
    errors = target.new_empty((lazy_inputs(inputs, blocksize), outputs))
    for start in range(0, inputs, errors.shape[0]):
        stop = min(start + errors.shape[0], inputs)
        for first in range(start, stop, blocksize):
            last = first + blocksize
            group = first // blocksize
            upper = factor.upper[first:last, first:last]
            of_group = errors[first - start : last - start]
            steps.round_group(
                target[first:last], upper, storable.at(group), levels, draft.at(group), of_group
            )
            target[last:stop].addmm_(factor.upper[first:last, last:stop].T, of_group, alpha=-1)
        of_block = errors[: stop - start]
        target[stop:].addmm_(factor.upper[start:stop, stop:].T, of_block, alpha=-1)
    return draft


def sweep(
    draft: Draft,
    gradient: torch.Tensor,
    factor: Factor,
    storable: StorableScales,
    levels: Levels,
) -> None:
    """Improves every scale and every code once; all is in the order of the factor.

    The gradient, H·(W - Q), [in_features, outputs] float32, is replaced by that of the new draft.
    """
    inputs, outputs = gradient.shape
    blocksize = factor.blocksize
    moments = factor.moments
    steps = steps_for(gradient.device)
    changes = gradient.new_empty((lazy_inputs(inputs, blocksize), outputs))
    for start in range(0, inputs, changes.shape[0]):
        stop = min(start + changes.shape[0], inputs)
        for first in range(start, stop, blocksize):
            last = first + blocksize
            group = first // blocksize
            of_group = moments[first:last, first:last]
            change = changes[first - start : last - start]
            steps.sweep_group(
                draft.at(group), gradient[first:last], of_group, storable.at(group), levels, change
            )
            gradient[start:stop].addmm_(moments[start:stop, first:last], change, alpha=-1)
        of_block = changes[: stop - start]
        gradient[:start].addmm_(moments[:start, start:stop], of_block, alpha=-1)
        gradient[stop:].addmm_(moments[stop:, start:stop], of_block, alpha=-1)


def lazy_inputs(inputs: int, blocksize: int) -> int:
    """Returns how many inputs are rounded before all others hear of it: whole groups."""
    return min(inputs, max(_LAZY, blocksize))


def packed(searched: Sequence[Rounded], draft: Draft, factor: Factor) -> list[Rounded]:
    """Returns weights as they are stored, whose rows one behind the other are a draft's outputs."""
    places = factor.order.argsort()
    group_places = groups_of(factor).argsort()
    results = []
    start = 0
    for one in searched:
        rows = slice(start, start + one.state.shape[0])
        start = rows.stop
        ranks = draft.ranks[:, rows].index_select(0, places).T
        stored = draft.scales if one.state.state2 is None else draft.scale_codes
        scales = stored[:, rows].index_select(0, group_places).T
        results.append(pack(ranks, scales, one.state, with_room(one.state)))
    return results
