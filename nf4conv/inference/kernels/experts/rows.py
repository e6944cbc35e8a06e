"""x · Wᵀ for few rows: each row with the experts that it chose, decoded in registers.

A program computes some rows of W for one *group* of terms. Going up, a group is one pair of a token
and an expert, with gate and up at once and the activation behind them. Going down, it is a token
with all its experts, whose results are weighted and added up here. So nothing is written that is
read again but the values between the two launches.

The values of codes sit in the lanes of a warp and are looked up by shuffles, as in decoding/. The
sum over a chunk, 64 k, is multiplied with its scale in float32.
"""

import triton
import triton.language as tl

from nf4conv.codec.kernels.arithmetic import lane_entry
from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.inference.kernels.experts.stacks import (
    DOT,
    load_scales,
    load_words,
    scales,
    value_of,
)


@kernel
def rows_kernel(
    x_ptr,
    ids_ptr,
    factor_ptr,
    out_ptr,
    table_ptr,
    nested_code_ptr,
    codes_ptr,
    absmax_ptr,
    nested_absmax_ptr,
    offset_ptr,
    up_codes_ptr,
    up_absmax_ptr,
    up_nested_absmax_ptr,
    up_offset_ptr,
    share: tl.int32,
    experts: tl.int32,
    rows: tl.int32,
    first_row: tl.int32,
    up_first_row: tl.int32,
    row_step: tl.int32,
    expert_chunks: tl.int32,
    blocks: tl.int32,
    nested_blocks: tl.int32,
    offset_step: tl.int32,
    block_shift: tl.int32,
    out_columns: tl.int32,
    up_column: tl.int32,
    column_step: tl.int32,
    TERMS: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    NESTED: tl.constexpr,
    EARLY: tl.constexpr,
    PTX: tl.constexpr,
):
    """Computes ROWS rows for a group: the sum over its terms of x · Wᵀ, weighted. It takes CHUNKS
    chunks at once, counted over all TERMS, which have ROW_CHUNKS each.

    Term t of group g has expert ids[g · TERMS + t] and row (g · TERMS + t) // share of x, where
    share is 1 unless TERMS is. Experts that do not exist contribute 0.

    Pointers to tensors:
        x_ptr: [.., 64 · ROW_CHUNKS] bfloat16, float16 or float32.
        ids_ptr: [groups · TERMS] int64.
        factor_ptr: [groups · TERMS], of any float dtype; read if WEIGHTED.
        out_ptr: [groups, out_columns], written: row r of W in column r · column_step. If GATED, up
            goes to up_column + r · column_step, or with SILU both become one value.
        table_ptr: [32] int32, tables.value_table.
        nested_code_ptr: [256] float32.
        codes_ptr …, up_codes_ptr …: two stacks; the second is read if GATED.

    Scalars: rows of the result; experts of the stack; the rest is stacks.py's layout.
    """
    tiles = tl.cdiv(rows, ROWS)
    group = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    layout = (row_step, ROW_CHUNKS, expert_chunks, blocks, nested_blocks, offset_step, block_shift)
    stack = (codes_ptr, absmax_ptr, nested_absmax_ptr, offset_ptr, first_row)
    up_stack = (up_codes_ptr, up_absmax_ptr, up_nested_absmax_ptr, up_offset_ptr, up_first_row)
    if EARLY and GATED:
        ids_ptr += _wait()
    STEPS: tl.constexpr = (TERMS * ROW_CHUNKS + CHUNKS - 1) // CHUNKS
    ahead = _load(
        stack, up_stack, layout, ids_ptr, group, tile, 0, rows, experts, TERMS, ROW_CHUNKS,
        ROWS, CHUNKS, GATED, NESTED,
    )  # fmt: skip
    if EARLY and not GATED:
        # codes and the choice of experts are older than the kernel before, x is not
        x_ptr += _wait()
    if PTX:
        value = lane_entry(tl.zeros((ROWS, CHUNKS * 8), tl.int64) + table_ptr.to(tl.int64), True)
    else:
        value = tl.zeros((ROWS, CHUNKS * 8), tl.int32)
    start = group * TERMS // share * (ROW_CHUNKS * 8)
    total = tl.zeros((ROWS, CHUNKS), tl.float32)
    up_total = tl.zeros((ROWS, CHUNKS), tl.float32)
    for step in tl.static_range(STEPS):
        words, loaded, up_words, up_loaded, there = ahead
        if step + 1 < STEPS:
            ahead = _load(
                stack, up_stack, layout, ids_ptr, group, tile, (step + 1) * CHUNKS, rows, experts,
                TERMS, ROW_CHUNKS, ROWS, CHUNKS, GATED, NESTED,
            )  # fmt: skip
        x = _load_x(x_ptr, start, step * CHUNKS, TERMS * ROW_CHUNKS, CHUNKS)
        scale = scales(loaded, nested_code_ptr, NESTED, PTX)
        if WEIGHTED:
            term = group * TERMS + (step * CHUNKS + tl.arange(0, CHUNKS)) // ROW_CHUNKS
            factor = tl.load(factor_ptr + term, mask=there, other=0.0).to(tl.float32)
            scale *= factor[None, :]
        total = tl.fma(_dots(words, x, value, table_ptr, CHUNKS, PTX), scale, total)
        if GATED:
            up_scale = scales(up_loaded, nested_code_ptr, NESTED, PTX)
            dots = _dots(up_words, x, value, table_ptr, CHUNKS, PTX)
            up_total = tl.fma(dots, up_scale, up_total)
    row = tile * ROWS + tl.arange(0, ROWS)
    out_ptr += group.to(tl.int64) * out_columns + row * column_step
    _store(out_ptr, up_column, row < rows, total, up_total, GATED, SILU)


