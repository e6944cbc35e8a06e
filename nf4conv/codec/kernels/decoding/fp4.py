"""Decodes MXFP4 and NVFP4, pairs of E2M1 values with scales: one pass, one launch.

The arithmetic is that of codec/decode/fp4.py.
"""

import triton
import triton.language as tl

from nf4conv.codec.kernels.decoding.scaled import signed, to_float
from nf4conv.codec.kernels.launch import kernel

TILE_ROWS = tl.constexpr(4)  # of a program
TILE_PAIRS = tl.constexpr(256)  # of a program
NUM_WARPS = 4


@kernel
def fp4_kernel(
    values_ptr,
    scale_ptr,
    divisor_ptr,
    multiplier_ptr,
    out_ptr,
    rows: tl.int64,
    pairs: tl.int64,
    pair_tiles: tl.int64,
    groups: tl.int64,
    GROUP_PAIRS: tl.constexpr,
    SCALE: tl.constexpr,
    DIVIDE: tl.constexpr,
    MULTIPLY: tl.constexpr,
    ALIGNED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Decodes TILE_ROWS rows of TILE_PAIRS pairs.

    Pointers to tensors:
        values_ptr: [rows, pairs] uint8, the low nibble first.
        scale_ptr: [rows, groups] 8-bit, of the kind SCALE, one for GROUP_PAIRS pairs.
        divisor_ptr, multiplier_ptr: [1] float; read where DIVIDE, MULTIPLY.
        out_ptr: [rows, 2 * pairs] float32, float16 or bfloat16, written; transposed where
            TRANSPOSED.

    Scalars:
        pair_tiles: programs for the pairs of one row.

    Constexprs:
        ALIGNED: True if pointers are multiples of 16 bytes, and rows of 16 pairs.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // pair_tiles * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    first = program % pair_tiles * TILE_PAIRS
    pair = first + tl.arange(0, TILE_PAIRS)[None, :]
    inside = (row < rows) & (pair < pairs)
    if ALIGNED:
        pairs = tl.multiple_of(pairs, 16)
        values_ptr = tl.multiple_of(values_ptr, 16)
        out_ptr = tl.multiple_of(out_ptr, 16)
    codes = tl.load(values_ptr + row * pairs + pair, mask=inside, other=0).to(tl.int32)
    group_ptr = scale_ptr + row * groups + pair // GROUP_PAIRS
    scale = to_float(tl.load(group_ptr, mask=inside, other=0), SCALE)
    if DIVIDE:
        divisor = tl.zeros(scale.shape, tl.float32) + tl.load(divisor_ptr).to(tl.float32)
        scale = tl.div_rn(scale, divisor)
    if MULTIPLY:
        scale = scale * tl.load(multiplier_ptr).to(tl.float32)
    values = tl.interleave(_e2m1(codes & 15) * scale, _e2m1(codes >> 4) * scale)
    column = first * 2 + tl.arange(0, 2 * TILE_PAIRS)[None, :]
    index = column * rows + row if TRANSPOSED else row * pairs * 2 + column
    inside = (row < rows) & (column < pairs * 2)
    tl.store(out_ptr + index, values.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _e2m1(code):
    """Returns the values of 4-bit codes: a sign, two bits of exponent, one of mantissa.

    -0.0 keeps its sign.
    """
    magnitude = code & 7
    normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    return signed(tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal), code >> 3)
