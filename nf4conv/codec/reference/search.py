"""Blocks → codes and searched scales. codec/search.py says what is computed here."""

import torch

from nf4conv.codec import search
from nf4conv.codec.reciprocal import reciprocal
from nf4conv.codec.reference.blocks import find_absmax, flushed, nearest_codes
from nf4conv.codec.reference.dequantize import decoded_values
from nf4conv.format.codebook import CODEBOOKS

_EXPONENT_BITS = 0x7F800000  # of a float32; alone they are the power of two at or below a number


def search_scales(blocks: torch.Tensor, quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Searches the scales of flushed blocks, [rows, blocksize] float32.

    Returns:
        scales: [rows] float32.
        codes: [rows, blocksize] uint8.
    """
    absmax = find_absmax(blocks)
    searched = absmax >= search.LEAST_ABSMAX
    searched &= absmax <= search.LARGEST_ABSMAX
    exponents = absmax.view(torch.int32) & _EXPONENT_BITS
    power = exponents.view(torch.float32).where(searched, 1)
    normalized = flushed(blocks / power[:, None])
    normalized_absmax = absmax / power
    # NaN, and blocks that are not searched, must not reach the sums of integers
    is_known = searched[:, None] & ~normalized.isnan()
    known = normalized.where(is_known, 0)

    found = _least_squares(known, normalized_absmax.where(searched, 1), quant_type)
    codes = _codes_by_scale(normalized, found, quant_type)
    cost = _cost(known, found, codes, quant_type)
    codes_of_absmax = _codes_by_scale(normalized, normalized_absmax, quant_type)
    cost_of_absmax = _cost(known, normalized_absmax, codes_of_absmax, quant_type)

    blocksize = blocks.shape[1]
    better = searched & (cost + 2 * blocksize <= cost_of_absmax)
    scales = found.where(better, normalized_absmax) * power
    return scales, codes.where(better[:, None], codes_of_absmax)


def _least_squares(known: torch.Tensor, absmax: torch.Tensor, quant_type: str) -> torch.Tensor:
    """Tries every factor, then makes one step of least squares from the best.

    Args:
        known: [rows, blocksize] float32, no NaN.
        absmax: [rows] float32, of these blocks: from 1 to 2.
        quant_type: "nf4" or "fp4".

    Returns:
        [rows] float32, the scales.
    """
    units = search.UNIT / absmax
    positions = (known * units[:, None]).round().to(torch.int64)
    tables = torch.from_numpy(search.nearest_levels(quant_type)).to(known.device, torch.int64)
    rows_of_tables = (positions + search.UNIT).view(-1)
    costs = []
    shifts = []
    squares = []
    for nearest in tables:
        level = nearest.index_select(0, rows_of_tables).view(positions.shape)
        distance = positions - level
        costs.append(distance.square().sum(dim=1))
        shifts.append((distance * level).sum(dim=1))
        squares.append((level.square() // 16).sum(dim=1))  # in 16ths, whose sums float32 holds
    best = torch.stack(costs).argmin(dim=0)  # the first of equals
    shift = _chosen(shifts, best)
    square = _chosen(squares, best)
    factors = torch.from_numpy(search.candidates(quant_type)).to(known.device)
    factor = factors.index_select(0, best)
    stepped = factor.abs() * (1 + shift / square / 16)
    clamped = stepped.clamp(search.LEAST_FACTOR, search.LARGEST_FACTOR)
    return absmax * clamped.copysign(factor)


def _chosen(sums: list[torch.Tensor], best: torch.Tensor) -> torch.Tensor:
    """Returns of each row the sum of its best factor, [rows] float32."""
    by_factor = torch.stack(sums)
    chosen = by_factor.gather(0, best[None])
    return chosen[0].float()


def _codes_by_scale(values: torch.Tensor, scales: torch.Tensor, quant_type: str) -> torch.Tensor:
    """Returns the codes, [rows, blocksize] uint8, of values by the scales of their rows."""
    quotients = flushed(values * reciprocal(scales)[:, None])
    return nearest_codes(quotients, CODEBOOKS[quant_type])


def _cost(
    known: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, quant_type: str
) -> torch.Tensor:
    """Adds up the squared errors of each row, each rounded to units of 1 / COST_UNITS.

    Returns [rows] int64.
    """
    table = decoded_values(quant_type, known.device)
    values = table.index_select(0, codes.view(-1).int()).view(codes.shape)
    errors = known - values * scales[:, None]
    costs = (errors.square() * search.COST_UNITS).round()
    return costs.to(torch.int64).sum(dim=1)
