"""Decodes 8-bit values, or pairs of E2M1 values, with scales: one pass, one launch.

The arithmetic is that of codec/decode/floats.py. A byte is FP8 E4M3 or E5M2, INT8, or E8M0, a power
of two (OCP Microscaling Formats v1.0, section 5).
"""

from typing import Final

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import kernel
from nf4conv.codec.kernels.slots import tile_of_program

TILE_ROWS = tl.constexpr(4)  # of a program
TILE_COLUMNS = tl.constexpr(512)  # of a program
TILE_PAIRS = tl.constexpr(256)  # of E2M1, of a program
NUM_WARPS = 4

# Kinds of stored numbers: constexprs of kernels.
E4M3 = tl.constexpr(0)
E5M2 = tl.constexpr(1)
INT8 = tl.constexpr(2)
E8M0 = tl.constexpr(3)
FLOAT = tl.constexpr(4)  # not a byte: float32, float16 or bfloat16

KINDS: Final[dict[torch.dtype, int]] = {
    torch.float8_e4m3fn: E4M3.value,
    torch.float8_e5m2: E5M2.value,
    torch.int8: INT8.value,
    torch.uint8: E8M0.value,
    torch.float8_e8m0fnu: E8M0.value,
}
"""The kind of the bytes of a dtype; other dtypes are FLOAT."""


def kind_of(dtype: torch.dtype) -> int:
    """Returns the kind of the elements of a tensor."""
    return KINDS.get(dtype, int(FLOAT.value))


def stored(dtype: torch.dtype) -> torch.dtype:
    """Returns as what kernels take a dtype: bytes as uint8."""
    return torch.uint8 if dtype in KINDS else dtype


@triton.jit
def to_float(stored, KIND: tl.constexpr):
    """Returns stored numbers of a kind as float32.

    The result is exact, also of subnormal numbers, NaN and the infinities of E5M2.
    """
    if KIND == FLOAT:
        return stored.to(tl.float32)
    byte = stored.to(tl.int32)
    if KIND == INT8:
        return ((byte << 24) >> 24).to(tl.float32)
    elif KIND == E8M0:
        # 0 is 2^-127, a subnormal float32; 255 is NaN
        bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
        return bits.to(tl.float32, bitcast=True)
    elif KIND == E5M2:
        return (byte << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        magnitude = byte & 0x7F
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        # subnormal E4M3 are multiples of 2^-9
        value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        return signed(tl.where(magnitude == 0x7F, float("nan"), value), byte >> 7)


@triton.jit
def signed(value, negative):
    """Gives float32 numbers that are not negative a sign bit; Triton's own minus would lose that of
    zero.
    """
    return (value.to(tl.int32, bitcast=True) | (negative << 31)).to(tl.float32, bitcast=True)


@kernel
def scaled_kernel(
    values_ptr,
    scale_ptr,
    out_ptr,
    rows: tl.int64,
    columns: tl.int64,
    column_tiles: tl.int64,
    row_stride: tl.int64,
    column_stride: tl.int64,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    SCALE: tl.constexpr,
    BY_127: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Decodes TILE_ROWS rows of TILE_COLUMNS columns.

    Pointers to tensors:
        values_ptr: [rows, columns] 8-bit, of the kind VALUES.
        scale_ptr: one for each block of HEIGHT rows and WIDTH columns, of the kind SCALE.
        out_ptr: [rows, columns] float32, float16 or bfloat16, written.

    Scalars:
        column_tiles: programs for the columns of one row.
        row_stride, column_stride: of the scales, in elements; 0 if one scale serves all rows, or
            all columns.

    Constexprs:
        BY_127: True to multiply each product by 1 / 127 too.
        ALIGNED: True if pointers and rows are multiples of 16 values.
    """
    row, column, inside = tile_of_program(rows, columns, column_tiles, TILE_ROWS, TILE_COLUMNS)
    if ALIGNED:
        columns = tl.multiple_of(columns, 16)
        values_ptr = tl.multiple_of(values_ptr, 16)
        out_ptr = tl.multiple_of(out_ptr, 16)
    index = row * columns + column
    value = to_float(tl.load(values_ptr + index, mask=inside, other=0), VALUES)
    place = (row // HEIGHT) * row_stride + (column // WIDTH) * column_stride
    scale = to_float(tl.load(scale_ptr + place, mask=inside, other=0), SCALE)
    value = value * scale
    if BY_127:
        value = value * 0.007874015748031496  # 1 / 127
    tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask=inside)


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
