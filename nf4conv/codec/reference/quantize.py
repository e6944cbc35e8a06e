"""Weight → packed codes and absmax, or searched scales."""

from functools import cache

import torch

from nf4conv.codec.reduction import cuda_mean
from nf4conv.codec.reference.blocks import (
    CHUNK,
    nearest_codes,
    padded_blocks,
    scale_blocks,
    store_codes,
)
from nf4conv.codec.reference.search import search_scales
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP, NESTED_BLOCKSIZE


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
            found, codes = search_scales(blocks, quant_type)
        else:
            quotients, found = scale_blocks(blocks)
            codes = nearest_codes(quotients, codebook)
        store_codes(codes, packed[start // 2 : stop // 2])
        first_block = start // blocksize
        scales[first_block : first_block + found.numel()].copy_(found)


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
