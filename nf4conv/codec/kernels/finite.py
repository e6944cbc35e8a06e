"""Whether any of many values is NaN or infinite: one pass over their bits."""

import triton
import triton.language as tl

TILE = 8192
NUM_WARPS = 4


@triton.jit(do_not_specialize=["words"], do_not_specialize_on_alignment=["values_ptr", "found_ptr"])
def non_finite_kernel(values_ptr, found_ptr, words: tl.int64, EXPONENT: tl.constexpr, HALVES: tl.constexpr):
    """Set *found_ptr to 1 if a value's exponent bits are all set.

    Args:
        values_ptr: int32 words, each one float32 or two half-precision values.
        found_ptr: int32, written only if there is one.
        words: how many.
        EXPONENT: mask of the exponent bits of one value.
        HALVES: whether a word holds two values.
    """
    index = tl.program_id(0).to(tl.int64) * 8192 + tl.arange(0, 8192)
    word = tl.load(values_ptr + index, mask=index < words, other=0)
    found = (word & EXPONENT) == EXPONENT
    if HALVES:
        found = found | (((word >> 16) & EXPONENT) == EXPONENT)
    if tl.max(found.to(tl.int32), axis=0) != 0:
        tl.store(found_ptr, 1)
