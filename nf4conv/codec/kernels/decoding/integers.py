"""Decodes packed integers with scales: one pass, one launch.

The arithmetic, and how codes lie in words, is that of codec/decode/integers.py.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import kernel
from nf4conv.codec.kernels.slots import tile_of_program

NUM_WARPS = 4

# How codes lie: constexprs of kernels.
BY_ROWS = tl.constexpr(0)  # compressed-tensors
DOWN_COLUMNS = tl.constexpr(1)  # GPTQ
INTERLEAVED = tl.constexpr(2)  # AWQ
SIGNED = tl.constexpr(3)  # torchao: as BY_ROWS in two's complement, with the scales of GPTQ

PACKINGS: Final = {"compressed-tensors": 0, "GPTQ": 1, "AWQ": 2, "torchao": 3}

# How zero points are stored: constexprs of kernels.
NO_ZEROS = tl.constexpr(0)  # all are 2^(bits - 1)
PACKED_ZEROS = tl.constexpr(1)  # as the codes are
LESS_ONE = tl.constexpr(2)  # packed, and one too small
BYTE_ZEROS = tl.constexpr(3)  # int8, less 2^(bits - 1)
ADDED_ZEROS = tl.constexpr(4)  # floats, added to products; codes less 2^(bits - 1)


def tile_of(packing: int) -> tuple[int, int]:
    """Returns how many rows and columns a program decodes of a packing.

    Rows of a word that lies across them are read together; values are written along columns.
    """
    return (4, 512) if packing in (BY_ROWS.value, SIGNED.value) else (32, 64)


def kind_of_zeros(zeros: torch.dtype | None, zeros_less_one: bool) -> int:
    """Returns how zero points are stored, given their dtype; None if there are none."""
    if zeros is None:
        return int(NO_ZEROS.value)
    if zeros == torch.int8:
        return int(BYTE_ZEROS.value)
    if zeros.is_floating_point:
        return int(ADDED_ZEROS.value)
    return int(LESS_ONE.value) if zeros_less_one else int(PACKED_ZEROS.value)


@kernel
def integers_kernel(
    values_ptr,
    scale_ptr,
    zeros_ptr,
    index_ptr,
    out_ptr,
    rows: tl.int64,
    columns: tl.int64,
    tiles: tl.int64,
    values_line: tl.int64,
    scale_line: tl.int64,
    zeros_line: tl.int64,
    group_size: tl.int64,
    PACKING: tl.constexpr,
    BITS: tl.constexpr,
    ZEROS: tl.constexpr,
    INDEXED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Decodes TILE_ROWS rows of TILE_COLUMNS columns.

    Pointers to tensors:
        values_ptr: int32 words; a line of them begins every `values_line` elements.
        scale_ptr: float32, float16 or bfloat16, a line every `scale_line` elements.
        zeros_ptr: int32 words, int8 or floats, a line every `zeros_line` elements; not read if
            NO_ZEROS.
        index_ptr: [columns] int32 or int64; read where INDEXED.
        out_ptr: [rows, columns] float32, float16 or bfloat16, written.

    Scalars:
        tiles: programs for the columns of a row.
        group_size: columns of a group, unless INDEXED.
    """
    row, column, inside = tile_of_program(rows, columns, tiles, TILE_ROWS, TILE_COLUMNS)
    code = _code(values_ptr, row, column, values_line, inside, PACKING, BITS)
    if INDEXED:
        group = tl.load(index_ptr + column, mask=column < columns, other=0).to(tl.int64)
    else:
        group = column // group_size
    if PACKING == BY_ROWS:
        scale_ptrs = scale_ptr + row * scale_line + group
    else:
        scale_ptrs = scale_ptr + group * scale_line + row
    scale = tl.load(scale_ptrs, mask=inside, other=0).to(tl.float32)
    zero = _zero(zeros_ptr, row, group, zeros_line, inside, PACKING, BITS, ZEROS)
    value = (code - zero).to(tl.float32) * scale
    if ZEROS == ADDED_ZEROS:
        added = tl.load(zeros_ptr + group * zeros_line + row, mask=inside, other=0)
        value = value + added.to(tl.float32)
    tl.store(out_ptr + row * columns + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _code(words_ptr, row, column, line, inside, PACKING: tl.constexpr, BITS: tl.constexpr):
    """Returns the codes of a tile, int32; SIGNED ones plus 2^(BITS - 1)."""
    bit = column * BITS
    if PACKING == INTERLEAVED:
        code = _interleaved(words_ptr + column * line, row, inside)
    elif PACKING == DOWN_COLUMNS:
        code = _from_stream(words_ptr + row, bit, line, inside, BITS, 0)
    else:
        code = _from_stream(words_ptr + row * line, bit, 1, inside, BITS, 0)
    if PACKING == SIGNED:
        code = code ^ (1 << (BITS - 1))
    return code


@triton.jit
def _zero(
    words_ptr,
    row,
    group,
    line,
    inside,
    PACKING: tl.constexpr,
    BITS: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Returns the zero points of a tile, int32; 2^(BITS - 1) where they are added."""
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    MASK: tl.constexpr = (1 << BITS) - 1
    if ZEROS == NO_ZEROS or PACKING == SIGNED:  # signed ones have zero points that are added
        return MIDDLE
    elif ZEROS == BYTE_ZEROS:
        stored = tl.load(words_ptr + row * line + group, mask=inside, other=0)
        return stored.to(tl.int32) + MIDDLE
    elif PACKING == INTERLEAVED:
        return _interleaved(words_ptr + group * line, row, inside)
    elif PACKING == BY_ROWS:
        return _from_stream(words_ptr + group, row * BITS, line, inside, BITS, 0)
    elif ZEROS == LESS_ONE and 32 % BITS != 0:
        return (_from_stream(words_ptr + group * line, row * BITS, 1, inside, BITS, 0) + 1) & MASK
    elif ZEROS == LESS_ONE:
        ONES: tl.constexpr = 0xFFFFFFFF // MASK  # a one in each code of a word
        return _from_stream(words_ptr + group * line, row * BITS, 1, inside, BITS, ONES)
    else:
        return _from_stream(words_ptr + group * line, row * BITS, 1, inside, BITS, 0)


@triton.jit
def _from_stream(stream_ptr, bit, step, inside, BITS: tl.constexpr, ADDED: tl.constexpr):
    """Returns the codes that begin at these bits of streams, whose words are `step` apart.

    ADDED is added to each word first, with what it carries.
    """
    MASK: tl.constexpr = (1 << BITS) - 1
    word = bit // 32
    shift = (bit % 32).to(tl.uint32)
    low = tl.load(stream_ptr + word * step, mask=inside, other=0).to(tl.uint32, bitcast=True)
    if ADDED != 0:
        low = low + ADDED
    code = low >> shift
    if 32 % BITS != 0:
        crosses = inside & (shift + BITS > 32)
        after = tl.load(stream_ptr + (word + 1) * step, mask=crosses, other=0)
        code = code | (after.to(tl.uint32, bitcast=True) << ((32 - shift) & 31))
    return (code & MASK).to(tl.int32)


@triton.jit
def _interleaved(line_ptr, row, inside):
    """Returns the codes of AWQ in a line of words; even rows stand in the lower half of a word."""
    words = tl.load(line_ptr + row // 8, mask=inside, other=0).to(tl.uint32, bitcast=True)
    place = row % 8 // 2 + row % 2 * 4
    return ((words >> (place * 4).to(tl.uint32)) & 15).to(tl.int32)
