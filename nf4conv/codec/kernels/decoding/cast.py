"""Casts values to another float dtype, rounded to nearest even, in one launch."""

import triton.language as tl

from nf4conv.codec.kernels.launch import kernel

TILE = tl.constexpr(4096)  # values that a program casts
NUM_WARPS = 4


@kernel
def cast_kernel(values_ptr, out_ptr, found_ptr, n: tl.int64):
    """Casts TILE values; sets *found_ptr to 1 if a finite one becomes infinite.

    Pointers to tensors:
        values_ptr: [n] float32, float16 or bfloat16, at a multiple of 16 bytes.
        out_ptr: [n] float32, float16 or bfloat16, at a multiple of 16 bytes; written.
        found_ptr: [1] int32, written only if there is one.
    """
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = index < n
    value = tl.load(tl.multiple_of(values_ptr, 16) + index, mask=inside, other=0.0)
    cast = value.to(out_ptr.dtype.element_ty)
    tl.store(tl.multiple_of(out_ptr, 16) + index, cast, mask=inside)
    became_infinite = tl.abs(cast.to(tl.float32)) == float("inf")
    lost = became_infinite & (tl.abs(value.to(tl.float32)) != float("inf"))
    if tl.max(lost.to(tl.int32), axis=0) != 0:
        tl.store(found_ptr, 1)
