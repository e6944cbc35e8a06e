"""Decodes a matrix of GGUF's blocks, and puts its rows back in order: one pass, one launch.

A thread decodes a value at a time, and loads the scale of its group for each: those loads come from
the L1 cache, and the upload takes longer. The arithmetic is that of codec/decode/ggml.py, step by
step, so that no bit differs. Types are told apart by their numbers in ggml.h.
"""

from typing import Final

import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import kernel
from nf4conv.format.gguf import BLOCK_TYPES, FUSED, PLUS_ONE, ROTARY, TRANSPOSED

TILE_ROWS = tl.constexpr(4)  # of a program
TILE_COLUMNS = tl.constexpr(512)  # of a program
NUM_WARPS = 8

_F32 = tl.constexpr(0)
_F16 = tl.constexpr(1)

# Where rows are written: constexprs of kernels.
AS_STORED = tl.constexpr(0)
IN_HALVES = tl.constexpr(1)  # each head's even rows, then its odd rows
IN_GROUPS = tl.constexpr(2)  # queries that share a key, that key, and its value
AS_COLUMNS = tl.constexpr(3)

_ORDERS: Final = {ROTARY: IN_HALVES, FUSED: IN_GROUPS, TRANSPOSED: AS_COLUMNS}
"""Where rows are written to undo what llama.cpp's converter did."""

# How a type is decoded: constexprs of kernels.
PLAIN = tl.constexpr(0)  # a value is stored as it is
ONE_SCALE = tl.constexpr(1)
NESTED_SCALES = tl.constexpr(2)

_Q4_0 = tl.constexpr(2)
_Q4_1 = tl.constexpr(3)
_Q5_0 = tl.constexpr(6)
_Q5_1 = tl.constexpr(7)
_Q2_K = tl.constexpr(10)
_Q3_K = tl.constexpr(11)
_Q4_K = tl.constexpr(12)
_Q5_K = tl.constexpr(13)


def constants(number: int, changed: str | None) -> tuple[int, int, int, int, int, bool]:
    """Returns the constexprs of the kernel, in their order, for a block type's number in ggml.h and
    what llama.cpp's converter did, a word of format/gguf.py or None.
    """
    _, values, size = BLOCK_TYPES[number]
    order = AS_STORED if changed is None else _ORDERS.get(changed, AS_STORED)
    return _kind_of(number), number, values, size, int(order.value), changed == PLUS_ONE


def _kind_of(number: int) -> int:
    """Returns how a type is decoded, by its number."""
    if BLOCK_TYPES[number].values == 1:
        return int(PLAIN.value)
    return int(NESTED_SCALES.value if BLOCK_TYPES[number].values == 256 else ONE_SCALE.value)


