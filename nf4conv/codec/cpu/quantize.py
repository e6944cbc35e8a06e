"""Blocks → packed codes and absmax."""

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from nf4conv.codec.cpu.cuts import (
    COMPARED,
    TINIEST,
    Bytes,
    Scratch,
    count_cuts,
    find_absmax,
    pair_codes,
    without_signs,
)
from nf4conv.codec.reciprocal import reciprocal
from nf4conv.format.codebook import Codebook

# What is flushed, less than 2^-126, then scales to less than 2^-26: no cut is that near 0.
_MIN_ABSMAX: Final = 2.0**-100
_MAX_ABSMAX: Final = 2.0**126  # the reciprocal of anything larger is flushed


def write_quantized(
    blocks: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: Codebook,
    scratch: Scratch,
) -> torch.Tensor:
    """Quantizes [rows, blocksize] of any float type; returns which blocks are special."""
    is_float32 = blocks.dtype == torch.float32
    magnitudes = blocks
    if not is_float32 or not codebook.signed_cuts:  # find_absmax takes float32 with its signs
        magnitudes = without_signs(blocks, scratch)
    reciprocals = _reciprocals(find_absmax(magnitudes, absmax))[:, None]
    dividends = blocks if codebook.signed_cuts else magnitudes
    quotients = scratch.values[: blocks.numel()].view(blocks.shape)
    if is_float32:
        torch.mul(dividends, reciprocals, out=quotients)
    else:  # torch is slow to multiply what it has to convert
        quotients.copy_(dividends).mul_(reciprocals)
    codes = count_cuts(quotients, codebook, scratch)
    if not codebook.signed_cuts:
        _add_signs(codes, blocks, quotients.view(-1).numpy())
    np.copyto(packed.view(-1).numpy(), pair_codes(codes, codebook), casting="unsafe")
    return ~((absmax >= _MIN_ABSMAX) & (absmax <= _MAX_ABSMAX))


def _reciprocals(absmax: torch.Tensor) -> torch.Tensor:
    """Returns 1 / absmax, [rows] float32; for 16-bit dtypes from a table of all numbers."""
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


def _add_signs(codes: Bytes, blocks: torch.Tensor, magnitudes: npt.NDArray[np.float32]) -> None:
    """Adds 8 to the codes, [n] uint8, of negative values, given the magnitudes of their quotients.

    What is flushed to zero, before or after it is divided by absmax, has no sign.
    """
    bits = _unsigned_bits(blocks)
    # as unsigned numbers, negative floats from this one on are larger; in float16 it is -0
    least = _unsigned_bits(torch.tensor([-TINIEST], dtype=blocks.dtype, device="cpu"))
    for at in range(0, magnitudes.size, COMPARED):
        piece = slice(at, at + COMPARED)
        negative = bits[piece] >= least
        negative &= magnitudes[piece] >= TINIEST
        codes[piece] += negative.view(np.uint8) << 3


def _unsigned_bits(values: torch.Tensor) -> npt.NDArray[np.unsignedinteger]:
    """Views floats as unsigned integers, [n], of their size."""
    if values.itemsize == 4:
        return values.view(-1).view(torch.int32).numpy().view(np.uint32)
    return values.view(-1).view(torch.int16).numpy().view(np.uint16)
