"""Kernels for plain vectors of floats: what the engine without torch asks of them.

Each is launched with NUM_WARPS warps, for the elements that its TILE says.
"""

import torch
import triton.language as tl

from nf4conv.codec.kernels.launch import kernel

NUM_WARPS = 4
DIFFERENCE_TILE = tl.constexpr(1024)  # elements
DIFFERENCE_STEPS = tl.constexpr(16)  # tiles of a program
CAST_TILE = tl.constexpr(4096)  # values that a program casts
FINITE_TILE = tl.constexpr(8192)  # words that a program looks at


@kernel
def difference_kernel(a_ptr, b_ptr, sums_ptr, n: tl.int64, programs: tl.int64):
    """Compares two vectors of floats in float64, as run/device/on_torch/device.py defines it.

    A program walks over DIFFERENCE_STEPS tiles and writes one partial result of each kind: the
    result is the same from run to run.

    Pointers to tensors:
        a_ptr, b_ptr: [n] float32, float16 or bfloat16, each of its own dtype.
        sums_ptr: [4, programs] float64, written: the fields of plan.rows.Errors, in
            their order.
    """
    infinity = float("inf")
    program = tl.program_id(0).to(tl.int64)
    squared_difference = tl.zeros((DIFFERENCE_TILE,), tl.float64)
    squared_values = tl.zeros((DIFFERENCE_TILE,), tl.float64)
    largest = tl.zeros((DIFFERENCE_TILE,), tl.float64)
    differing = tl.zeros((DIFFERENCE_TILE,), tl.float64)
    for step in range(DIFFERENCE_STEPS):
        tile = program * DIFFERENCE_STEPS + step
        index = tile * DIFFERENCE_TILE + tl.arange(0, DIFFERENCE_TILE)
        inside = index < n
        a = tl.load(a_ptr + index, mask=inside, other=0.0)
        b = tl.load(b_ptr + index, mask=inside, other=0.0)
        a = a.to(tl.float32).to(tl.float64)
        b = b.to(tl.float32).to(tl.float64)
        unequal = (a != b) & ((a == a) | (b == b))
        distance = tl.abs(a - b)
        distance = tl.where(distance == distance, distance, infinity)
        distance = tl.where(unequal, distance, 0.0)
        values = tl.where(tl.abs(a) < infinity, a, 0.0)
        squared_difference = tl.fma(distance, distance, squared_difference)
        squared_values = tl.fma(values, values, squared_values)
        largest = tl.maximum(largest, distance)
        differing += tl.where(unequal, 1.0, 0.0)
    squared_difference_ptr = sums_ptr + program
    squared_values_ptr = squared_difference_ptr + programs
    largest_ptr = squared_values_ptr + programs
    differing_ptr = largest_ptr + programs
    tl.store(squared_difference_ptr, tl.sum(squared_difference, axis=0))
    tl.store(squared_values_ptr, tl.sum(squared_values, axis=0))
    tl.store(largest_ptr, tl.max(largest, axis=0))
    tl.store(differing_ptr, tl.sum(differing, axis=0))


@kernel
def cast_kernel(values_ptr, out_ptr, found_ptr, n: tl.int64):
    """Casts values to another float dtype, rounded to nearest even.

    Sets *found_ptr to 1 if a finite one becomes infinite.

    Pointers to tensors:
        values_ptr: [n] float32, float16 or bfloat16, at a multiple of 16 bytes.
        out_ptr: [n] float32, float16 or bfloat16, at a multiple of 16 bytes; written.
        found_ptr: [1] int32, written only if there is one.
    """
    index = tl.program_id(0).to(tl.int64) * CAST_TILE + tl.arange(0, CAST_TILE)
    inside = index < n
    value = tl.load(tl.multiple_of(values_ptr, 16) + index, mask=inside, other=0.0)
    cast = value.to(out_ptr.dtype.element_ty)
    tl.store(tl.multiple_of(out_ptr, 16) + index, cast, mask=inside)
    became_infinite = tl.abs(cast.to(tl.float32)) == float("inf")
    lost = became_infinite & (tl.abs(value.to(tl.float32)) != float("inf"))
    if tl.max(lost.to(tl.int32), axis=0) != 0:
        tl.store(found_ptr, 1)


def exponent_mask(dtype: torch.dtype) -> int:
    """Returns the exponent bits of a value, which are all set in NaN and infinity."""
    return {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[dtype]


@kernel
def non_finite_kernel(
    values_ptr, found_ptr, words: tl.int64, EXPONENT: tl.constexpr, HALVES: tl.constexpr
):
    """Sets *found_ptr to 1 if a value's exponent bits are all set.

    Pointers to tensors:
        values_ptr: [words] int32, each one float32 or two half-precision values.
        found_ptr: [1] int32, written only if there is one.

    Constexprs:
        EXPONENT: mask of the exponent bits of one value.
        HALVES: True if a word holds two values.
    """
    index = tl.program_id(0).to(tl.int64) * FINITE_TILE + tl.arange(0, FINITE_TILE)
    word = tl.load(values_ptr + index, mask=index < words, other=0)
    found = (word & EXPONENT) == EXPONENT
    if HALVES:
        found = found | (((word >> 16) & EXPONENT) == EXPONENT)
    if tl.max(found.to(tl.int32), axis=0) != 0:
        tl.store(found_ptr, 1)
