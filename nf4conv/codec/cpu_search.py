"""`reference.search_blocks` as a CPU does it fastest: the same bytes, many times sooner.

A candidate is a column of a table with a row for each position, so the sums of all of them over a
group of elements are a sum of rows: torch's embedding_bag, which adds whole vector registers. The
step is another one, over a table with two columns. What is then left are two encodings and their
costs, as cpu.py encodes.
"""

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import embedding_bag

from nf4conv.codec import reference, search
from nf4conv.codec.cpu import (
    TINIEST,
    Scratch,
    count_cuts,
    find_absmax,
    pair_codes,
    without_signs,
    write_chunks,
)
from nf4conv.codec.cpu_errors import value_pairs
from nf4conv.codec.reciprocal import reciprocal
from nf4conv.codec.search import ROUND, UNIT
from nf4conv.format.codebook import Codebook

_CHUNK: Final = 1 << 18  # elements a thread works on at a time: 8 MB of temporaries
_POSITIONS: Final = 2 * UNIT + 1


def search_blocks(
    weight: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    quant_type: str,
    blocksize: int,
) -> None:
    """Quantize a weight in blocks; arguments as `reference.search_blocks`."""
    write_chunks(
        (weight, packed, scales),
        quant_type,
        blocksize,
        _CHUNK,
        _search_chunk,
        reference.search_blocks,
    )


def _search_chunk(
    blocks: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    codebook: Codebook,
    scratch: Scratch,
) -> torch.Tensor:
    """Search [rows, blocksize] of any float type; which blocks are special: NaN, and what is not
    searched.
    """
    blocksize = blocks.shape[1]
    values = scratch.values[: blocks.numel()].view(blocks.shape).copy_(blocks)
    find_absmax(without_signs(blocks, scratch), scales)
    special = ~((scales >= search.LEAST_ABSMAX) & (scales <= search.LARGEST_ABSMAX))
    values[special], scales[special] = 1, 1
    power = (scales.view(torch.int32) & 0x7F800000).view(torch.float32)
    negative = None if codebook.signed_cuts else values.view(-1).numpy() <= -TINIEST
    values.mul_(power.reciprocal()[:, None])
    if negative is not None:
        negative &= values.view(-1).numpy() <= -TINIEST
    top = scales / power
    found = _least_squares(values, top, codebook.quant_type)
    codes, cost = _encode(values, negative, found, codebook, scratch)
    codes_of_absmax, cost_of_absmax = _encode(values, negative, top, codebook, scratch)
    better = cost + 2 * blocksize <= cost_of_absmax
    torch.where(better[:, None], codes, codes_of_absmax, out=packed)
    torch.mul(found.where(better, top), power, out=scales)
    return special


def _least_squares(values: torch.Tensor, top: torch.Tensor, quant_type: str) -> torch.Tensor:
    """[rows] float32, as the reference's; `values` are [rows, blocksize] whose absmax is `top`,
    from 1 to 2.
    """
    costs_table, step_table = _tables(quant_type)
    rows, blocksize = values.shape
    # adding UNIT more than what rounds leaves the row of the table
    rounded = (values * (UNIT / top)[:, None]).add_(ROUND + UNIT).view(torch.int32)
    positions = rounded.sub_(int(np.float32(ROUND).view(np.int32))).view(
        -1, min(blocksize, search.GROUP)
    )
    best = _by_row(embedding_bag(positions, costs_table, mode="sum"), rows).argmin(
        dim=1
    )  # the first of equals
    positions.view(rows, blocksize).add_((best * _POSITIONS).to(torch.int32)[:, None])
    shift, square = (
        _by_row(embedding_bag(positions, step_table, mode="sum"), rows)
        .to(torch.float32)
        .unbind(dim=1)
    )
    factor = torch.from_numpy(search.candidates(quant_type)).index_select(0, best)
    stepped = factor.abs() * (1 + shift / square / 16)
    return top * stepped.clamp_(search.LEAST_FACTOR, search.LARGEST_FACTOR).copysign_(factor)


def _by_row(sums: torch.Tensor, rows: int) -> torch.Tensor:
    """[groups, n] float32 → [rows, n], exact."""
    return (
        sums
        if sums.shape[0] == rows
        else sums.view(rows, -1, sums.shape[1]).sum(dim=1, dtype=torch.float64)
    )


@cache
def _tables(quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a position adds to the sums that reference.py spells out.

    To the costs, [positions, candidates] float32, the squared distance from the nearest level; to
    the step, [candidates · positions, 2] float32, the distance times the level, and the level's
    square in 16ths.
    """
    levels = search.nearest_levels(quant_type)
    distances = np.arange(-UNIT, UNIT + 1) - levels
    step = np.stack((distances * levels, levels**2 // 16), axis=-1).reshape(-1, 2)
    costs = np.ascontiguousarray((distances**2).T, dtype=np.float32)
    return torch.from_numpy(costs), torch.from_numpy(step.astype(np.float32))


def _encode(
    values: torch.Tensor,
    negative: npt.NDArray[np.bool_] | None,
    scale: torch.Tensor,
    codebook: Codebook,
    scratch: Scratch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, blocksize / 2] uint8 codes of values by their scale, and [rows] their cost.

    Of FP4, whose smallest negative values have a code of their own, `negative` says which are not
    flushed to zero.
    """
    rows, blocksize = values.shape
    scaled = torch.mul(
        values,
        reciprocal(scale)[:, None],
        out=scratch.magnitudes[: values.numel()].view(values.shape),
    )
    counts = count_cuts(scaled if negative is None else scaled.abs_(), codebook, scratch)
    if negative is not None:
        counts += (negative & (scaled.view(-1).numpy() >= TINIEST)).view(np.uint8) << 3
    packed = torch.from_numpy(pair_codes(counts, codebook).astype(np.uint8))
    errors = (
        value_pairs(codebook.quant_type).index_select(0, packed.to(torch.int32)).view(torch.float32)
    )
    errors = errors.view(-1, blocksize).mul_(scale[:, None])
    torch.sub(values, errors, out=errors).square_().mul_(search.COST_UNITS).add_(ROUND).sub_(ROUND)
    sums = errors.view(-1, min(blocksize, search.GROUP)).sum(dim=1, keepdim=True)
    return packed.view(rows, -1), _by_row(sums, rows).view(-1)
