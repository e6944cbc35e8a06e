"""Blocks of float32, flushed, and the quotients of their elements by absmax."""

from typing import Final

import torch

from nf4conv.codec.reciprocal import reciprocal

_TINIEST: Final = torch.finfo(torch.float32).tiny
_FLT_MAX: Final = torch.finfo(torch.float32).max

CHUNK: Final = 7 << 12
"""Elements worked on at a time: a multiple of any blocksize, and less than 2^15.

On a CPU torch calls its threads together from 2^15 elements on. They would come for every operation
of some 10 µs, and on a busy machine each time wait for the one that sleeps. (Indexing by a tensor
calls them at any size, which is why the reference uses `index_select`.)
"""


def padded_blocks(values: torch.Tensor, blocksize: int) -> torch.Tensor:
    """Cuts [n] values of any float type into blocks, [blocks, blocksize] float32, flushed, with
    zeros past their end.
    """
    flat = values.float()
    padding = -flat.numel() % blocksize
    padded = torch.nn.functional.pad(flat, (0, padding))
    return flushed(padded.view(-1, blocksize))


def flushed(values: torch.Tensor) -> torch.Tensor:
    """Returns values with denormals replaced by zeros of their sign; NaN and infinities stay."""
    return values * (values.abs() >= _TINIEST)


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
