"""Compares two vectors of floats in float64, as run/device/on_torch/device.py defines it.

A program walks over STEPS tiles and writes one partial result of each kind: the result is the same
from run to run.
"""

import triton.language as tl

from nf4conv.codec.kernels.launch import kernel

TILE = tl.constexpr(1024)  # elements
STEPS = tl.constexpr(16)  # tiles of a program
NUM_WARPS = 4


@kernel
def difference_kernel(a_ptr, b_ptr, sums_ptr, n: tl.int64, programs: tl.int64):
    """Compares STEPS tiles of two vectors.

    Pointers to tensors:
        a_ptr, b_ptr: [n] float32, float16 or bfloat16, each of its own dtype.
        sums_ptr: [4, programs] float64, written: the fields of plan.rows.Errors, in
            their order.
    """
    infinity = float("inf")
    program = tl.program_id(0).to(tl.int64)
    squared_difference = tl.zeros((TILE,), tl.float64)
    squared_values = tl.zeros((TILE,), tl.float64)
    largest = tl.zeros((TILE,), tl.float64)
    differing = tl.zeros((TILE,), tl.float64)
    for step in range(STEPS):
        tile = program * STEPS + step
        index = tile * TILE + tl.arange(0, TILE)
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
