"""Kernels for plain vectors of floats: what the engine without torch asks of them.

Each is launched with NUM_WARPS warps, for the elements that its TILE says.
"""

import torch
import triton.language as tl

from nf4conv.codec.kernels.launch import kernel

NUM_WARPS = 4
CAST_TILE = tl.constexpr(4096)  # values that a program casts
FINITE_TILE = tl.constexpr(8192)  # words that a program looks at


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
