"""Blocks of float32, flushed; the quotients of their elements by absmax; and their codes."""

from typing import Final

import torch

from nf4conv.codec.reciprocal import reciprocal
from nf4conv.format.codebook import Codebook

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


def store_codes(codes: torch.Tensor, packed: torch.Tensor) -> None:
    """Packs codes, [rows, blocksize] uint8, in their order into as many bytes as there are.

    The codes of padding behind an odd end fill the last byte; the others behind the end are
    dropped.
    """
    pairs = codes.view(-1, 2)
    all_bytes = (pairs[:, 0] << 4) | pairs[:, 1]
    packed.copy_(all_bytes[: packed.numel()])