launch_rows = Launcher(rows_kernel)


@triton.jit
def _store(
    out_ptr, up_column, mask, total, up_total, GATED: tl.constexpr, SILU: tl.constexpr
):  # fmt: skip
    """Stores the sums over chunks of [ROWS, CHUNKS] totals, or what SILU makes of them."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    sums = tl.sum(total, axis=1)
    if GATED:
        up_sums = tl.sum(up_total, axis=1)
        if SILU:
            sums = sums / (1.0 + tl.exp(-sums)) * up_sums
        else:
            tl.store(out_ptr + up_column, up_sums.to(DTYPE), mask=mask)
    tl.store(out_ptr, sums.to(DTYPE), mask=mask)


@triton.jit
def _wait():
    """Waits for the kernel before, and lets the one behind begin. Returns 0; what uses it comes
    after.

    What the kernel before the last wrote may be read without this: the last one let this one begin
    after it had itself waited.
    """
    return tl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load(
    stack, up_stack, layout, ids_ptr, group, tile, first, rows, experts,
    TERMS: tl.constexpr, ROW_CHUNKS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    GATED: tl.constexpr, NESTED: tl.constexpr,
):  # fmt: skip
    """Loads codes and scales of a tile of rows and CHUNKS chunks from `first` on, counted over all
    terms of a group.
    """
    inside = tl.minimum(tile * ROWS + tl.arange(0, ROWS), rows - 1) * layout[0]
    at = first + tl.arange(0, CHUNKS)
    expert, there = _expert_of(ids_ptr, group, at, experts, TERMS, ROW_CHUNKS)
    by_word = first + tl.arange(0, CHUNKS * 8) // 8
    word_expert, word_there = _expert_of(ids_ptr, group, by_word, experts, TERMS, ROW_CHUNKS)
    chunk = at % ROW_CHUNKS
    word_chunk = by_word % ROW_CHUNKS
    row = stack[4] + inside
    words = load_words(stack, layout, word_expert, row, word_chunk, word_there)
    loaded = load_scales(stack, layout, expert, row, chunk, there, NESTED)
    if GATED:
        up_row = up_stack[4] + inside
        up_words = load_words(up_stack, layout, word_expert, up_row, word_chunk, word_there)
        up_loaded = load_scales(up_stack, layout, expert, up_row, chunk, there, NESTED)
    else:
        up_words = words
        up_loaded = loaded
    return words, loaded, up_words, up_loaded, there


@triton.jit
def _expert_of(ids_ptr, group, at, experts, TERMS: tl.constexpr, ROW_CHUNKS: tl.constexpr):
    """Returns the experts of chunks, counted over all terms, and whether they are there."""
    there = at < TERMS * ROW_CHUNKS
    if TERMS == 1:
        expert = tl.zeros(at.shape, tl.int32) + tl.load(ids_ptr + group).to(tl.int32)
    else:
        term = group * TERMS + at // ROW_CHUNKS
        expert = tl.load(ids_ptr + term, mask=there, other=-1).to(tl.int32)
    there = there & (expert >= 0) & (expert < experts)
    return tl.where(there, expert, 0), there


@triton.jit
def _load_x(x_ptr, start, first, last, CHUNKS: tl.constexpr):
    """Loads CHUNKS chunks of x from chunk `first` on, counted from word `start` of x; zeros from
    chunk `last` on. The rows of a group follow each other.

    Returns for each of the 8 elements of a word [8 · CHUNKS] float32.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    word = first * 8 + tl.arange(0, CHUNKS * 8)
    mask = (word < last * 8)[:, None]
    if DTYPE == tl.float32:
        index = start.to(tl.int64) * 8 + word[:, None] * 8 + tl.arange(0, 8)[None, :]
        loaded = tl.load(x_ptr + index, mask=mask, other=0.0)
        even, odd = tl.split(tl.reshape(loaded, (CHUNKS * 8, 2, 2, 2)))
    else:
        pair_ptr = tl.multiple_of(x_ptr.to(tl.pointer_type(tl.int32)), 16)
        index = start.to(tl.int64) * 4 + word[:, None] * 4 + tl.arange(0, 4)[None, :]
        loaded = tl.load(pair_ptr + index, mask=mask, other=0)
        pairs = tl.reshape(loaded, (CHUNKS * 8, 2, 2))
        if DTYPE == tl.bfloat16:
            even = (pairs << 16).to(tl.float32, bitcast=True)
            odd = (pairs & -65536).to(tl.float32, bitcast=True)
        else:
            even = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            odd = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    even02, even13 = tl.split(even)
    odd02, odd13 = tl.split(odd)
    x0, x4 = tl.split(even02)
    x2, x6 = tl.split(even13)
    x1, x5 = tl.split(odd02)
    x3, x7 = tl.split(odd13)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _dots(words, x, value, table_ptr, CHUNKS: tl.constexpr, PTX: tl.constexpr):
    """Returns the sums over chunks of values with x: [ROWS, CHUNKS] float32."""
    x0, x1, x2, x3, x4, x5, x6, x7 = x
    shape: tl.constexpr = words.shape
    if PTX:
        operands = [
            words, value,
            tl.broadcast_to(x0[None, :], shape), tl.broadcast_to(x1[None, :], shape),
            tl.broadcast_to(x2[None, :], shape), tl.broadcast_to(x3[None, :], shape),
            tl.broadcast_to(x4[None, :], shape), tl.broadcast_to(x5[None, :], shape),
            tl.broadcast_to(x6[None, :], shape), tl.broadcast_to(x7[None, :], shape),
        ]  # fmt: skip
        sums = tl.inline_asm_elementwise(
            DOT, "=f,r,r,f,f,f,f,f,f,f,f", operands, dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        sums = tl.zeros(shape, tl.float32)
        for element in tl.static_range(8):
            sums += value_of(table_ptr, words, element) * x[element][None, :]
    return tl.sum(tl.reshape(sums, (words.shape[0], CHUNKS, 8)), axis=2)
