"""Decodes a matrix of GGUF's blocks, and puts rows of heads back in order: one pass, one launch.

A thread decodes a value at a time, and loads the scale of its group for each: those loads come from
the L1 cache, and the upload takes longer. The arithmetic is that of codec/decode/ggml.py, step by
step, so that no bit differs. Types are told apart by their numbers in ggml.h.
"""

import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import kernel
from nf4conv.codec.kernels.slots import tile_of_program
from nf4conv.format.gguf import (
    BLOCK_TYPES,
    LAYOUTS,
    NIBBLES,
    PLUS_ONE,
    ROTARY,
    SIGNED,
    SPLIT,
    Layout,
)

TILE_ROWS = tl.constexpr(4)  # of a program
TILE_COLUMNS = tl.constexpr(512)  # of a program
NUM_WARPS = 8

_F32 = tl.constexpr(0)
_F16 = tl.constexpr(1)

_SIGNED = tl.constexpr(SIGNED)
_NIBBLES = tl.constexpr(NIBBLES)
_SPLIT = tl.constexpr(SPLIT)


def constants(number: int, changed: str | None) -> tuple[int, Layout | None, int, int, bool, bool]:
    """Returns the constexprs of the kernel, in their order, for a block type's number in ggml.h and
    what llama.cpp's converter did: ROTARY or PLUS_ONE of format/gguf.py, or None.
    """
    _, name, values, size = BLOCK_TYPES[number]
    return number, LAYOUTS.get(name), values, size, changed == ROTARY, changed == PLUS_ONE


