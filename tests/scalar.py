"""The arithmetic once more, an element at a time in numpy float32: slow, and written without a look at the package.

Only the cut points are shared; test_codebook.py holds them to bitsandbytes' literals.
"""

import numpy as np

from nf4conv.codec.reciprocal import coefficients
from nf4conv.format.codebook import DYNAMIC_MAP, FP4, NF4

NF4_CUTS = [np.float32(cut) for cut in NF4.cuts]
FP4_CUTS = [np.float32(cut) for cut in FP4.cuts]
DYNAMIC = [np.float32(value) for value in DYNAMIC_MAP]
SMALLEST = np.float32(2.0**-126)
LARGEST = np.finfo(np.float32).max


def flush(value: np.float32) -> np.float32:
    return np.float32(np.copysign(np.float32(0), value)) if abs(value) < SMALLEST else value


def block_absmax(block: list[np.float32]) -> np.float32:
    largest = -LARGEST
    for value in block:
        magnitude = abs(flush(value))
        if magnitude > largest:  # false for NaN
            largest = magnitude
    return largest


def reciprocal(value: np.float32) -> np.float32:
    """As codec/reciprocal.py describes it, one bit at a time; held to the GPU by test_reciprocal.py."""
    value = flush(value)
    if value == 0 or not np.isfinite(value):
        with np.errstate(divide="ignore"):
            return np.float32(1) / value
    bits = int(np.abs(value).view(np.uint32))
    c0, c1, c2 = (int(row[bits >> 16 & 127]) for row in coefficients())
    fraction = bits & 0xFFFF
    ones = [index for index in range(16) if fraction >> index & 1]
    kept = [1 << left + right for left in ones for right in ones if left != right and left + right >= 16]
    square = (sum(kept) + sum(1 << 2 * index for index in ones if 2 * index >= 17)) >> 17
    mantissa = (c0 * 2**13 - c1 * fraction + c2 * square + 2023) // 2**15
    return np.copysign(flush(np.float32(np.ldexp(mantissa, 127 - 24 - (bits >> 23)))), value)


def product(left: np.float32, right: np.float32) -> np.float32:
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return flush(flush(left) * flush(right))


def nf4_code(scaled: np.float32) -> int:
    code = 0
    for cut in NF4_CUTS:
        if not scaled > cut:
            return code
        code += 1
    return code


def fp4_code(scaled: np.float32) -> int:
    """The decision tree of the CUDA kernel, on the magnitude."""
    sign = 8 if scaled < 0 else 0
    one, six, seven, four, five, two, three = FP4_CUTS
    m = abs(scaled)
    if m > four:
        if m > two:
            return sign + (3 if m > three else 2)
        return sign + (5 if m > five else 4)
    if m > six:
        return sign + (7 if m > seven else 6)
    return sign + (1 if m > one else 0)


def quantize(values: np.ndarray, quant_type: str, blocksize: int) -> tuple[bytes, np.ndarray]:
    """[n] float32 → packed bytes, [blocks] float32."""
    find = nf4_code if quant_type == "nf4" else fp4_code
    codes: list[int] = []
    maxima: list[np.float32] = []
    for start in range(0, len(values), blocksize):
        kept = [np.float32(value) for value in values[start : start + blocksize]]
        block = kept + [np.float32(0)] * (blocksize - len(kept))
        absmax = block_absmax(block)
        scale = reciprocal(absmax)
        maxima.append(absmax)
        codes += [find(product(value, scale)) for value in block]
    count = -(-len(values) // 2)
    return bytes(codes[2 * i] * 16 + codes[2 * i + 1] for i in range(count)), np.array(maxima, dtype=np.float32)


def dynamic_code(scaled: np.float32) -> int:
    """A binary search over the odd codes, then a look at the two neighbours; a tie goes to the even code."""
    pivot, step = 127, 64
    while step:
        pivot += step if scaled > DYNAMIC[pivot] else -step
        step //= 2
    half = np.float32(0.5)
    if scaled > DYNAMIC[pivot]:
        upper = min(pivot + 1, 255)
        return upper if scaled > (DYNAMIC[pivot] + DYNAMIC[upper]) * half else pivot
    lower = max(pivot - 1, 0)
    return lower if scaled < (DYNAMIC[lower] + DYNAMIC[pivot]) * half else pivot


def compress(absmax: np.ndarray, offset: np.float32) -> tuple[bytes, np.ndarray]:
    codes: list[int] = []
    maxima: list[np.float32] = []
    for start in range(0, len(absmax), 256):
        with np.errstate(invalid="ignore"):
            block = [np.float32(value) - offset for value in absmax[start : start + 256]]
        peak = block_absmax(block + [np.float32(0)] * (256 - len(block)))
        scale = reciprocal(peak)
        maxima.append(peak)
        codes += [dynamic_code(product(value, scale)) for value in block]
    return bytes(codes), np.array(maxima, dtype=np.float32)
