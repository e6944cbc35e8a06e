"""Decodes a matrix of GGUF's blocks, and puts its rows back in order: one pass, one launch.

A thread decodes a value at a time, and loads the scale of its group for each: those loads come from
the L1 cache, and the upload takes longer.
"""

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from nf4conv.codec.decode.ggml.grids import grid_points
from nf4conv.codec.kernels.decoding.ggml.bytes import half, word_16, word_32
from nf4conv.codec.kernels.decoding.ggml.grids import GRIDS, grid_value
from nf4conv.codec.kernels.decoding.ggml.nested import NESTED, nested_value
from nf4conv.codec.kernels.decoding.ggml.simple import simple_value
from nf4conv.codec.kernels.launch import Launcher, kernel
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
POINTS = tl.constexpr(3)


def decode_blocks(values: torch.Tensor, number: int, out: torch.Tensor) -> None:
    """Decodes rows of blocks, in their order.

    Args:
        values: [rows, bytes] uint8, contiguous.
        number: of the block type in ggml.h.
        out: [rows, columns] float32, float16 or bfloat16, contiguous; written.
    """
    rows, columns = out.shape
    if out.numel() == 0:
        return
    tiles = -(-columns // TILE_COLUMNS.value)
    _launch(
        -(-rows // TILE_ROWS.value) * tiles,
        (values, grid_of(number, values.device), out, rows, columns, tiles, values.shape[1], 1, 1),
        constants(number, None),
        out.dtype,
        NUM_WARPS,
    )


@cache
def grid_of(number: int, device: torch.device) -> torch.Tensor:
    """Returns the coordinates of the points of a type, int8; a single 0 for a type without a grid.

    Args:
        number: of the block type in ggml.h.
        device: where they are to be.
    """
    name = GRIDS.get(number)
    if name is None:
        return torch.zeros(1, dtype=torch.int8, device=device)
    return grid_points(name, device).to(torch.int8)


def constants(number: int, changed: str | None) -> tuple[int, int, int, int, int, bool]:
    """Returns the constexprs of the kernel, in their order.

    Args:
        number: of the block type in ggml.h.
        changed: what llama.cpp's converter did, a word of format/gguf.py; None if nothing.
    """
    _, values, size = BLOCK_TYPES[number]
    order = AS_STORED if changed is None else _ORDERS.get(changed, AS_STORED)
    return _kind_of(number), number, values, size, int(order.value), changed == PLUS_ONE


def _kind_of(number: int) -> int:
    """Returns how a type is decoded, by its number."""
    if BLOCK_TYPES[number].values == 1:
        return int(PLAIN.value)
    if number in NESTED:
        return int(NESTED_SCALES.value)
    return int(POINTS.value) if number in GRIDS else int(ONE_SCALE.value)


@kernel
def ggml_kernel(
    values_ptr,
    grid_ptr,
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
        grid_ptr: int8, the coordinates of points; read if the type has a grid.
        out_ptr: [rows, columns] float32, float16 or bfloat16, written; [columns, rows] AS_COLUMNS.

    Scalars:
        tiles: programs for the columns of a row.
        heads: that the rows are divided into; of IN_GROUPS, those of the queries.
        key_value_heads: those of the keys, and of the values, of IN_GROUPS.

    Constexprs:
        KIND: PLAIN, ONE_SCALE, NESTED_SCALES or POINTS.
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
    value = _value(block_ptr, grid_ptr, in_row % VALUES, inside, KIND, TYPE)
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


_launch = Launcher(ggml_kernel)


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
def _value(block_ptr, grid_ptr, place, inside, KIND: tl.constexpr, TYPE: tl.constexpr):
    """Returns values in float32, given the addresses of their blocks and their places there."""
    if KIND == ONE_SCALE:
        return simple_value(block_ptr, place, inside, TYPE)
    elif KIND == NESTED_SCALES:
        return nested_value(block_ptr, place, inside, TYPE)
    elif KIND == POINTS:
        return grid_value(block_ptr, grid_ptr, place, inside, TYPE)
    elif TYPE == _F32:
        return word_32(block_ptr, 0, inside).to(tl.float32, bitcast=True)
    elif TYPE == _F16:
        return half(block_ptr, 0, inside)
    else:
        return (word_16(block_ptr, 0, inside) << 16).to(tl.float32, bitcast=True)
