"""1 / x as an NVIDIA GPU's rcp.approx.ftz gives it, to the bit, on any device.

bitsandbytes' CUDA kernels divide by absmax with that instruction, so its rounding is part of the format: 13 % of the
mantissas get a neighbour of the nearest float32, in either direction. The unit is a quadratic in each of 128 segments
of the mantissa, in integers. With the mantissa's upper 7 bits i and lower 16 bits t, the result's mantissa in units of
2^-24 is

    (c0[i] · 2^13 - c1[i] · t + c2[i] · s(t) + 2023) >> 15

s(t) is t² / 2^17 by a multiplier that leaves out every product of two bits below 2^17. Operands and results below the
normal numbers are zeros; the exponent changes nothing else.

The coefficients were found from the instruction's results for all 2^23 mantissas on an H200, which they repeat without
exception (tests/golden/reciprocal.json has their hashes, and exponents 1 to 254). The shape is the one that
S. F. Oberman and M. Y. Siu describe, "A high-performance area-efficient multifunction interpolator", ARITH 2005.
"""

import functools
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

_COEFFICIENTS: Final = """
    4000000 fffe 3f5  3f80fe2 fc0a 3dd  3f03f06 f82d 3c6  3e88cb5 f467 3b1  3e0f83e f0b6 39b  3d980f8 ed1b 386
    3d22638 e995 373  3cae75a e622 35f  3c3c3c4 e2c3 34d  3bcbade df77 33b  3b5cc11 dc3d 329  3aef6cb d914 317
    3a83a85 d5fd 306  3a196b4 d2f7 2f6  39b0ad3 d001 2e6  3949662 cd1b 2d7  38e38e5 ca44 2c7  387f1e2 c77c 2b8
    381c0e2 c4c3 2aa  37ba572 c218 29d  3759f23 bf7b 290  36fad89 bceb 282  369d037 ba69 277  36406ca b7f3 26a
    35e50d9 b589 25d  358ae06 b32c 252  3531dee b0da 246  34da036 ae94 23c  3483486 ac59 231  342da81 aa28 225
    33d91d5 a803 21c  3385a2b a5e7 211  3333335 a3d6 207  32e1ca1 a1cf 1fe  3291620 9fd1 1f5  3241f6b 9ddc 1ea
    31f3833 9bf1 1e2  31a6034 9a0f 1da  3159724 9835 1d1  310dcc1 9664 1c9  30c30c5 949b 1c1  30792f1 92da 1b9
    3030305 9121 1b1  2fe80c2 8f70 1aa  2fa0bea 8dc6 1a2  2f5a443 8c24 19c  2f14992 8a88 193  2ecfb9e 88f4 18d
    2e8ba31 8767 186  2e48511 85e0 17f  2e05c0c 8460 179  2dc3ef0 82e7 173  2d82d85 8174 16e  2d4279c 8006 166
    2d02d04 7e9f 161  2cc3d8e 7d3e 15c  2c8590d 7be2 155  2c47f52 7a8d 151  2c0b02e 793c 14b  2bceb78 77f1 146
    2b93107 76ab 140  2b580b0 756b 13c  2b1da49 742f 136  2ae3da9 72f8 131  2aaaaac 71c7 12e  2a7212c 709a 129
    2a3a100 6f71 123  2a02a04 6e4d 11f  29cbc17 6d2e 11b  2995712 6c13 117  295fad6 6afc 112  292a73f 69ea 10f
    28f5c2b 68db 10a  28c197b 67d1 107  288df0e 66ca 102  285acc6 65c8 100  2828285 64c9 0fb  27f602a 63ce 0f8
    27c459a 62d6 0f3  27932b6 61e2 0f0  2762764 60f2 0ed  2732388 6005 0e9  2702705 5f1c 0e7  26d31c1 5e35 0e2
    26a43a1 5d52 0df  2675c8d 5c73 0de  2647c6b 5b96 0da  261a322 5abc 0d6  25ed09a 59e6 0d4  25c04bb 5912 0d0
    2593f6b 5841 0cd  2568098 5774 0cc  253c827 56a8 0c7  2511604 55e0 0c5  24e6a19 551b 0c4  24bc450 5458 0c1
    2492494 5397 0bd  2468ad1 52d9 0ba  243f6f3 521e 0b8  24168e3 5165 0b6  23ee092 50af 0b4  23c5de9 4ffb 0b2
    239e0d7 4f49 0af  237694a 4e9a 0ad  234f72e 4ded 0ab  2328a71 4d42 0a9  2302304 4c99 0a6  22dc0d3 4bf3 0a5
    22b63ce 4b4e 0a1  2290be4 4aac 0a0  226b904 4a0c 09f  2246b1f 496d 09b  2222224 48d1 09a  21fde04 4837 099
    21d9eaf 479e 096  21b6418 4708 095  2192e2c 4673 093  216fcdf 45e0 091  214d024 454f 08f  212a7e8 44c0 08f
    2108423 4432 08c  20e64c4 43a6 08a  20c49bd 431c 089  20a3301 4293 087  2082084 420c 085  2061239 4187 084
    2040811 4103 083  2020203 4081 082
"""
"""c0, c1, c2 of each segment, hexadecimal."""

