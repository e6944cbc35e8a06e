"""The arithmetic once more, an element at a time in numpy float32: slow, and written without a look
at the package.

Only the cut points are shared; test_codebook.py holds them to bitsandbytes' literals.
"""

import numpy as np

from nf4conv.codec.reciprocal import coefficients
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP

NF4_CUTS = [np.float32(cut) for cut in CODEBOOKS["nf4"].cuts]
FP4_CUTS = [np.float32(cut) for cut in CODEBOOKS["fp4"].cuts]
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
    """Computes 1 / x one bit at a time, as codec/reciprocal.py describes it. test_reciprocal.py
    compares it with the GPU.
    """
    value = flush(value)
    if value == 0 or not np.isfinite(value):
        with np.errstate(divide="ignore"):
            return np.float32(1) / value
    bits = int(np.abs(value).view(np.uint32))
    c0, c1, c2 = (int(row[bits >> 16 & 127]) for row in coefficients())
    fraction = bits & 0xFFFF
    ones = [index for index in range(16) if fraction >> index & 1]
    kept = [
        1 << left + right for left in ones for right in ones if left != right and left + right >= 16
    ]
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
    return bytes(codes[2 * i] * 16 + codes[2 * i + 1] for i in range(count)), np.array(
        maxima, dtype=np.float32
    )


def dynamic_code(scaled: np.float32) -> int:
    """A binary search over the odd codes, then a look at the two neighbours; a tie goes to the even
    code.
    """
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


FACTORS = [
    number / 1024
    for number in (
        512,
        592,
        664,
        728,
        760,
        792,
        824,
        856,
        888,
        920,
        952,
        984,
        1016,
        1048,
        1080,
        1112,
    )
]


def rounded(value: float) -> int:
    """To the nearest integer, ties to even."""
    return round(float(value))


def code_of(value: np.float32, scale: np.float32, quant_type: str) -> int:
    scaled = product(value, reciprocal(scale))
    return nf4_code(scaled) if quant_type == "nf4" else fp4_code(scaled)


def cost(
    block: list[np.float32], scale: np.float32, codes: list[int], values: list[np.float32]
) -> int:
    errors = [x - values[code] * scale for x, code in zip(block, codes, strict=True)]
    return sum(rounded(error * error * np.float32(2**18)) for error in errors)


def searched_scale(block: list[np.float32], top: np.float32, quant_type: str) -> np.float32:
    """Returns the result of the search and its step, for a block without NaN whose absmax is from 1
    to 2.
    """
    unit = np.float32(1024) / top
    positions = [rounded(x * unit) for x in block]
    least: tuple[int, float, list[int]] | None = None
    for factor in FACTORS:
        for signed in (factor, -factor) if quant_type == "nf4" else (factor,):
            levels = sorted(
                {rounded(signed * 1024 * value) for value in CODEBOOKS[quant_type].values}
            )
            nearest = [min(levels, key=lambda level: (abs(p - level), level)) for p in positions]
            error = sum((p - level) ** 2 for p, level in zip(positions, nearest, strict=True))
            if least is None or error < least[0]:
                least = error, signed, nearest
    assert least is not None
    _, signed, nearest = least
    shift = sum((p - level) * level for p, level in zip(positions, nearest, strict=True))
    square = sum(level * level // 16 for level in nearest)
    stepped = np.float32(abs(signed)) * (
        np.float32(1) + np.float32(shift) / np.float32(square) / np.float32(16)
    )
    stepped = min(max(stepped, np.float32(0.5)), np.float32(1.25))
    return top * (stepped if signed > 0 else -stepped)


def searched_block(block: list[np.float32], quant_type: str) -> tuple[list[int], np.float32]:
    """The codes and the scale of a block that is full."""
    absmax = block_absmax(block)
    if not 2.0**-100 <= absmax <= 2.0**100:
        return [code_of(x, absmax, quant_type) for x in block], absmax
    power = np.float32(2.0 ** (np.frexp(absmax)[1] - 1))
    with np.errstate(under="ignore"):
        scaled = [flush(flush(x) / power) for x in block]
    known = [np.float32(0) if np.isnan(x) else x for x in scaled]
    top = absmax / power
    found = searched_scale(known, top, quant_type)
    values = [np.float32(value) for value in CODEBOOKS[quant_type].values]
    codes, kept = ([code_of(x, scale, quant_type) for x in scaled] for scale in (found, top))
    with np.errstate(under="ignore"):
        is_better = cost(known, found, codes, values) + 2 * len(block) <= cost(
            known, top, kept, values
        )
    return (codes, found * power) if is_better else (kept, absmax)


def search(values: np.ndarray, quant_type: str, blocksize: int) -> tuple[bytes, np.ndarray]:
    """Quantizes like `quantize`, with the scales that the search finds."""
    codes: list[int] = []
    scales: list[np.float32] = []
    for start in range(0, len(values), blocksize):
        kept = [np.float32(value) for value in values[start : start + blocksize]]
        found, scale = searched_block(kept + [np.float32(0)] * (blocksize - len(kept)), quant_type)
        codes += found
        scales.append(scale)
    count = -(-len(values) // 2)
    return bytes(codes[2 * i] * 16 + codes[2 * i + 1] for i in range(count)), np.array(
        scales, dtype=np.float32
    )
