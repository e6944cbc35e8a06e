"""What adapters add to a tensor: scale · B · A, and DoRA's scaling of the rows.

Everything is summed in float64 and rounded once, so that neither the device nor how a weight is cut
into pieces, and so in which order a library adds, changes a byte: what remains of such differences
is some 2^-50 of a value.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from nf4conv.sources.tensors import Delta

_AT_A_TIME: Final = {"cpu": 2**20, "cuda": 2**22}
"""Elements that are summed at a time, in float64, by each of several workers: fewer would keep a
GPU waiting.
"""


class Factors(NamedTuple):
    """A delta and its tensors, whole, on the device that computes."""

    delta: Delta
    up: torch.Tensor
    down: torch.Tensor | None
    magnitude: torch.Tensor | None


def merge_deltas(
    base: torch.Tensor, factors: Sequence[Factors], first: int, dtype: torch.dtype
) -> torch.Tensor:
    """A vector, rows of a matrix behind `first` others, or a stack of matrices, with everything
    added to it, in order.

    The base is of any float dtype, the result of the one that is asked for.
    """
    if base.dim() == 3:
        merged = torch.empty(base.shape, dtype=dtype, device=base.device)
        for index, matrix in enumerate(base):
            chosen = [part._replace(delta=part.delta._replace(expert=index)) for part in factors]
            merged[index] = merge_deltas(matrix, chosen, 0, dtype)
        return merged
    factors = [_of_matrix(part) for part in factors]
    is_cut = base.dim() == 2 and not any(part.delta.needs_all_rows for part in factors)
    step = (
        max(_AT_A_TIME[base.device.type] // max(base.shape[1], 1), 1)
        if is_cut
        else max(base.shape[0], 1)
    )
    merged = torch.empty(base.shape, dtype=dtype, device=base.device)
    for start in range(0, base.shape[0], step):
        _merge_rows(
            base[start : start + step], factors, first + start, merged[start : start + step]
        )
    return merged


def _of_matrix(part: Factors) -> Factors:
    """The factors of the one matrix that a tensor is; those that all its rows need in float64."""
    delta, up, down, magnitude = part
    if down is not None and delta.experts:
        assert delta.expert is not None
        rank = down.shape[0] // delta.experts
        down = down[delta.expert * rank : (delta.expert + 1) * rank]
        up = up[:, delta.expert :: delta.experts]
    if delta.rows is not None:
        up = up[slice(*delta.rows)]
    magnitude = None if magnitude is None else magnitude.view(-1).double()
    return Factors(delta, up, None if down is None else down.double(), magnitude)


def _merge_rows(
    base: torch.Tensor, factors: Sequence[Factors], first: int, out: torch.Tensor
) -> None:
    """Into `out`, [rows, columns] (PEFT: Linear.merge, DoraLinearVariant.merge_unsafe,
    TrainableTokensLayer.merge).
    """
    # what is added is in float64, and so is each sum but the last, which is rounded as it is
    # written
    total = base
    here = slice(first, first + base.shape[0])
    for number, (delta, up, down, magnitude) in enumerate(factors, start=1):
        target = out if number == len(factors) else None
        if delta.indices:
            total = _replaced_rows(total, up, delta.indices, first)
            continue
        added = up.double() if down is None else torch.matmul(*_sides(up, down, here, delta))
        if magnitude is None:
            total = torch.add(total, added, alpha=delta.scale, out=target)
        else:
            added *= delta.scale
            # the norm is that of the base with this delta alone, whatever has been merged before
            norm = torch.linalg.vector_norm(base + added, dim=0 if delta.is_transposed else 1)
            factor = magnitude / norm if delta.is_transposed else (magnitude[here] / norm)[:, None]
            total = torch.mul(total + added, factor, out=target)
    if total is not out:
        out.copy_(total)


def _sides(
    up: torch.Tensor, down: torch.Tensor, here: slice, delta: Delta
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is multiplied for some rows of a matrix."""
    return (
        (down[:, here].t(), up.double().t()) if delta.is_transposed else (up[here].double(), down)
    )


def _replaced_rows(
    total: torch.Tensor, rows: torch.Tensor, indices: Sequence[int], first: int
) -> torch.Tensor:
    here = [
        (index - first, place)
        for place, index in enumerate(indices)
        if first <= index < first + total.shape[0]
    ]
    total = total.to(torch.float64, copy=True)
    if here:
        total[[row for row, _ in here]] = rows[[place for _, place in here]].double()
    return total
