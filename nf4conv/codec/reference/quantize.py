"""Weight → packed codes and absmax, or the searched scales that codec/search.py describes; absmax →
its own codes.
"""

from functools import cache
from typing import Final

import torch

from nf4conv.codec import search
from nf4conv.codec.reciprocal import reciprocal
from nf4conv.codec.reduction import cuda_mean
from nf4conv.codec.reference.dequantize import CHUNK, decoded_values, flushed
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP, NESTED_BLOCKSIZE, Codebook

_FLT_MAX: Final = torch.finfo(torch.float32).max
_EXPONENT_BITS = 0x7F800000  # of a float32; alone they are the power of two at or below a number


def quantize_blocks(
    weight: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    quant_type: str,
    blocksize: int,
    searches: bool = False,
) -> None:
    """Quantizes a weight in blocks.

    Args:
        weight: [n] float32, float16 or bfloat16, contiguous. A piece of a larger weight must begin
            at a block.
        packed: [ceil(n / 2)] uint8, written.
        scales: [ceil(n / blocksize)] float32, written: absmax, or the scales that the search finds,
            which may be negative.
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one scale, a power of two from 32 to 4096.
        searches: True to search scales.
    """
    codebook = CODEBOOKS[quant_type]
    for start in range(0, weight.numel(), CHUNK):
        stop = start + CHUNK
        blocks = padded_blocks(weight[start:stop], blocksize)
        if searches:
            found, codes = _search_scales(blocks, quant_type)
        else:
            quotients, found = scale_blocks(blocks)
            codes = nearest_codes(quotients, codebook)
        # codes of padding fill the last byte behind an odd end; the others are dropped
        pairs = codes.view(-1, 2)
        target = packed[start // 2 : stop // 2]
        target.copy_(((pairs[:, 0] << 4) | pairs[:, 1])[: target.numel()])
        first_block = start // blocksize
        scales[first_block : first_block + found.numel()].copy_(found)


def padded_blocks(values: torch.Tensor, blocksize: int) -> torch.Tensor:
    """Cuts [n] values of any float type into blocks, [blocks, blocksize] float32, flushed, with
    zeros past their end.
    """
    flat = values.float()
    padding = -flat.numel() % blocksize
    padded = torch.nn.functional.pad(flat, (0, padding))
    return flushed(padded.view(-1, blocksize))


def scale_blocks(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides each block by its absmax: a flushed product with its reciprocal.

    Returns the quotients, NaN for a block of zeros, and absmax, [rows] float32.
    """
    absmax = find_absmax(blocks)
    quotients = flushed(blocks * reciprocal(absmax)[:, None])
    return quotients, absmax


def find_absmax(blocks: torch.Tensor) -> torch.Tensor:
    """Returns the largest magnitude of each block, [rows] float32.

    NaN is ignored; a block that holds nothing else has -FLT_MAX.
    """
    magnitudes = blocks.abs()
    return magnitudes.where(~magnitudes.isnan(), -_FLT_MAX).amax(dim=1)


def nearest_codes(quotients: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Returns the codes of elements that were divided by absmax: uint8, in the same shape."""
    if codebook.signed_cuts:
        return _cuts_below(quotients, codebook)
    passed = _cuts_below(quotients.abs(), codebook)
    ranks = torch.tensor(codebook.ranks, dtype=torch.uint8, device=quotients.device)
    codes = ranks.index_select(0, passed.view(-1).int()).view(passed.shape)
    return codes + 8 * (quotients < 0).to(torch.uint8)


def _cuts_below(values: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Counts the cuts below each value: uint8, in the same shape."""
    passed = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for cut in codebook.cuts:
        passed += values > cut
    return passed


# --- searched scales ---


def _search_scales(blocks: torch.Tensor, quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
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


# --- absmax ---


def compress_absmax(
    absmax: torch.Tensor, codes: torch.Tensor, nested_absmax: torch.Tensor
) -> torch.Tensor:
    """Quantizes absmax to codes of the dynamic map, in blocks of 256, after subtracting its mean.

    Args:
        absmax: [blocks] float32.
        codes: [blocks] uint8, written.
        nested_absmax: [ceil(blocks / 256)] float32, written.

    Returns:
        The mean, 0-d float32: the offset of the quantization.
    """
    offset = cuda_mean(absmax)
    for start in range(0, absmax.numel(), CHUNK):
        centred = absmax[start : start + CHUNK] - offset
        quotients, maxima = scale_blocks(padded_blocks(centred, NESTED_BLOCKSIZE))
        codes[start : start + CHUNK] = nearest_dynamic(quotients.view(-1)[: centred.numel()])
        first_block = start // NESTED_BLOCKSIZE
        nested_absmax[first_block : first_block + maxima.numel()] = maxima
    return offset


def nearest_dynamic(quotients: torch.Tensor) -> torch.Tensor:
    """Returns the 8-bit codes of [n] values, none beyond ±1: [n] int32. NaN, of which a block of
    zeros consists, has code 0.

    The upper half of a float32 leaves two neighbouring codes to choose from, by one comparison.
    """
    lowest, cuts = _dynamic_search(quotients.device)
    codes = lowest.index_select(0, (quotients.view(torch.int32) >> 16) & 0xFFFF)
    codes += quotients > cuts.index_select(0, codes)
    return codes


@cache
def _dynamic_search(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns for all upper halves of a float32, [65536] int32, the lowest code of the values that
    have them, 0 for NaN and infinities; and [256] float32: above these the next code begins.
    """
    halves = torch.arange(1 << 16, dtype=torch.int32, device="cpu")
    upper = halves << 16
    least = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
    cuts = dynamic_cuts(torch.device("cpu"))
    lowest = torch.bucketize(least.where(least.isfinite(), -2), cuts, out_int32=True)
    ends = torch.nn.functional.pad(cuts, (0, 1), value=torch.inf)
    return lowest.to(device), ends.to(device)


def dynamic_cuts(device: torch.device) -> torch.Tensor:
    """Returns the cuts of the dynamic map: a value has the code that is the number of cuts below.

    They are the midpoints of the map's values, [255] float32. A value on a midpoint takes the even
    one of its two codes, so the midpoint above an odd code is moved down by one ulp.
    """
    values = torch.tensor(DYNAMIC_MAP, dtype=torch.float32, device=device)
    midpoints = (values[:-1] + values[1:]) * 0.5
    midpoints[1::2] = midpoints[1::2].nextafter(torch.tensor(-2.0, device=device))
    return midpoints
