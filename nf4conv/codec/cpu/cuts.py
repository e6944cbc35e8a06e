"""Quotients → bytes of codes; and the magnitudes of blocks before that."""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from nf4conv.format.codebook import Codebook

_COMPARED: Final = 1 << 15
"""Elements compared at a time: half a megabyte of answers to all cuts, to be added up before they
leave the cache.
"""

_TINIEST: Final = float(np.finfo(np.float32).tiny)


class Scratch:
    """The temporaries of one thread, for chunks of up to n elements: `values` for quotients,
    `magnitudes` for values without signs, `codes`; and `hits`, [cuts, up to _COMPARED], which says
    of each value whether it is above a cut.
    """

    def __init__(self, elements: int, codebook: Codebook) -> None:
        self.values = torch.empty(elements, dtype=torch.float32, device="cpu")
        self.magnitudes = torch.empty(elements, dtype=torch.float32, device="cpu")
        self.hits = np.empty((len(codebook.cuts), min(elements, _COMPARED)), dtype=np.bool_)
        self.codes = np.empty(elements, dtype=np.uint8)


def without_signs(blocks: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Returns the magnitudes of blocks, in their dtype; they lie in the scratch."""
    count = blocks.numel()
    if blocks.dtype == torch.float32:
        magnitudes = scratch.magnitudes[:count].view(blocks.shape)
        return torch.abs(blocks, out=magnitudes)
    bits = scratch.magnitudes.view(torch.int16)[:count].view(blocks.shape)
    torch.bitwise_and(blocks.view(torch.int16), 0x7FFF, out=bits)
    return bits.view(blocks.dtype)


def find_absmax(magnitudes: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """Writes the largest magnitude of each row, NaN where there is one; returns the same numbers in
    the dtype of the magnitudes, [rows, blocksize] without signs (float32 may have them).
    """
    if magnitudes.dtype == torch.float32:
        largest = torch.amax(magnitudes, dim=1)
        least = torch.amin(magnitudes, dim=1)
        return torch.maximum(largest, -least, out=absmax)
    # without their sign the bits of floats are ordered as the floats are, NaN last; they are half
    # the bytes of float32
    largest = torch.amax(magnitudes.view(torch.int16), dim=1).view(magnitudes.dtype)
    absmax.copy_(largest)
    return largest


def are_negative(values: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Tells which of n values are negative and not flushed to zero: [n]."""
    negative: npt.NDArray[np.bool_] = values.view(-1).numpy() <= -_TINIEST
    return negative


def pack(
    quotients: torch.Tensor,
    negative: npt.NDArray[np.bool_] | None,
    codebook: Codebook,
    scratch: Scratch,
) -> npt.NDArray[np.uint16]:
    """Packs n quotients, which lose their sign: [n / 2] bytes, each in a word of 16 bits.

    `negative` says of FP4, whose smallest negative values have a code of their own, which values
    are negative; it is None for NF4. The result lies in the scratch.

    FP4's codes are 0, 1, 6, 7, 4, 5, 2, 3 in the order of their magnitudes: the number of cuts
    below, but with bit 2 turned round where bit 1 is set.
    """
    cuts = np.array(codebook.cuts, dtype=np.float32)[:, None]
    if negative is not None:
        negative = negative & are_negative(quotients)
        quotients.abs_()
    values = quotients.view(-1).numpy()
    codes = scratch.codes[: values.size]
    for start in range(0, values.size, _COMPARED):
        stop = min(start + _COMPARED, values.size)
        hits = scratch.hits[:, : stop - start]
        np.greater(values[start:stop], cuts, out=hits)
        np.add.reduce(hits.view(np.uint8), axis=0, dtype=np.uint8, out=codes[start:stop])
    if negative is not None:
        codes += negative.view(np.uint8) << 3
    pairs = codes.view("<u2")  # even + 256 · odd
    pairs *= 0x1001  # its high byte is now odd + 16 · even
    pairs >>= 8
    if negative is not None:
        pairs ^= (pairs & 0x22) << 1
    return pairs
