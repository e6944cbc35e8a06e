"""Decodes the experts that are used, of one stack or of gate and up, in one launch.

The result is what a grouped product wants: all experts side by side, gate and up one above the
other or by turns. What belongs to experts without rows is not written, and not read by the product.
So nothing of the choice is needed on the host.
"""

import triton.language as tl

from nf4conv.codec.kernels.arithmetic import multiply
from nf4conv.codec.kernels.decoding.dequantize import plain_values, shuffled_values
from nf4conv.codec.kernels.launch import Launcher, kernel


@kernel
def active_kernel(
    out_ptr,
    choice_ptr,
    table_ptr,
    weight,
    elements: tl.int32,
    columns: tl.int32,
    tiles: tl.int32,
    out_elements: tl.int64,
    up_element: tl.int64,
    row_step: tl.int32,
    BLOCKSIZE: tl.constexpr,
    TILE: tl.constexpr,
    STACKS: tl.constexpr,
    BY_ENDS: tl.constexpr,
    NESTED: tl.constexpr,
    PTX: tl.constexpr,
):
    """Decodes a tile of TILE elements of one matrix.

    weight: an Operand; its second stack is read if STACKS is 2.

    Pointers to tensors:
        out_ptr: [.., out_elements] float32, float16 or bfloat16, written: row r of a matrix begins
            at r · row_step · columns, and of the second stack up_element behind it.
        choice_ptr: BY_ENDS, [experts] int32: where the rows of each expert end; those without
            rows are left out. Otherwise [n] int64: the expert of each matrix of the result.
        table_ptr: [32] int32, tables.value_table.

    Scalars: elements of a matrix, its columns; tiles of a matrix.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    SLOT: tl.constexpr = 4 if DTYPE == tl.float32 else 8
    SLOTS: tl.constexpr = TILE // SLOT
    tile = tl.program_id(0) % tiles
    which = tl.program_id(0) // tiles % STACKS
    to = tl.program_id(0) // (tiles * STACKS)
    if BY_ENDS:
        expert = to
        before = tl.load(choice_ptr + to - 1, mask=to > 0, other=0)
        if tl.load(choice_ptr + to) == before:
            return
    else:
        expert = tl.load(choice_ptr + to).to(tl.int32)
    out_ptr += to.to(tl.int64) * out_elements
    codes_ptr = weight.stack.codes
    absmax_ptr = weight.stack.absmax
    nested_absmax_ptr = weight.stack.nested_absmax
    offset_ptr = weight.stack.offset
    if STACKS == 2:  # noqa: SIM102 - known when it compiles
        if which == 1:
            codes_ptr = weight.up.codes
            absmax_ptr = weight.up.absmax
            nested_absmax_ptr = weight.up.nested_absmax
            offset_ptr = weight.up.offset
            out_ptr += up_element
    first = tile * TILE
    slot = tl.arange(0, SLOTS)
    block = tl.minimum(first // BLOCKSIZE + tl.arange(0, TILE // BLOCKSIZE), weight.blocks - 1)
    block_of_stack = expert.to(tl.int64) * weight.blocks + block
    absmax = tl.load(absmax_ptr + block_of_stack)
    if NESTED:
        of_expert = expert * weight.nested_blocks + (block >> 8)
        of_stack = (block_of_stack >> 8).to(tl.int32)
        nested_block = tl.where(weight.nested_blocks > 0, of_expert, of_stack)
        code = tl.load(weight.nested_code + absmax.to(tl.int32))
        offset = tl.load(offset_ptr + expert * weight.offset_step)
        absmax = multiply(code, tl.load(nested_absmax_ptr + nested_block), PTX) + offset
    spread = tl.broadcast_to(absmax[:, None], (TILE // BLOCKSIZE, BLOCKSIZE // SLOT))
    scale = tl.reshape(spread, (SLOTS,))
    word: tl.constexpr = tl.int32 if SLOT == 8 else tl.int16
    # a hint that is not true, as in slots.py: each thread is to have one word at a time
    single = tl.max_contiguous(tl.multiple_of(slot, [1]), [1])
    element = first + slot * SLOT
    word_ptr = codes_ptr.to(tl.pointer_type(word))
    word_ptr += expert.to(tl.int64) * (elements // SLOT) + first // SLOT + single
    words = tl.load(word_ptr, mask=element < elements, other=0, eviction_policy="evict_first")
    words = words.to(tl.int32)
    row = element // columns
    target = row * (row_step - 1) * columns + element  # a slot is in one row
    if PTX:
        decoded = shuffled_values(words, scale, table_ptr, DTYPE)
        target_word = (target // SLOT * 4)[:, None] + tl.arange(0, 4)[None, :]
        out_word_ptr = tl.multiple_of(out_ptr.to(tl.pointer_type(tl.int32)), 16) + target_word
        tl.store(out_word_ptr, decoded, mask=(element < elements)[:, None])
    else:
        even, odd = plain_values(words, scale, table_ptr, SLOT, PTX)
        values = tl.interleave(even, odd).to(DTYPE)
        inner = tl.arange(0, SLOT)[None, :]
        tl.store(out_ptr + target[:, None] + inner, values, mask=(element < elements)[:, None])


launch_active = Launcher(active_kernel)
