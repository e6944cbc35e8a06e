"""Weight → packed codes and scales, a chunk of blocks at a time, in as many threads as torch uses.

Special blocks, and a partial last one, are quantized by the reference.
"""

from functools import cache
from typing import Final

import numpy as np
import torch

from nf4conv.codec import reference
from nf4conv.codec.cpu.cuts import Scratch, are_negative, find_absmax, pack, without_signs
from nf4conv.codec.cpu.search import write_searched
from nf4conv.codec.cpu.threads import THREAD_CHUNK, share
from nf4conv.codec.reciprocal import reciprocal
from nf4conv.format.codebook import CODEBOOKS, Codebook

_SMALL_CHUNK: Final = 1 << 18
"""Elements at a time where torch has one thread: temporaries that stay in the cache save it an
eighth of the time. And of a search, which has more of them, 8 MB.
"""

# What is flushed, less than 2^-126, then scales to less than 2^-26: no cut is that near 0.
_MIN_ABSMAX: Final = 2.0**-100
_MAX_ABSMAX: Final = 2.0**126  # the reciprocal of anything larger is flushed


def quantize_blocks(
    weight: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    quant_type: str,
    blocksize: int,
    searches: bool = False,
) -> None:
    """Quantizes a weight in blocks, as `reference.quantize_blocks` does."""
    write = write_searched if searches else _write_quantized
    chunk = THREAD_CHUNK
    if searches or torch.get_num_threads() == 1:
        chunk = _SMALL_CHUNK
    codebook = CODEBOOKS[quant_type]
    whole = weight.numel() - weight.numel() % blocksize

    def write_range(start: int, stop: int) -> None:
        scratch = Scratch(min(chunk, stop - start), codebook)
        for at in range(start, stop, chunk):
            end = min(at + chunk, stop)
            blocks = weight[at:end].view(-1, blocksize)
            codes = packed[at // 2 : end // 2].view(-1, blocksize // 2)
            found = scales[at // blocksize : end // blocksize]
            special = write(blocks, codes, found, codebook, scratch)
            if special.any():
                special_codes = torch.empty_like(codes[special])
                special_scales = torch.empty_like(found[special])
                outputs = (special_codes.view(-1), special_scales)
                reference.quantize_blocks(
                    blocks[special].view(-1), *outputs, quant_type, blocksize, searches
                )
                codes[special] = special_codes
                found[special] = special_scales

    share(whole, chunk, write_range)
    if whole < weight.numel():
        rest = (weight[whole:], packed[whole // 2 :], scales[whole // blocksize :])
        reference.quantize_blocks(*rest, quant_type, blocksize, searches)


def _write_quantized(
    blocks: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: Codebook,
    scratch: Scratch,
) -> torch.Tensor:
    """Quantizes [rows, blocksize] of any float type; returns which blocks are special."""
    is_half = blocks.dtype != torch.float32
    magnitudes = without_signs(blocks, scratch) if is_half else blocks
    reciprocals = _reciprocals(find_absmax(magnitudes, absmax))
    values = scratch.values[: blocks.numel()].view(blocks.shape).copy_(blocks)
    negative = None if codebook.signed_cuts else are_negative(values)
    pairs = pack(values.mul_(reciprocals[:, None]), negative, codebook, scratch)
    np.copyto(packed.view(-1).numpy(), pairs, casting="unsafe")
    return ~((absmax >= _MIN_ABSMAX) & (absmax <= _MAX_ABSMAX))


def _reciprocals(absmax: torch.Tensor) -> torch.Tensor:
    """Returns 1 / absmax, [rows] float32; for 16-bit dtypes from a table of all numbers, which
    makes the whole a tenth faster.
    """
    if absmax.dtype == torch.float32:
        return reciprocal(absmax)
    return _half_reciprocals(absmax.dtype).index_select(0, absmax.view(torch.int16).int())


@cache
def _half_reciprocals(dtype: torch.dtype) -> torch.Tensor:
    """Returns [32768] float32: the reciprocals of the numbers of a 16-bit dtype without sign, by
    their bits.
    """
    numbers = torch.arange(1 << 15, dtype=torch.int16, device="cpu").view(dtype)
    return reciprocal(numbers.float())