@kernel
def ggml_kernel(
    values_ptr,
    out_ptr,
    rows: tl.int64,
    columns: tl.int64,
    tiles: tl.int64,
    row_bytes: tl.int64,
    heads: tl.int64,
    TYPE: tl.constexpr,
    LAYOUT: tl.constexpr,
    VALUES: tl.constexpr,
    SIZE: tl.constexpr,
    IN_HALVES: tl.constexpr,
    SUBTRACTS_ONE: tl.constexpr,
):
    """Decodes TILE_ROWS rows of TILE_COLUMNS columns.

    Pointers to tensors:
        values_ptr: [rows, row_bytes] uint8, the blocks of a row one after the other.
        out_ptr: [rows, columns] float32, float16 or bfloat16, written.

    Scalars:
        tiles: programs for the columns of a row.
        heads: that the rows are divided into IN_HALVES.

    Constexprs:
        TYPE: the number of the block type.
        LAYOUT: how its blocks hold values; None for those of one value.
        VALUES, SIZE: values and bytes of a block.
        IN_HALVES: True to write each head's even rows, then its odd rows.
        SUBTRACTS_ONE: True to subtract 1 before a value is rounded.
    """
    row, column, inside = tile_of_program(rows, columns, tiles, TILE_ROWS, TILE_COLUMNS)
    in_row = column.to(tl.int32)
    stored_row = row
    if IN_HALVES:
        size = rows // heads
        in_head = row % size
        stored_row = row - in_head + in_head % (size // 2) * 2 + in_head // (size // 2)
    block_ptr = values_ptr + stored_row * row_bytes + in_row // VALUES * SIZE
    value = _value(block_ptr, in_row % VALUES, inside, TYPE, LAYOUT)
    if SUBTRACTS_ONE:
        value = value - 1.0
    if VALUES > 1:
        index = row * tl.multiple_of(columns, 32) + column
        out_ptr = tl.multiple_of(out_ptr, 16)
    else:
        index = row * columns + column
    tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _value(block_ptr, place, inside, TYPE: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns values in float32, given the addresses of their blocks and their places there."""
    if LAYOUT is not None:
        return _value_of_block(block_ptr, place, inside, LAYOUT)
    elif TYPE == _F32:
        return _word_32(block_ptr, 0, inside).to(tl.float32, bitcast=True)
    elif TYPE == _F16:
        return _half(block_ptr, 0, inside)
    else:
        return (_word_16(block_ptr, 0, inside) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _value_of_block(block_ptr, place, inside, LAYOUT: tl.constexpr):
    """Returns values of blocks that have a scale."""
    LOW: tl.constexpr = LAYOUT.low
    HIGH: tl.constexpr = LAYOUT.high
    code = _field(block_ptr, place, inside, LOW)
    if LOW.bits == 8:
        code = (code << 24) >> 24
    if HIGH.bits > 0:
        code = code | (_field(block_ptr, place, inside, HIGH) << LOW.bits)
    code = code - LAYOUT.center
    scale = _half(block_ptr, LAYOUT.scale, inside)
    if LAYOUT.kind == "":
        value = scale * code.to(tl.float32)
        if LAYOUT.has_minimum:
            value = value + _half(block_ptr, LAYOUT.scale + 2, inside)
    else:
        group = place // LAYOUT.group
        nested_scale, nested_minimum = _scales_of_group(block_ptr, group, inside, LAYOUT)
        value = (scale * nested_scale.to(tl.float32)) * code.to(tl.float32)
        if LAYOUT.has_minimum:
            minimum = _half(block_ptr, LAYOUT.scale + 2, inside)
            value = value - minimum * nested_minimum.to(tl.float32)
    return value


@triton.jit
def _scales_of_group(block_ptr, group, inside, LAYOUT: tl.constexpr):
    """Returns the scales and the minimums of groups, int32; anything for minimums that there are
    not.
    """
    block_ptr += LAYOUT.first
    if LAYOUT.kind == _SIGNED:
        scale = (_byte(block_ptr, group, inside) << 24) >> 24
        minimum = scale
    elif LAYOUT.kind == _NIBBLES:
        both = _byte(block_ptr, group, inside)
        scale = both & 15
        minimum = both >> 4
    elif LAYOUT.kind == _SPLIT:
        low = _unpacked(block_ptr, group, 4, 8, inside)
        high = _unpacked(block_ptr + 8, group, 2, 4, inside)
        scale = (low | (high << 4)) - 32
        minimum = scale
    else:
        # those of the first four groups are whole in bytes 0 to 7; the other four have their low
        # bits in bytes 8 to 11, and their high bits above the first four
        in_four = group % 4
        is_whole = group < 4
        first = _byte(block_ptr, in_four, inside)
        second = _byte(block_ptr, 4 + in_four, inside)
        mixed = _byte(block_ptr, 8 + in_four, inside)
        scale = tl.where(is_whole, first & 63, (mixed & 15) | (first >> 2 & 48))
        minimum = tl.where(is_whole, second & 63, (mixed >> 4) | (second >> 2 & 48))
    return scale, minimum


# Bytes and numbers of blocks. Each function takes, for each value of a tile, the address of a block
# and the number of the first byte in it. `inside` is False for values that there are not.


@triton.jit
def _byte(block_ptr, number, inside):
    """Returns a byte as int32."""
    return tl.load(block_ptr + number, mask=inside, other=0).to(tl.int32)


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
def _field(block_ptr, place, inside, FIELDS: tl.constexpr):
    """Returns the fields of values by their places in a block."""
    BITS: tl.constexpr = FIELDS.bits
    RUN: tl.constexpr = FIELDS.run
    return _unpacked(block_ptr + FIELDS.first, place, BITS, RUN, inside)


@triton.jit
def _unpacked(first_ptr, number, BITS: tl.constexpr, RUN: tl.constexpr, inside):
    """Returns a field of a few bits, by its number among those that begin at an address, in runs of
    RUN bytes.
    """
    FIELDS: tl.constexpr = 8 // BITS
    run = number // (RUN * FIELDS)
    found = _byte(first_ptr, run * RUN + number % RUN, inside)
    return (found >> (number // RUN % FIELDS * BITS)) & ((1 << BITS) - 1)
