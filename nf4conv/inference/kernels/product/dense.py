"""x · Wᵀ for weights that kernel.py cannot read: short blocks, other columns, other places.

Weights are decoded and rounded as dequantize does, then multiplied by whatever tensor cores there
are (`tl.dot`). Nothing decoded is written to memory. A program computes ROWS rows of W for COLUMNS
rows of x, over all k or one of several parts of it. Codes and scales of the next step are loaded
while a step is multiplied.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.arithmetic import multiply
from nf4conv.codec.kernels.decoding.values import lane_values, tile_values
from nf4conv.codec.kernels.internals import stream_of
from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.tables import value_table
from nf4conv.codec.quant_state import Addresses, Form
from nf4conv.inference.kernels.product.balancing import MOST_SPLITS
from nf4conv.inference.kernels.product.launches import (
    Product,
    is_hopper,
    readable,
    types_of_weight,
)
from nf4conv.inference.kernels.product.sums import prepare_sum


class Tile(NamedTuple):
    """Says what a program computes at once.

    Attributes:
        rows: of W.
        columns: rows of x.
        chunks: of 32 k, in a step.
        stages: steps that are loaded ahead.
        warps: of a program.
    """

    rows: int
    columns: int
    chunks: int
    stages: int
    warps: int


TILES: Final = (Tile(64, 16, 4, 3, 4), Tile(64, 32, 4, 3, 4), Tile(64, 64, 2, 3, 4))
"""A tile for each number of rows of x, among the fastest of docs/kernels.md."""


def prepare_dense(
    x_shape: torch.Size, dtype: torch.dtype, device: torch.device, n: int, form: Form, aligned: bool
) -> Product:
    """Prepares to multiply all x of one shape, [..., k] with up to 64 rows and k a multiple of 32,
    with all weights of one shape and form. Packed codes are aligned if they begin at a multiple of
    16 bytes; otherwise at one of 4.
    """
    k = x_shape[-1]
    m = x_shape.numel() // k
    out_shape = (*x_shape[:-1], n)
    tile = next(one for one in TILES if m <= one.columns)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    row_tiles = -(-n // tile.rows)
    parts = 1
    while parts < MOST_SPLITS and 2 * parts * row_tiles <= 4 * processors:
        parts *= 2
    steps = -(-k // (32 * tile.chunks * parts))
    table = value_table(form.quant_type, device).data_ptr()
    behind = (table, m, n, k, steps, (form.blocksize // 32).bit_length() - 1)
    pointers = (dtype, *types_of_weight(dtype, form, parts > 1), torch.int32)
    launch = launch_dense.prepare(
        device,
        (*pointers, *behind[1:]),
        (*tile[:4], form.nested, aligned, True),
        (dtype, parts > 1),
        tile.warps,
    )
    add = prepare_sum(device, dtype, parts, is_hopper(device))
    current_stream = stream_of(device)

    def multiply(x: torch.Tensor, weight: Addresses) -> torch.Tensor:
        x = readable(x)
        out = x.new_empty(out_shape)
        target = out
        if parts > 1:
            target = x.new_empty(2 * parts * m * n)  # float32, in 16-bit elements
        stream = current_stream()
        launch(row_tiles * parts, stream, x.data_ptr(), target.data_ptr(), weight, *behind)
        if parts > 1:
            add(stream, target.data_ptr(), out.data_ptr(), m * n)
        return out

    return multiply


@kernel
def dense_kernel(
    x_ptr,
    out_ptr,
    weight,
    table_ptr,
    m: tl.int32,
    n: tl.int32,
    k: tl.int32,
    steps: tl.int32,
    block_shift: tl.int32,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    NESTED: tl.constexpr,
    ALIGNED: tl.constexpr,
    PTX: tl.constexpr,
):
    """Computes one tile of one part of k.

    Programs that follow each other share their rows of W, so that these are read from L2.

    weight: a PackedWeight, [n, k], at a multiple of 16 bytes if ALIGNED, otherwise of 4.

    Pointers to tensors:
        x_ptr: [m, k] bfloat16 or float16, at a multiple of 16 bytes.
        out_ptr: [parts, m, n] bfloat16, float16 or float32, written.
        table_ptr: [32] int32, tables.value_table.

    Scalars:
        m, n, k: rows of x, rows of W, columns of both, a multiple of 32.
        steps: of a part; a step is CHUNKS chunks of 32 k.
        block_shift: a block has 32 << block_shift elements.
    """
    column_tiles = tl.cdiv(m, COLUMNS)
    row_tiles = tl.cdiv(n, ROWS)
    column_tile = tl.program_id(0) % column_tiles
    row_tile = tl.program_id(0) // column_tiles % row_tiles
    part = tl.program_id(0) // (column_tiles * row_tiles)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    chunks = k // 32
    first = part * steps * CHUNKS
    end = tl.minimum(first + steps * CHUNKS, chunks)
    inside = tl.minimum(row, n - 1) * chunks
    value = tl.zeros((ROWS, CHUNKS * 4), tl.int32)
    if PTX:
        value = lane_values(table_ptr, value)
    offset = tl.load(weight.offset) if NESTED else 0.0
    x_bits_ptr = tl.multiple_of(x_ptr.to(tl.pointer_type(tl.int16)), 16)
    x_line = tl.minimum(column, m - 1) * chunks
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    ahead = _load(weight, block_shift, inside, first, end, CHUNKS, NESTED, ALIGNED)
    for chunk in tl.range(first, end, CHUNKS, num_stages=STAGES):
        words, absmax, nested_absmax = ahead
        following = chunk + CHUNKS
        ahead = _load(weight, block_shift, inside, following, end, CHUNKS, NESTED, ALIGNED)
        place = tl.arange(0, CHUNKS * 32)
        # so written, the compiler sees that 16 bytes are there or not, and aligned
        there = (column < m)[:, None] & (chunk + place // 32 < end)[None, :]
        index = (x_line[:, None] + chunk) * 32 + place[None, :]
        x = tl.load(x_bits_ptr + index, mask=there, other=0)
        x = x.to(x_ptr.dtype.element_ty, bitcast=True)
        scale = absmax
        if NESTED:
            found = tl.load(weight.code + absmax.to(tl.int32))
            scale = multiply(found, nested_absmax, PTX) + offset
        left = tile_values(words, scale, value, table_ptr, PTX).to(x.dtype)
        total = tl.dot(left, tl.trans(x), total)
    to = (part * m + column).to(tl.int64)[None, :] * n + row[:, None]
    mask = (column < m)[None, :] & (row < n)[:, None]
    tl.store(out_ptr + to, total.to(out_ptr.dtype.element_ty), mask=mask)


launch_dense = Launcher(dense_kernel)


@triton.jit
def _load(
    weight,
    block_shift,
    inside,
    chunk,
    end,
    CHUNKS: tl.constexpr,
    NESTED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Loads CHUNKS chunks of rows as they are stored: words, absmax and nested absmax.

    inside: [ROWS], the first chunk of each row. Behind the end, the last chunk is read again: there
    x is 0.
    """
    word = tl.arange(0, CHUNKS * 4)
    word_ptr = weight.packed.to(tl.pointer_type(tl.int32))
    if ALIGNED:
        word_ptr = tl.multiple_of(word_ptr, 16)
    of_word = tl.minimum(chunk + word // 4, end - 1)
    words = tl.load(word_ptr + ((inside[:, None] + of_word[None, :]) * 4 + (word % 4)[None, :]))
    last = tl.minimum(chunk + tl.arange(0, CHUNKS), end - 1)
    block = (inside[:, None] + last[None, :]) >> block_shift
    absmax = tl.load(weight.absmax + block)
    nested_absmax = absmax
    if NESTED:
        nested_absmax = tl.load(weight.nested_absmax + (block >> 8))
    return words, absmax, nested_absmax
