"""Finds NaN and infinity: the engine without torch looks for them before it packs a weight."""

import torch
import triton.language as tl

from nf4conv.codec.kernels.launch import kernel

TILE = tl.constexpr(8192)  # words that a program looks at
NUM_WARPS = 4


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
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    word = tl.load(values_ptr + index, mask=index < words, other=0)
    found = (word & EXPONENT) == EXPONENT
    if HALVES:
        found = found | (((word >> 16) & EXPONENT) == EXPONENT)
    if tl.max(found.to(tl.int32), axis=0) != 0:
        tl.store(found_ptr, 1)
