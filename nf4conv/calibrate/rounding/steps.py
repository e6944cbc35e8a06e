"""The two steps of a group of inputs that share a scale, in plain torch, for any device.

Weights are transposed here, [inputs, outputs]: outputs are independent of each other, and stand in
the last dimension. rounding/kernels/ offers the same functions for NVIDIA GPUs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from nf4conv.calibrate.rounding.draft import Draft
from nf4conv.calibrate.rounding.levels import FINER, INFINITY, Levels, first_candidates

_COLUMNS: Final = 16  # rounded one by one before a matrix product takes their errors to the others

_CHUNK: Final = 1 << 19  # elements of all candidates of some outputs that are worked on at a time


@contextmanager
def _one_thread() -> Iterator[None]:
    """Lets torch compute a step on one thread.

    Its operations are so small that threads would mostly wait for each other: 10 times as long on
    cores that are busy otherwise, and no less on idle ones.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def round_group(
    draft: Draft, target: torch.Tensor, upper: torch.Tensor, errors: torch.Tensor
) -> None:
    """Chooses the scales of a group together with the ranks of its weights.

    Every candidate rounds the whole group, each error being compensated by the inputs that follow.
    An output takes the candidate whose errors cost least: the first of equals.

    Args:
        draft: of the group, written.
        target: [inputs, outputs] float32, the weights of the group with the errors of the groups
            before compensated; the outputs are contiguous.
        upper: [inputs, inputs] float32, of Factor.upper.
        errors: [inputs, outputs] float32, written: (target - value) / upper[j, j].
    """
    inputs, outputs = target.shape
    step = max(1, _CHUNK // (16 * inputs))
    for start in range(0, outputs, step):
        part = slice(start, min(outputs, start + step))
        of_part = draft.of(part)
        _choose(of_part, target[:, part], upper)
        residue = target[:, part].clone()
        _round_columns(residue, upper, of_part.scales, draft.levels, of_part.ranks)
        errors[:, part] = residue


def _choose(draft: Draft, target: torch.Tensor, upper: torch.Tensor) -> None:
    """Puts the best scales of a group and their codes into its draft."""
    levels = draft.levels
    scale = target.abs().amax(dim=0)
    code = torch.zeros_like(scale, dtype=torch.uint8)
    best = torch.full_like(scale, INFINITY)
    for factors in (first_candidates(levels.quant_type), FINER):
        scales, codes = draft.snap(scale.new_tensor(factors)[:, None] * scale)
        costs = _costs(target, upper, scales, levels)
        at = costs.argmin(dim=0)[None]
        cost = costs.gather(0, at)[0]
        is_better = cost < best
        scale = scales.gather(0, at)[0].where(is_better, scale)
        code = codes.gather(0, at)[0].where(is_better, code)
        best = cost.where(is_better, best)
    draft.scales.copy_(scale)
    draft.scale_codes.copy_(code)


def _costs(
    target: torch.Tensor, upper: torch.Tensor, scales: torch.Tensor, levels: Levels
) -> torch.Tensor:
    """Returns what rounding a group costs with each of [candidates, outputs] scales."""
    candidates, outputs = scales.shape
    of_each = target[:, None, :].expand(-1, candidates, -1)
    residue = of_each.reshape(len(target), -1)
    costs = _round_columns(residue, upper, scales.reshape(-1), levels, None)
    return costs.view(candidates, outputs)


def _round_columns(
    residue: torch.Tensor,
    upper: torch.Tensor,
    scales: torch.Tensor,
    levels: Levels,
    ranks: torch.Tensor | None,
) -> torch.Tensor:
    """Rounds the inputs of a group one after the other, and returns the sums of squared errors.

    The residue, [inputs, outputs] float32, holds the targets, and the errors afterwards. Ranks are
    written unless None.
    """
    inverse = inverse_of(scales)
    costs = torch.zeros_like(scales)
    reciprocal = (1 / upper.diagonal()).tolist()
    for start in range(0, residue.shape[0], _COLUMNS):
        stop = min(start + _COLUMNS, residue.shape[0])
        for j in range(start, stop):
            rank = levels.ranks(residue[j] * inverse)
            if ranks is not None:
                ranks[j] = rank
            error = (residue[j] - levels.decode(rank) * scales) * reciprocal[j]
            residue[j] = error
            costs.addcmul_(error, error)
            if j + 1 < stop:
                share = upper[j, j + 1 : stop, None]
                residue[j + 1 : stop].addcmul_(share, error, value=-1)
        shares = upper[start:stop, stop:].T
        residue[stop:].addmm_(shares, residue[start:stop], alpha=-1)
    return costs


@_one_thread()
def sweep_group(
    draft: Draft, gradient: torch.Tensor, moments: torch.Tensor, change: torch.Tensor
) -> None:
    """Improves the scales of a group, then its ranks one input after the other.

    The scale that makes the cost least is s + vᵀ·g / vᵀ·H·v, for levels v and the gradient g = H·e
    of the errors e; the nearest storable one is taken. Then each weight takes the level nearest to
    q + g / H[j, j], which makes the cost least while the others stay. So the cost never grows.

    Args:
        draft: of the group, replaced.
        gradient: [inputs, outputs] float32, H·(W - Q) for all inputs of the layer, at this group.
        moments: [inputs, inputs] float32, H of the group.
        change: [inputs, outputs] float32, written: by how much the decoded weights grow.
    """
    levels = draft.levels
    scales = draft.scales
    levelled = levels.decode(draft.ranks)
    product = moments @ levelled
    curvature = (levelled * product).sum(dim=0)
    slope = (levelled * gradient).sum(dim=0)
    step = slope / curvature.where(curvature > 0, 1)
    before = levelled * scales
    refitted, codes = draft.snap(scales + step.where(curvature > 0, 0))
    moved = gradient.addcmul(refitted - scales, product, value=-1)
    draft.scale_codes.copy_(codes)
    scales.copy_(refitted)

    values = levelled * scales
    _recode_columns(values, moved, moments, scales, levels, draft.ranks)
    torch.sub(values, before, out=change)


def _recode_columns(
    values: torch.Tensor,
    gradient: torch.Tensor,
    moments: torch.Tensor,
    scales: torch.Tensor,
    levels: Levels,
    ranks: torch.Tensor,
) -> None:
    """Moves each weight to the level that makes the cost least, one input after the other.

    The decoded values and ranks are replaced, the gradient is overwritten: [inputs, outputs] each.
    """
    inverse = inverse_of(scales)
    reciprocal = (1 / moments.diagonal()).tolist()
    moves = torch.empty_like(values)
    for start in range(0, values.shape[0], _COLUMNS):
        stop = min(start + _COLUMNS, values.shape[0])
        for j in range(start, stop):
            best = torch.add(values[j], gradient[j], alpha=reciprocal[j])
            rank = levels.ranks(best * inverse)
            ranks[j] = rank
            value = levels.decode(rank) * scales
            moves[j] = value - values[j]
            values[j] = value
            if j + 1 < stop:
                share = moments[j, j + 1 : stop, None]
                gradient[j + 1 : stop].addcmul_(share, moves[j], value=-1)
        shares = moments[start:stop, stop:].T
        gradient[stop:].addmm_(shares, moves[start:stop], alpha=-1)


def inverse_of(scales: torch.Tensor) -> torch.Tensor:
    """Returns 1 / scales, and 0 for a scale of 0."""
    return (1 / scales).where(scales != 0, 0)
