"""Merges adapters into tensors: adds scale · up · down (LoRA), scales the rows (DoRA).

Everything is summed in float64 and rounded once. So neither the device, nor how a weight is cut
into pieces, nor the order in which a library adds, changes a byte: the differences that remain are
some 2^-50 of a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import torch

from nf4conv.sources.arranged import LowRankDelta

_AT_A_TIME: Final = {"cpu": 2**20, "cuda": 2**22}
"""Elements that each worker sums in float64 at a time; fewer would keep a GPU waiting."""


@dataclass(frozen=True)
class Factors:
    """A low-rank delta and its tensors, whole, on the device that computes."""

    delta: LowRankDelta
    up: torch.Tensor
    down: torch.Tensor
    magnitude: torch.Tensor | None


@dataclass(frozen=True)
class AddedVector:
    """A vector that is added to a bias, on the device that computes."""

    vector: torch.Tensor
    scale: float


@dataclass(frozen=True)
class NewRows:
    """Rows that are put in the place of others, on the device that computes."""

    rows: torch.Tensor  # [rows, columns]
    indices: Sequence[int]  # the row of the whole tensor that each of them replaces


Change: TypeAlias = Factors | AddedVector | NewRows


def merge_deltas(
    base: torch.Tensor, changes: Sequence[Change], first: int, dtype: torch.dtype
) -> torch.Tensor:
    """Makes changes to a tensor, in order.

    It is a vector, some rows of a matrix from row `first` on, or a stack of matrices.
    """
    merged = torch.empty(base.shape, dtype=dtype, device=base.device)
    if base.dim() == 3:
        for index, matrix in enumerate(base):
            chosen = [_of_expert(change, index) for change in changes]
            merged[index] = merge_deltas(matrix, chosen, 0, dtype)
        return merged
    changes = [_prepared(change) for change in changes]
    rows = base.shape[0]
    step = max(rows, 1)
    if base.dim() == 2 and not any(_needs_all_rows(change) for change in changes):
        step = max(_AT_A_TIME[base.device.type] // max(base.shape[1], 1), 1)
    for start in range(0, rows, step):
        stop = start + step
        _merge_rows(base[start:stop], changes, first + start, merged[start:stop])
    return merged


def _of_expert(change: Change, expert: int) -> Change:
    """Returns what a change of a stack of experts does to one of them."""
    if isinstance(change, Factors):
        return replace(change, delta=replace(change.delta, expert=expert))
    return change


def _needs_all_rows(change: Change) -> bool:
    return isinstance(change, Factors) and change.delta.needs_all_rows


def _prepared(change: Change) -> Change:
    """Cuts factors to those of one matrix, and converts what all its rows need to float64."""
    if not isinstance(change, Factors):
        return change
    delta = change.delta
    up, down, magnitude = change.up, change.down, change.magnitude
    if delta.experts:
        assert delta.expert is not None
        rank = down.shape[0] // delta.experts
        down = down[delta.expert * rank : (delta.expert + 1) * rank]
        if delta.is_expert_major:
            up = up[:, delta.expert * rank : (delta.expert + 1) * rank]
        else:
            up = up[:, delta.expert :: delta.experts]
    if delta.rows is not None:
        start, stop = delta.rows
        up = up[start : stop : delta.row_step]
    if magnitude is not None:
        magnitude = magnitude.view(-1).double()
    return Factors(delta, up, down.double(), magnitude)


def _merge_rows(
    base: torch.Tensor, changes: Sequence[Change], first: int, out: torch.Tensor
) -> None:
    """Makes prepared changes to some rows and writes the result to `out`, [rows, columns].

    The arithmetic is that of PEFT: Linear.merge, DoraLinearVariant.merge_unsafe,
    TrainableTokensLayer.merge.
    """
    # what is added is in float64, and so is each sum but the last, which is rounded as it is
    # written
    total = base
    for number, change in enumerate(changes, start=1):
        target = out if number == len(changes) else None
        if isinstance(change, NewRows):
            total = _with_new_rows(total, change, first)
        elif isinstance(change, AddedVector):
            added = change.vector.double()
            total = torch.add(total, added, alpha=change.scale, out=target)
        else:
            total = _with_factors(base, total, change, first, target)
    if total is not out:
        out.copy_(total)


def _with_factors(
    base: torch.Tensor,
    total: torch.Tensor,
    factors: Factors,
    first: int,
    target: torch.Tensor | None,
) -> torch.Tensor:
    """Adds up · down to the `total` of the changes so far, and scales it if there is a magnitude.

    The rows begin at row `first` of the matrix; `base` are those before any change.
    """
    added = _product(factors, first, base.shape[0])
    if factors.magnitude is None:
        return torch.add(total, added, alpha=factors.delta.scale, out=target)
    added *= factors.delta.scale
    # the norm is that of the base with this delta alone, whatever was merged before
    factor = _row_factor(factors, base + added, first)
    return torch.mul(total + added, factor, out=target)


def _product(factors: Factors, first: int, rows: int) -> torch.Tensor:
    """Returns `rows` rows of up · down from row `first` of the matrix on, in float64."""
    here = slice(first, first + rows)
    if factors.delta.is_transposed:
        return torch.matmul(factors.down[:, here].t(), factors.up.double().t())
    return torch.matmul(factors.up[here].double(), factors.down)


def _row_factor(factors: Factors, changed: torch.Tensor, first: int) -> torch.Tensor:
    """Returns what DoRA multiplies rows with, from row `first` of the matrix on.

    A matrix that is stored transposed is whole here, and its columns are multiplied.
    """
    assert factors.magnitude is not None
    if factors.delta.is_transposed:
        norms: torch.Tensor = torch.linalg.vector_norm(changed, dim=0)
        return factors.magnitude / norms
    norms = torch.linalg.vector_norm(changed, dim=1)
    magnitude = factors.magnitude[first : first + changed.shape[0]]
    return (magnitude / norms)[:, None]


def _with_new_rows(total: torch.Tensor, change: NewRows, first: int) -> torch.Tensor:
    """Returns a copy of some rows, from row `first` of the matrix on, with new ones among them."""
    replaced = []
    chosen = []
    for place, index in enumerate(change.indices):
        if first <= index < first + total.shape[0]:
            replaced.append(index - first)
            chosen.append(place)
    total = total.to(torch.float64, copy=True)
    if replaced:
        total[replaced] = change.rows[chosen].double()
    return total
