"""Quotients → numbers of cuts → bytes of codes; and the magnitudes of blocks before that."""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from nf4conv.format.codebook import Codebook

COMPARED: Final = 1 << 15
"""Elements compared at a time: half a megabyte of answers to all cuts, to be added up before they
leave the cache.
"""

TINIEST: Final = float(np.finfo(np.float32).tiny)

Bytes = npt.NDArray[np.uint8]


class Scratch:
    """The temporaries of one thread, for chunks of up to n elements: `values` for quotients,
    `magnitudes` for values without signs, `codes`; and `hits`, [cuts, up to COMPARED], which says
    of each value whether it is above a cut.
    """

    def __init__(self, elements: int, codebook: Codebook) -> None:
        self.values = torch.empty(elements, dtype=torch.float32, device="cpu")
        self.magnitudes = torch.empty(elements, dtype=torch.float32, device="cpu")
        self.hits = np.empty((len(codebook.cuts), min(elements, COMPARED)), dtype=np.bool_)
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


def count_cuts(quotients: torch.Tensor, codebook: Codebook, scratch: Scratch) -> Bytes:
    """Returns the number of cuts below each of n quotients, [n] uint8; it lies in the scratch."""
    cuts = np.array(codebook.cuts, dtype=np.float32)[:, None]
    values = quotients.view(-1).numpy()
    counts = scratch.codes[: values.size]
    for start in range(0, values.size, COMPARED):
        stop = min(start + COMPARED, values.size)
        hits = scratch.hits[:, : stop - start]
        np.greater(values[start:stop], cuts, out=hits)
        np.add.reduce(hits.view(np.uint8), axis=0, dtype=np.uint8, out=counts[start:stop])
    return counts


def pair_codes(counts: Bytes, codebook: Codebook) -> npt.NDArray[np.uint16]:
    """Packs codes, the even one in the high nibble: [n] numbers of cuts, of FP4 plus 8 for a sign,
    become [n / 2] bytes, each in a word of 16 bits. Overwrites `counts`.

    FP4's codes are 0, 1, 6, 7, 4, 5, 2, 3 in the order of their magnitudes: the number of cuts
    below, but with bit 2 turned round where bit 1 is set.
    """
    pairs = counts.view("<u2")  # even + 256 · odd
    pairs *= 0x1001  # its high byte is now odd + 16 · even
    pairs >>= 8
    if not codebook.signed_cuts:
        pairs ^= (pairs & 0x22) << 1
    return pairs
