"""Merges adapters into tensors: adds scale · up · down (LoRA), scales the rows (DoRA).

Everything is summed in float64 and rounded once. So neither the device, nor how a weight is cut
into pieces, nor the order in which a library adds, changes a byte: the differences that remain are
some 2^-50 of a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

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


def merge_deltas(
    base: torch.Tensor, changes: Sequence[Factors], first: int, dtype: torch.dtype
) -> torch.Tensor:
    """Makes changes to some rows of a matrix from row `first` on, or to a stack of matrices, in
    order.
    """
    merged = torch.empty(base.shape, dtype=dtype, device=base.device)
    if base.dim() == 3:
        for index, matrix in enumerate(base):
            of_expert = [replace(one, delta=replace(one.delta, expert=index)) for one in changes]
            merged[index] = merge_deltas(matrix, of_expert, 0, dtype)
        return merged
    changes = [_prepared(change) for change in changes]
    rows = base.shape[0]
    step = max(rows, 1)
    if not any(change.delta.needs_all_rows for change in changes):
        step = max(_AT_A_TIME[base.device.type] // max(base.shape[1], 1), 1)
    for start in range(0, rows, step):
        stop = start + step
        _merge_rows(base[start:stop], changes, first + start, merged[start:stop])
    return merged


def _prepared(factors: Factors) -> Factors:
    """Cuts factors to those of one matrix, and converts what all its rows need to float64."""
    delta = factors.delta
    up, down, magnitude = factors.up, factors.down, factors.magnitude
    if delta.experts:
        assert delta.expert is not None
        rank = down.shape[0] // delta.experts
        down = down[delta.expert * rank : (delta.expert + 1) * rank]
        up = up[:, delta.expert :: delta.experts]
    if delta.rows is not None:
        start, stop = delta.rows
        up = up[start : stop : delta.row_step]
    if magnitude is not None:
        magnitude = magnitude.view(-1).double()
    return Factors(delta, up, down.double(), magnitude)


def _merge_rows(
    base: torch.Tensor, changes: Sequence[Factors], first: int, out: torch.Tensor
) -> None:
    """Makes prepared changes to some rows and writes the result to `out`, [rows, columns].

    The arithmetic is that of PEFT: Linear.merge, DoraLinearVariant.merge_unsafe.
    """
    # what is added is in float64, and so is each sum but the last, which is rounded as it is
    # written
    total = base
    for number, factors in enumerate(changes, start=1):
        target = out if number == len(changes) else None
        added = _product(factors, first, base.shape[0])
        if factors.magnitude is None:
            total = torch.add(total, added, alpha=factors.delta.scale, out=target)
            continue
        added *= factors.delta.scale
        # the norm is that of the base with this delta alone, whatever was merged before
        factor = _row_factor(factors, base + added, first)
        total = torch.mul(total + added, factor, out=target)


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
