"""absmax → 8-bit codes: the second quantization."""

from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from nf4conv.codec.cpu.cuts import Bytes
from nf4conv.codec.reduction import cuda_mean
from nf4conv.codec.reference.blocks import CHUNK, padded_blocks, scale_blocks
from nf4conv.codec.reference.quantize import dynamic_cuts
from nf4conv.format.codebook import NESTED_BLOCKSIZE


def compress_absmax(
    absmax: torch.Tensor, codes: torch.Tensor, nested_absmax: torch.Tensor
) -> torch.Tensor:
    """Quantizes absmax to 8 bits, as `reference.compress_absmax` does."""
    offset = cuda_mean(absmax)
    for at in range(0, absmax.numel(), CHUNK):
        centred = absmax[at : at + CHUNK] - offset
        quotients, maxima = scale_blocks(padded_blocks(centred, NESTED_BLOCKSIZE))
        found = nearest_dynamic(quotients.view(-1)[: centred.numel()].numpy())
        codes.numpy()[at : at + CHUNK] = found
        first_block = at // NESTED_BLOCKSIZE
        nested_absmax[first_block : first_block + maxima.numel()] = maxima
    return offset


def nearest_dynamic(quotients: npt.NDArray[np.float32]) -> Bytes:
    """Returns the 8-bit codes of [n] values, none beyond ±1: [n] uint8; NaN has code 0.

    The upper half of a float32 leaves two neighbouring codes to choose from; one comparison
    decides.
    """
    lower, cuts = _dynamic_search()
    upper_halves = quotients.view("<u2")[1::2]
    codes: Bytes = lower[upper_halves]
    codes += quotients > cuts[codes]
    return codes


@cache
def _dynamic_search() -> tuple[Bytes, npt.NDArray[np.float32]]:
    """Returns the tables that find the 8-bit code of a float32 by its upper 16 bits.

    Returns:
        lower: [65536] uint8: the lowest code of the values with these upper bits; the others have
            it or the next. 0 for NaN and infinities.
        cuts: [256] float32: a value above this has the next code; none is above the last.
    """
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lowest = np.where(upper >> 31, upper | 0xFFFF, upper).view(np.float32)
    finite = (upper & 0x7F800000) != 0x7F800000
    cuts = dynamic_cuts(torch.device("cpu")).numpy()
    lower = np.where(finite, np.searchsorted(cuts, np.where(finite, lowest, 0)), 0)
    return lower.astype(np.uint8), np.append(cuts, np.float32(np.inf))
