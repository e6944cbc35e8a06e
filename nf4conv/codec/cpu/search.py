"""Blocks → packed codes and searched scales.

A candidate is a column of a table with a row for each position, so the sums of all of them over a
group of elements are a sum of rows: torch's embedding_bag, which adds whole vector registers. The
step is another one, over a table with two columns. What is then left are two encodings and their
costs, as quantize.py encodes.
"""

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import embedding_bag

from nf4conv.codec import search
from nf4conv.codec.cpu.cuts import Scratch, are_negative, find_absmax, pack, without_signs
from nf4conv.codec.cpu.dequantize import value_pairs
from nf4conv.codec.reciprocal import reciprocal
from nf4conv.codec.search import ROUND, UNIT
from nf4conv.format.codebook import Codebook

_POSITIONS: Final = 2 * UNIT + 1
_ROUND_BITS: Final = int(np.float32(ROUND).view(np.int32))


def write_searched(
    blocks: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    codebook: Codebook,
    scratch: Scratch,
) -> torch.Tensor:
    """Searches [rows, blocksize] of any float type; returns which blocks are special: those with
    NaN, and those that are not searched.
    """
    blocksize = blocks.shape[1]
    values = scratch.values[: blocks.numel()].view(blocks.shape).copy_(blocks)
    find_absmax(without_signs(blocks, scratch), scales)
    special = ~((scales >= search.LEAST_ABSMAX) & (scales <= search.LARGEST_ABSMAX))
    # special blocks are computed again later; until then they must not overflow
    values[special] = 1
    scales[special] = 1
    power = (scales.view(torch.int32) & 0x7F800000).view(torch.float32)
    negative = None if codebook.signed_cuts else are_negative(values)
    values.mul_(power.reciprocal()[:, None])
    if negative is not None:
        negative &= are_negative(values)
    absmax = scales / power

    found = _least_squares(values, absmax, codebook.quant_type)
    codes, cost = _encode(values, negative, found, codebook, scratch)
    codes_of_absmax, cost_of_absmax = _encode(values, negative, absmax, codebook, scratch)
    better = cost + 2 * blocksize <= cost_of_absmax
    torch.where(better[:, None], codes, codes_of_absmax, out=packed)
    torch.mul(found.where(better, absmax), power, out=scales)
    return special


def _least_squares(values: torch.Tensor, absmax: torch.Tensor, quant_type: str) -> torch.Tensor:
    """Tries every factor, then makes one step of least squares from the best: returns the scales of
    [rows, blocksize] values, without NaN, whose absmax are from 1 to 2.
    """
    costs_table, step_table = _tables(quant_type)
    rows, blocksize = values.shape
    # adding ROUND rounds to an integer in the low bits; UNIT more leaves the row of the table there
    rounded = (values * (UNIT / absmax)[:, None]).add_(ROUND + UNIT).view(torch.int32)
    positions = rounded.sub_(_ROUND_BITS).view(-1, min(blocksize, search.GROUP))
    costs = _by_row(embedding_bag(positions, costs_table, mode="sum"), rows)
    best = costs.argmin(dim=1)  # the first of equals
    positions.view(rows, blocksize).add_((best * _POSITIONS).to(torch.int32)[:, None])
    sums = _by_row(embedding_bag(positions, step_table, mode="sum"), rows)
    shift, square = sums.to(torch.float32).unbind(dim=1)
    factor = torch.from_numpy(search.candidates(quant_type)).index_select(0, best)
    stepped = factor.abs() * (1 + shift / square / 16)
    clamped = stepped.clamp_(search.LEAST_FACTOR, search.LARGEST_FACTOR)
    return absmax * clamped.copysign_(factor)


def _by_row(sums: torch.Tensor, rows: int) -> torch.Tensor:
    """Adds up the sums of a row's groups: [groups, n] float32 → [rows, n], exact."""
    if sums.shape[0] == rows:
        return sums
    return sums.view(rows, -1, sums.shape[1]).sum(dim=1, dtype=torch.float64)


@cache
def _tables(quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what a position adds to the sums that reference/quantize.py spells out.

    These are [positions, candidates] costs, the squared distances from the nearest levels; and
    [candidates · positions, 2] distances times levels, and squares of levels in 16ths; all float32.
    """
    levels = search.nearest_levels(quant_type)
    distances = np.arange(-UNIT, UNIT + 1) - levels
    costs = np.ascontiguousarray((distances**2).T, dtype=np.float32)
    step = np.stack((distances * levels, levels**2 // 16), axis=-1).reshape(-1, 2)
    return torch.from_numpy(costs), torch.from_numpy(step.astype(np.float32))


def _encode(
    values: torch.Tensor,
    negative: npt.NDArray[np.bool_] | None,
    scales: torch.Tensor,
    codebook: Codebook,
    scratch: Scratch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes [rows, blocksize] values, without NaN, by the scales of their rows.

    `negative` is as of `pack`. Returns packed codes, and for each row the sum of squared errors in
    units of 1 / COST_UNITS.
    """
    rows, blocksize = values.shape
    quotients = scratch.magnitudes[: values.numel()].view(values.shape)
    torch.mul(values, reciprocal(scales)[:, None], out=quotients)
    packed = torch.from_numpy(pack(quotients, negative, codebook, scratch).astype(np.uint8))

    decoded = value_pairs(codebook.quant_type).index_select(0, packed.to(torch.int32))
    errors = decoded.view(torch.float32).view(-1, blocksize).mul_(scales[:, None])
    torch.sub(values, errors, out=errors)
    errors.square_().mul_(search.COST_UNITS).add_(ROUND).sub_(ROUND)
    sums = errors.view(-1, min(blocksize, search.GROUP)).sum(dim=1, keepdim=True)
    return packed.view(rows, -1), _by_row(sums, rows).view(-1)
