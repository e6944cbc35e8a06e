"""x · Wᵀ for groups of rows that chose the same expert, decoded once for each group.

Weights are decoded as decoding/ does, value times absmax rounded to x's dtype, so that the result
is that of a product with decoded weights, but for the order of float32 sums.
"""

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.arithmetic import lane_entry
from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.inference.kernels.experts.stacks import decoded, load_scales, load_words, scales


@kernel
def groups_kernel(
    x_ptr,
    members_ptr,
    group_expert_ptr,
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

    Pointers to tensors:
        x_ptr: [.., 64 · ROW_CHUNKS]; pair p has row p // share.
        members_ptr: [groups, MEMBERS] int32, the pairs of each group; -1 for none.
        group_expert_ptr: [groups] int32; -1 for a group that is not there.
        factor_ptr: [pairs], of any float dtype; read if WEIGHTED.
        out_ptr: [pairs, out_columns], written as rows_kernel writes it.
        The others are those of rows_kernel.

    Constexprs:
        CHUNKS: chunks that are multiplied at once; divides ROW_CHUNKS.
    """
    tiles = tl.cdiv(rows, ROWS)
    group = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    only = tl.load(group_expert_ptr + group)
    if only < 0:
        return
    member = tl.load(members_ptr + group * MEMBERS + tl.arange(0, MEMBERS))
    layout = (row_step, ROW_CHUNKS, expert_chunks, blocks, nested_blocks, offset_step, block_shift)
    stack = (codes_ptr, absmax_ptr, nested_absmax_ptr, offset_ptr, first_row)
    up_stack = (up_codes_ptr, up_absmax_ptr, up_nested_absmax_ptr, up_offset_ptr, up_first_row)
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(row, rows - 1) * row_step
    if PTX:
        value = lane_entry(tl.zeros((ROWS, CHUNKS * 8), tl.int64) + table_ptr.to(tl.int64), True)
    else:
        value = tl.zeros((ROWS, CHUNKS * 8), tl.int32)
    # weights are the left operand: a product has 64 rows of them at least, and may have few of x
    total = tl.zeros((ROWS, MEMBERS), tl.float32)
    up_total = tl.zeros((ROWS, MEMBERS), tl.float32)
    x_row = member // share
    ahead = _load(
        stack,
        up_stack,
        layout,
        x_ptr,
        x_row,
        member >= 0,
        only,
        inside,
        0,
        ROW_CHUNKS,
        CHUNKS,
        GATED,
        NESTED,
    )
    for first in tl.range(0, ROW_CHUNKS, CHUNKS, num_stages=1):
        words, loaded, up_words, up_loaded, x = ahead
        ahead = _load(
            stack, up_stack, layout, x_ptr, x_row, member >= 0, only, inside, first + CHUNKS,
            ROW_CHUNKS, CHUNKS, GATED, NESTED,
        )  # fmt: skip
        scale = scales(loaded, nested_code_ptr, NESTED, PTX)
        weight = decoded(words, scale, value, table_ptr, PTX).to(x.dtype)
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        if GATED:
            up_scale = scales(up_loaded, nested_code_ptr, NESTED, PTX)
            up_weight = decoded(up_words, up_scale, value, table_ptr, PTX).to(x.dtype)
            up_total = tl.dot(up_weight, tl.trans(x), up_total, input_precision="ieee")
    total = tl.trans(total)
    up_total = tl.trans(up_total)
    if WEIGHTED:
        factor = tl.load(factor_ptr + member, mask=member >= 0, other=0.0).to(tl.float32)
        total = total * factor[:, None]
    mask = (member >= 0)[:, None] & (row < rows)[None, :]
    to = member.to(tl.int64)[:, None] * out_columns + row[None, :] * column_step
    if GATED:
        if SILU:
            total = total / (1.0 + tl.exp(-total)) * up_total
        else:
            tl.store(out_ptr + to + up_column, up_total.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + to, total.to(out_ptr.dtype.element_ty), mask=mask)


launch_groups = Launcher(groups_kernel)


@triton.jit
def _load(
    stack, up_stack, layout, x_ptr, x_row, has_row, only, inside, first,
    ROW_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, GATED: tl.constexpr, NESTED: tl.constexpr,
):  # fmt: skip
    """Loads codes, scales and x of CHUNKS chunks from `first` on; nothing behind the last one."""
    chunk = first + tl.arange(0, CHUNKS)
    word_chunk = first + tl.arange(0, CHUNKS * 8) // 8
    is_there = first < ROW_CHUNKS
    there = (chunk >= 0) & is_there
    word_there = (word_chunk >= 0) & is_there
    word_expert = tl.zeros((CHUNKS * 8,), tl.int32) + only
    expert = tl.zeros((CHUNKS,), tl.int32) + only
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
    column = first * 64 + tl.arange(0, CHUNKS * 64)
    index = x_row.to(tl.int64)[:, None] * (ROW_CHUNKS * 64) + column[None, :]
    mask = (has_row & is_there)[:, None]
    # a hint at the alignment must be at a result, and a cast has one
    bits: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.float32 else tl.int16
    bits_ptr = tl.multiple_of(x_ptr.to(tl.pointer_type(bits)), 16)
    x = tl.load(bits_ptr + index, mask=mask, other=0).to(x_ptr.dtype.element_ty, bitcast=True)
    return words, loaded, up_words, up_loaded, x


def gather_pairs(
    ids: torch.Tensor, experts: int, members: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes a group of the pairs of each expert.

    Args:
        ids: [pairs] int64, the expert of each pair; no expert has more than `members`.
        experts: how many there are.
        members: of a group, a power of two.

    Returns:
        pairs: [experts, members] int32; -1 for none.
        experts: [experts] int32, of each group; -1 if it has no pair.
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
