"""x · Wᵀ for groups of rows that chose the same expert, decoded once for each group.

Weights are decoded as decoding/ does, value times absmax rounded to x's dtype, so that the result
is that of a product with decoded weights, but for the order of float32 sums. A *chunk* is 64
elements of a row, 8 words of codes; a block of 64 or more holds whole chunks.
"""

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.arithmetic import lane_entry, multiply
from nf4conv.codec.kernels.decoding.dequantize import tile_values
from nf4conv.codec.kernels.launch import Launcher, kernel


@kernel
def groups_kernel(
    x_ptr,
    members_ptr,
    group_expert_ptr,
    factor_ptr,
    out_ptr,
    table_ptr,
    weight,
    share: tl.int32,
    ROW_CHUNKS: tl.constexpr,
    MEMBERS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    NESTED: tl.constexpr,
    PTX: tl.constexpr,
):
    """Computes ROWS rows of W for one group of up to MEMBERS pairs of a token and an expert.

    weight: an Operand; its second stack is read if GATED.

    Pointers to tensors:
        x_ptr: [.., 64 · ROW_CHUNKS]; pair p has row p // share.
        members_ptr: [groups, MEMBERS] int32, the pairs of each group; -1 for none.
        group_expert_ptr: [groups] int32; -1 for a group that is not there.
        factor_ptr: [pairs], of any float dtype; read if WEIGHTED.
        out_ptr: [pairs, out_columns], written: row r of W in column r · column_step. If GATED, up
            goes to up_column + r · column_step, or with SILU both become one value.
        table_ptr: [32] int32, tables.value_table.

    Constexprs:
        CHUNKS: chunks that are multiplied at once; divides ROW_CHUNKS.
    """
    tiles = tl.cdiv(weight.rows, ROWS)
    group = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    expert = tl.load(group_expert_ptr + group)
    if expert < 0:
        return
    member = tl.load(members_ptr + group * MEMBERS + tl.arange(0, MEMBERS))
    has_member = member >= 0
    x_row = member // share
    row = tile * ROWS + tl.arange(0, ROWS)
    line = tl.minimum(row, weight.rows - 1) * weight.row_step
    value = tl.zeros((ROWS, CHUNKS * 8), tl.int32)
    if PTX:
        value = lane_entry(table_ptr, value)
    # weights are the left operand: a product has 64 rows of them at least, and may have few of x
    total = tl.zeros((ROWS, MEMBERS), tl.float32)
    up_total = tl.zeros((ROWS, MEMBERS), tl.float32)
    ahead = _load(
        weight, x_ptr, x_row, has_member, expert, line, 0, ROW_CHUNKS, CHUNKS, GATED, NESTED
    )
    for first in tl.range(0, ROW_CHUNKS, CHUNKS, num_stages=1):
        loaded, up_loaded, x = ahead
        ahead = _load(
            weight, x_ptr, x_row, has_member, expert, line, first + CHUNKS,
            ROW_CHUNKS, CHUNKS, GATED, NESTED,
        )  # fmt: skip
        scale = _scales(loaded, weight, NESTED, PTX)
        left = tile_values(loaded[0], scale, value, table_ptr, PTX).to(x.dtype)
        total = tl.dot(left, tl.trans(x), total, input_precision="ieee")
        if GATED:
            up_scale = _scales(up_loaded, weight, NESTED, PTX)
            up_left = tile_values(up_loaded[0], up_scale, value, table_ptr, PTX).to(x.dtype)
            up_total = tl.dot(up_left, tl.trans(x), up_total, input_precision="ieee")
    total = tl.trans(total)
    up_total = tl.trans(up_total)
    if WEIGHTED:
        factor = tl.load(factor_ptr + member, mask=has_member, other=0.0).to(tl.float32)
        total = total * factor[:, None]
    mask = has_member[:, None] & (row < weight.rows)[None, :]
    to_ptr = out_ptr + member.to(tl.int64)[:, None] * weight.out_columns
    to_ptr += row[None, :] * weight.column_step
    if GATED:
        if SILU:
            total = total / (1.0 + tl.exp(-total)) * up_total
        else:
            up_ptr = to_ptr + weight.up_column
            tl.store(up_ptr, up_total.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(to_ptr, total.to(out_ptr.dtype.element_ty), mask=mask)


launch_groups = Launcher(groups_kernel)


@triton.jit
def _load(
    weight,
    x_ptr,
    x_row,
    has_row,
    expert,
    line,
    first,
    ROW_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    GATED: tl.constexpr,
    NESTED: tl.constexpr,
):
    """Loads codes, scales and x of CHUNKS chunks from `first` on; nothing behind the last one.

    line: [ROWS], how far each row stands behind its stack's first.
    """
    loaded = _load_stack(weight, weight.stack, expert, line, first, ROW_CHUNKS, CHUNKS, NESTED)
    up_loaded = loaded
    if GATED:
        up_loaded = _load_stack(weight, weight.up, expert, line, first, ROW_CHUNKS, CHUNKS, NESTED)
    column = first * 64 + tl.arange(0, CHUNKS * 64)
    index = x_row.to(tl.int64)[:, None] * (ROW_CHUNKS * 64) + column[None, :]
    mask = (has_row & (first < ROW_CHUNKS))[:, None]
    # a hint at the alignment must be at a result, and a cast has one
    bits: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.float32 else tl.int16
    bits_ptr = tl.multiple_of(x_ptr.to(tl.pointer_type(bits)), 16)
    x = tl.load(bits_ptr + index, mask=mask, other=0).to(x_ptr.dtype.element_ty, bitcast=True)
    return loaded, up_loaded, x


@triton.jit
def _load_stack(
    weight,
    stack,
    only,
    line,
    first,
    ROW_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    NESTED: tl.constexpr,
):
    """Loads chunks of an expert's rows as they are stored: words of codes, absmax, nested absmax
    and offset.
    """
    chunk = first + tl.arange(0, CHUNKS)
    word = tl.arange(0, CHUNKS * 8)
    word_chunk = first + word // 8
    is_there = first < ROW_CHUNKS
    there = (chunk >= 0) & is_there
    word_there = (word_chunk >= 0) & is_there
    expert = tl.zeros((CHUNKS,), tl.int32) + only
    word_expert = tl.zeros((CHUNKS * 8,), tl.int32) + only
    row = stack.first_row + line
    inside = row[:, None] * (ROW_CHUNKS * 8) + (word_chunk * 8 + word % 8)[None, :]
    place = (word_expert.to(tl.int64) * weight.expert_chunks * 8)[None, :] + inside
    word_ptr = tl.multiple_of(stack.codes.to(tl.pointer_type(tl.int32)), 16) + place
    mask = word_there[None, :] & (row >= 0)[:, None]
    words = tl.load(word_ptr, mask=mask, other=0, eviction_policy="evict_first")
    mask = there[None, :] & (row >= 0)[:, None]
    block = (row[:, None] * ROW_CHUNKS + chunk[None, :]) >> weight.block_shift
    first_block = expert[None, :].to(tl.int64) * weight.blocks
    absmax = tl.load(stack.absmax + first_block + block, mask=mask, other=0)
    nested_absmax = absmax
    offset = absmax
    if NESTED:
        of_expert = expert[None, :] * weight.nested_blocks + (block >> 8)
        of_stack = ((first_block + block) >> 8).to(tl.int32)
        nested_block = tl.where(weight.nested_blocks > 0, of_expert, of_stack)
        nested_absmax = tl.load(stack.nested_absmax + nested_block, mask=mask, other=0.0)
        offset = tl.load(stack.offset + expert * weight.offset_step, mask=there, other=0.0)
        offset = tl.broadcast_to(offset[None, :], absmax.shape)
    return words, absmax, nested_absmax, offset


@triton.jit
def _scales(loaded, weight, NESTED: tl.constexpr, PTX: tl.constexpr):
    """Returns the absmax of chunks as it decodes, of what `_load_stack` returned."""
    _, absmax, nested_absmax, offset = loaded
    if NESTED:
        code = tl.load(weight.nested_code + absmax.to(tl.int32))
        return multiply(code, nested_absmax, PTX) + offset
    else:
        return absmax


def gather_pairs(
    ids: torch.Tensor, experts: int, members: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes a group of the pairs of each expert, none of which has more than `members`, a power of
    two; ids are [pairs] int64.

    Returns the pairs, [experts, members] int32, -1 for none; and the expert of each group,
    [experts] int32, -1 if it has no pair.
    """
    pairs = torch.empty((experts, members), dtype=torch.int32, device=ids.device)
    expert = torch.empty(experts, dtype=torch.int32, device=ids.device)
    count = max(32, triton.next_power_of_2(ids.numel()))
    _launch(experts, (ids, pairs, expert, ids.numel()), (count, members), (), 1)
    return pairs, expert


@kernel
def gathering_kernel(
    ids_ptr,
    pairs_ptr,
    expert_ptr,
    count: tl.int32,
    COUNT: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Gathers the pairs of the expert whose number is the program's."""
    expert = tl.program_id(0)
    pair = tl.arange(0, COUNT)
    chosen = tl.load(ids_ptr + pair, mask=pair < count, other=-1)
    own = chosen == expert
    ones = own.to(tl.int32)
    total = tl.sum(ones, axis=0)
    tl.store(expert_ptr + expert, tl.where(total > 0, expert, -1))
    place = tl.cumsum(ones, axis=0) - 1
    pairs_ptr += expert * MEMBERS
    tl.store(pairs_ptr + place, pair, mask=own & (place < MEMBERS))
    member = tl.arange(0, MEMBERS)
    none = tl.full((MEMBERS,), -1, tl.int32)
    tl.store(pairs_ptr + member, none, mask=member >= total)


_launch = Launcher(gathering_kernel)
