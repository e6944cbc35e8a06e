"""1 / x as an NVIDIA GPU's rcp.approx.ftz gives it, to the bit, on any device.

bitsandbytes' CUDA kernels divide by absmax with that instruction, so its rounding is part of the
format: 13 % of the mantissas get a neighbour of the nearest float32, in either direction.

The instruction computes a quadratic in each of 128 segments of the mantissa, in integers. With the
mantissa's upper 7 bits i and lower 16 bits t, the result's mantissa in units of 2^-24 is

    (c0[i] · 2^13 - c1[i] · t + c2[i] · s(t) + 2023) >> 15

s(t) is t² / 2^17 by a multiplier that leaves out every product of two bits below 2^17. Operands and
results below the normal numbers are zeros; the exponent changes nothing else.

Where this comes from: the shape is the one that S. F. Oberman and M. Y. Siu describe, "A
high-performance area-efficient multifunction interpolator", ARITH 2005. The coefficients were found
from the instruction's results for all 2^23 mantissas on an H200, which they repeat without
exception (tests/golden/reciprocal.json has the hashes of those results, and of exponents 1 to 254).
reciprocal.txt holds c0, c1 and c2 of each segment in hexadecimal.
"""

import functools
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

_BIAS: Final = 2023

# Operands between these have reciprocals that are normal numbers; those of smaller ones are
# infinite, those of larger ones zero.
_SMALLEST: Final = np.float32(2.0**-126)
_LARGEST: Final = np.float32(2.0**126)

Words = npt.NDArray[np.uint32]


@functools.cache
def coefficients() -> Words:
    """Returns c0, c1 and c2 of each segment: [3, 128] uint32."""
    text = Path(__file__).with_suffix(".txt").read_text()
    words = [int(word, 16) for word in text.split()]
    by_segment = np.array(words, dtype=np.uint32).reshape(128, 3)
    return np.ascontiguousarray(by_segment.T)


@functools.cache
def _summands() -> Words:
    """Returns c0 · 2^13 + 2023, c1, c2 and 0 of each segment side by side, so that one look finds
    them: [128, 4] uint32.
    """
    c0, c1, c2 = coefficients()
    return np.stack([(c0 << 13) + np.uint32(_BIAS), c1, c2, np.zeros_like(c0)], axis=1)


@functools.cache
def _squares() -> Words:
    """Returns s(t) for every t: [65536] uint32."""
    t = np.arange(1 << 16, dtype=np.uint32)
    total = np.zeros_like(t)
    for high in range(9, 16):
        # In t² the product of bit `high` and a lower one occurs twice, and counts from 2^17 on;
        # that of `high` with itself occurs once.
        below = (t & ((1 << high) - (1 << (16 - high)))) >> (16 - high)
        itself = 1 << (2 * high - 17)
        total += ((t >> high) & 1) * (below + itself)
    return total


def reciprocal(values: torch.Tensor) -> torch.Tensor:
    """Returns 1 / x as rcp.approx.ftz gives it. The host computes it.

    Args:
        values: float32, of any shape, on any device.

    Returns:
        float32, of that shape, on that device.
    """
    numbers = values.cpu().contiguous().numpy()
    with np.errstate(all="ignore"):
        found = np.reciprocal(numbers)
    # the result is the nearest float32 or a neighbour of it: its lowest 17 bits tell which
    shift = _lowest_bits(numbers.view(np.uint32))
    shift -= found.view(np.uint32)
    shift <<= 15
    signed_shift = shift.view(np.int32)
    signed_shift >>= 15
    magnitudes = np.abs(numbers)
    is_ordinary = (magnitudes >= _SMALLEST) & (magnitudes <= _LARGEST)
    found.view(np.int32)[...] += signed_shift * is_ordinary
    if not is_ordinary.all():
        found[magnitudes < _SMALLEST] = np.inf
        found[magnitudes > _LARGEST] = 0
        np.copysign(found, numbers, out=found)
    return torch.from_numpy(found).to(values.device)


def _lowest_bits(bits: Words) -> Words:
    """Returns the lowest 17 bits of the result's mantissa, in units of 2^-24, by the formula above
    modulo 2^32; the bits above those 17 are of no use.
    """
    fraction = bits & 0xFFFF
    segment = (bits >> 16 & 0x7F).astype(np.intp)
    c0, c1, c2, _ = _summands().take(segment, axis=0, mode="clip").reshape(-1, 4).T
    # mode="clip" spares a look for indices outside the table; there are none
    lowest: Words = _squares().take(fraction, mode="clip")
    flat = lowest.reshape(-1)
    flat *= c2
    flat -= c1 * fraction.reshape(-1)
    flat += c0
    flat >>= 15
    return lowest