@kernel
def ggml_kernel(
    values_ptr,
    out_ptr,
    rows: tl.int64,
    columns: tl.int64,
    tiles: tl.int64,
    row_bytes: tl.int64,
    heads: tl.int64,
    key_value_heads: tl.int64,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    VALUES: tl.constexpr,
    SIZE: tl.constexpr,
    ORDER: tl.constexpr,
    SUBTRACTS_ONE: tl.constexpr,
):
    """Decodes TILE_ROWS rows of TILE_COLUMNS columns.

    Pointers to tensors:
        values_ptr: [rows, row_bytes] uint8, the blocks of a row one after the other.
        out_ptr: [rows, columns] float32, float16 or bfloat16, written; [columns, rows] AS_COLUMNS.

    Scalars:
        tiles: programs for the columns of a row.
        heads: that the rows are divided into; of IN_GROUPS, those of the queries.
        key_value_heads: those of the keys, and of the values, of IN_GROUPS.

    Constexprs:
        KIND: PLAIN, ONE_SCALE or NESTED_SCALES.
        TYPE: the number of the block type.
        VALUES, SIZE: values and bytes of a block.
        ORDER: one of the above.
        SUBTRACTS_ONE: True to subtract 1 before a value is rounded.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = program % tiles * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    in_row = column.to(tl.int32)
    stored_row = _stored_row(row, rows, heads, key_value_heads, ORDER)
    block_ptr = values_ptr + stored_row * row_bytes + in_row // VALUES * SIZE
    value = _value(block_ptr, in_row % VALUES, inside, KIND, TYPE)
    if SUBTRACTS_ONE:
        value = value - 1.0
    if ORDER == AS_COLUMNS:
        index = column * rows + row
    elif VALUES > 1:
        index = row * tl.multiple_of(columns, 32) + column
        out_ptr = tl.multiple_of(out_ptr, 16)
    else:
        index = row * columns + column
    tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _stored_row(row, rows, heads, key_value_heads, ORDER: tl.constexpr):
    """Returns the rows of the file that become these rows."""
    if ORDER == IN_HALVES:
        size = rows // heads
        in_head = row % size
        return row - in_head + in_head % (size // 2) * 2 + in_head // (size // 2)
    elif ORDER == IN_GROUPS:
        size = rows // (heads + 2 * key_value_heads)
        of_queries = heads // key_value_heads * size
        group = row // (of_queries + 2 * size)
        in_group = row % (of_queries + 2 * size)
        key = heads * size + group * size + in_group - of_queries
        # the values stand behind all keys
        value = key - size + key_value_heads * size
        other = tl.where(in_group < of_queries + size, key, value)
        return tl.where(in_group < of_queries, group * of_queries + in_group, other)
    else:
        return row


@triton.jit
def _value(block_ptr, place, inside, KIND: tl.constexpr, TYPE: tl.constexpr):
    """Returns values in float32, given the addresses of their blocks and their places there."""
    if KIND == ONE_SCALE:
        return _simple_value(block_ptr, place, inside, TYPE)
    elif KIND == NESTED_SCALES:
        return _nested_value(block_ptr, place, inside, TYPE)
    elif TYPE == _F32:
        return _word_32(block_ptr, 0, inside).to(tl.float32, bitcast=True)
    elif TYPE == _F16:
        return _half(block_ptr, 0, inside)
    else:
        return (_word_16(block_ptr, 0, inside) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _simple_value(block_ptr, place, inside, TYPE: tl.constexpr):
    """Returns values of types with one scale for a block."""
    if TYPE == _Q4_0:
        code = _field(block_ptr, 2, place, 4, 16, inside)
        return _half(block_ptr, 0, inside) * (code - 8).to(tl.float32)
    elif TYPE == _Q4_1:
        code = _field(block_ptr, 4, place, 4, 16, inside)
        product = _half(block_ptr, 0, inside) * code.to(tl.float32)
        return product + _half(block_ptr, 2, inside)
    elif TYPE == _Q5_0:
        code = _five_bits(block_ptr, 2, place, inside)
        return _half(block_ptr, 0, inside) * (code - 16).to(tl.float32)
    elif TYPE == _Q5_1:
        code = _five_bits(block_ptr, 4, place, inside)
        product = _half(block_ptr, 0, inside) * code.to(tl.float32)
        return product + _half(block_ptr, 2, inside)
    else:  # Q8_0
        code = _signed_byte(block_ptr, 2 + place, inside)
        return code.to(tl.float32) * _half(block_ptr, 0, inside)


@triton.jit
def _five_bits(block_ptr, first, place, inside):
    """Returns codes whose 32 fifth bits begin at byte `first`, before the other four."""
    fifth = _field(block_ptr, first, place, 1, 1, inside)
    return _field(block_ptr, first + 4, place, 4, 16, inside) | (fifth << 4)


@triton.jit
def _nested_value(block_ptr, place, inside, TYPE: tl.constexpr):
    """Returns values of types whose blocks of 256 have quantized scales."""
    if TYPE == _Q2_K:
        nested = _byte(block_ptr, place // 16, inside)
        code = _field(block_ptr, 16, place, 2, 32, inside)
        value = _scaled(_half(block_ptr, 80, inside), nested & 15, code)
        return value - _half(block_ptr, 82, inside) * (nested >> 4).to(tl.float32)
    elif TYPE == _Q3_K:
        scale = _scale_of_q3_k(block_ptr, place // 16, inside)
        missing = 1 - _field(block_ptr, 0, place, 1, 32, inside)
        code = _field(block_ptr, 32, place, 2, 32, inside) - 4 * missing
        return _scaled(_half(block_ptr, 108, inside), scale, code)
    elif TYPE == _Q4_K:
        code = _field(block_ptr, 16, place, 4, 32, inside)
        return _scaled_less_minimum(block_ptr, place // 32, code, inside)
    elif TYPE == _Q5_K:
        fifth = _field(block_ptr, 16, place, 1, 32, inside)
        code = _field(block_ptr, 48, place, 4, 32, inside) | (fifth << 4)
        return _scaled_less_minimum(block_ptr, place // 32, code, inside)
    else:  # Q6_K
        high = _field(block_ptr, 128, place, 2, 32, inside)
        code = _field(block_ptr, 0, place, 4, 64, inside) | (high << 4)
        scale = _signed_byte(block_ptr, 192 + place // 16, inside)
        return _scaled(_half(block_ptr, 208, inside), scale, code - 32)


@triton.jit
def _scaled(scale, nested, code):
    """Returns scale * nested scale * code; `nested` and `code` are int32."""
    return (scale * nested.to(tl.float32)) * code.to(tl.float32)


@triton.jit
def _scale_of_q3_k(block_ptr, group, inside):
    """Returns the scales of groups, whose low 4 bits and high 2 bits stand apart."""
    low = _field(block_ptr, 96, group, 4, 8, inside)
    high = _field(block_ptr, 104, group, 2, 4, inside)
    return (low | (high << 4)) - 32


@triton.jit
def _scaled_less_minimum(block_ptr, group, code, inside):
    """Returns values of Q4_K and Q5_K.

    The scales and minimums of the first four groups are whole in bytes 4 to 11. The other four have
    their low bits in bytes 12 to 15 and their high bits above the first four.
    """
    in_four = group % 4
    is_whole = group < 4
    first = _byte(block_ptr, 4 + in_four, inside)
    second = _byte(block_ptr, 8 + in_four, inside)
    mixed = _byte(block_ptr, 12 + in_four, inside)
    nested_scale = tl.where(is_whole, first & 63, (mixed & 15) | (first >> 2 & 48))
    nested_minimum = tl.where(is_whole, second & 63, (mixed >> 4) | (second >> 2 & 48))
    minimum = _half(block_ptr, 2, inside) * nested_minimum.to(tl.float32)
    return _scaled(_half(block_ptr, 0, inside), nested_scale, code) - minimum


# Bytes and numbers of blocks. Each function takes, for each value of a tile, the address of a block
# and the number of the first byte in it. `inside` is False for values that there are not.


@triton.jit
def _byte(block_ptr, number, inside):
    """Returns a byte as int32."""
    return tl.load(block_ptr + number, mask=inside, other=0).to(tl.int32)


@triton.jit
def _signed_byte(block_ptr, number, inside):
    """Returns an int8 as int32."""
    return (_byte(block_ptr, number, inside) << 24) >> 24


@triton.jit
def _word_16(block_ptr, number, inside):
    """Returns a little-endian word of 16 bits as int32."""
    return _byte(block_ptr, number, inside) | (_byte(block_ptr, number + 1, inside) << 8)


@triton.jit
def _word_32(block_ptr, number, inside):
    """Returns a little-endian word of 32 bits as int32, whose highest bit is its sign."""
    high = _word_16(block_ptr, number + 2, inside)
    return _word_16(block_ptr, number, inside) | (high << 16)


@triton.jit
def _half(block_ptr, number, inside):
    """Returns a number in half precision as float32."""
    word = _word_16(block_ptr, number, inside)
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _field(block_ptr, first, number, BITS: tl.constexpr, RUN: tl.constexpr, inside):
    """Returns a field of a few bits, by its number among those that begin at byte `first`.

    A run of RUN bytes holds the lowest field of each byte first, then the second field of each
    byte, and so on; runs follow each other.
    """
    FIELDS: tl.constexpr = 8 // BITS
    run = number // (RUN * FIELDS)
    found = _byte(block_ptr, first + run * RUN + number % RUN, inside)
    return (found >> (number // RUN % FIELDS * BITS)) & ((1 << BITS) - 1)