_BIAS: Final = 2023
_SMALLEST: Final = np.float32(2.0**-126)
_LARGEST: Final = np.float32(2.0**126)
"""Of the operands whose reciprocals are normal numbers; those of smaller ones are infinite, of larger ones zero."""

Words = npt.NDArray[np.uint32]


@functools.cache
def coefficients() -> Words:
    """[3, 128] uint32: c0, c1, c2."""
    words = [int(word, 16) for word in _COEFFICIENTS.split()]
    return np.ascontiguousarray(np.array(words, dtype=np.uint32).reshape(128, 3).T)


@functools.cache
def _summands() -> Words:
    """[128, 4] uint32: c0 · 2^13 + 2023, c1, c2 of each segment side by side, so that one look finds them; and 0."""
    c0, c1, c2 = coefficients()
    return np.stack([(c0 << 13) + np.uint32(_BIAS), c1, c2, np.zeros_like(c0)], axis=1)


@functools.cache
def _squares() -> Words:
    """[65536] uint32: s(t)."""
    t = np.arange(1 << 16, dtype=np.uint32)
    total = np.zeros_like(t)
    for high in range(9, 16):  # each bit with those below it whose product with it counts, and with itself
        below = (t & ((1 << high) - (1 << (16 - high)))) >> (16 - high)
        total += ((t >> high) & 1) * (below + (1 << (2 * high - 17)))
    return total


def reciprocal(values: torch.Tensor) -> torch.Tensor:
    """float32 1 / x of every float32, in the same shape, as rcp.approx.ftz gives it. Computed on the host."""
    numbers = values.cpu().contiguous().numpy()
    with np.errstate(all="ignore"):
        found = np.reciprocal(numbers)
    # the result is the nearest float32 or a neighbour of it, so its lowest 17 bits tell which
    shift = _lowest_bits(numbers.view(np.uint32))
    shift -= found.view(np.uint32)
    shift <<= 15
    signed_shift = shift.view(np.int32)
    signed_shift >>= 15
    magnitudes = np.abs(numbers)
    if magnitudes.size and magnitudes.min() >= _SMALLEST and magnitudes.max() <= _LARGEST:
        found.view(np.int32)[...] += signed_shift
    else:
        is_ordinary = (magnitudes >= _SMALLEST) & (magnitudes <= _LARGEST)
        found.view(np.int32)[...] += signed_shift * is_ordinary
        found[magnitudes < _SMALLEST] = np.inf
        found[magnitudes > _LARGEST] = 0
        np.copysign(found, numbers, out=found)
    return torch.from_numpy(found).to(values.device)


def _lowest_bits(bits: Words) -> Words:
    """The lowest 17 bits of the result's mantissa, in units of 2^-24; arithmetic modulo 2^32."""
    fraction = bits & 0xFFFF
    segment = (bits >> 16 & 0x7F).astype(np.intp)
    c0, c1, c2, _ = _summands().take(segment, axis=0, mode="clip").reshape(-1, 4).T
    lowest: Words = _squares().take(fraction, mode="clip")  # "clip" spares a look for what is outside
    flat = lowest.reshape(-1)
    flat *= c2
    flat -= c1 * fraction.reshape(-1)
    flat += c0
    flat >>= 15
    return lowest
