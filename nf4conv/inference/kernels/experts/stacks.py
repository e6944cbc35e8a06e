"""Reads codes and scales of a stack of packed experts.

A *chunk* is 64 elements of a row, 8 words of codes; a block of 64 or more holds whole chunks. A
*stack* is a tuple of pointers (codes, absmax, nested absmax, offset) and the first row that is
meant in each matrix; a *layout* is a tuple of sizes that all stacks of a launch share:

    row_step        rows of the matrix between two that follow each other in the result: 2 where
                    gate and up take turns
    chunks          chunks of a row
    expert_chunks   chunks from one expert to the next
    blocks          absmax from one expert to the next
    nested_blocks   nested absmax from one expert to the next; 0 if nested blocks run over borders
    offset_step     offsets from one expert to the next; 0 if all experts share one
    block_shift     a block has 64 << block_shift elements
"""

import triton
import triton.language as tl

from nf4conv.codec.kernels.arithmetic import lookup, multiply
from nf4conv.codec.kernels.assembly import dot_assembly, values_assembly

DOT = tl.constexpr(dot_assembly())
VALUES = tl.constexpr(values_assembly())
VALUES_OPERANDS = tl.constexpr("=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,f")


@triton.jit
def load_words(stack, layout, expert, row, chunk, there):
    """Loads the codes of chunks: [ROWS, WORDS] int32, eight words of each chunk.

    row: [ROWS], of the matrix. expert, chunk, there: [WORDS], for each word: the expert, the chunk
    of its row, and whether it is read at all; words begin with the first of a chunk.
    """
    codes_ptr, _, _, _, _ = stack
    _, chunks, expert_chunks, _, _, _, _ = layout
    word = tl.arange(0, chunk.shape[0])
    inside = row[:, None] * (chunks * 8) + (chunk * 8 + word % 8)[None, :]
    place = (expert.to(tl.int64) * expert_chunks * 8)[None, :] + inside
    word_ptr = tl.multiple_of(codes_ptr.to(tl.pointer_type(tl.int32)), 16) + place
    mask = there[None, :] & (row >= 0)[:, None]
    return tl.load(word_ptr, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def load_scales(stack, layout, expert, row, chunk, there, NESTED: tl.constexpr):
    """Loads what `scales` decodes, for the chunks of `load_words`: absmax, nested absmax and
    offset, [ROWS, CHUNKS] each; only the first one is used without double quantization.
    """
    _, absmax_ptr, nested_absmax_ptr, offset_ptr, _ = stack
    _, chunks, _, blocks, nested_blocks, offset_step, block_shift = layout
    mask = there[None, :] & (row >= 0)[:, None]
    block = (row[:, None] * chunks + chunk[None, :]) >> block_shift
    first = expert[None, :].to(tl.int64) * blocks
    absmax = tl.load(absmax_ptr + first + block, mask=mask, other=0)
    if NESTED:
        of_expert = expert[None, :] * nested_blocks + (block >> 8)
        of_stack = ((first + block) >> 8).to(tl.int32)
        nested_block = tl.where(nested_blocks > 0, of_expert, of_stack)
        nested_absmax = tl.load(nested_absmax_ptr + nested_block, mask=mask, other=0.0)
        offset = tl.load(offset_ptr + expert * offset_step, mask=there, other=0.0)
        return absmax, nested_absmax, tl.broadcast_to(offset[None, :], absmax.shape)
    else:
        return absmax, absmax, absmax


@triton.jit
def scales(loaded, nested_code_ptr, NESTED: tl.constexpr, PTX: tl.constexpr):
    """Returns the absmax of chunks as it decodes, of what `load_scales` returned."""
    absmax, nested_absmax, offset = loaded
    if NESTED:
        code = tl.load(nested_code_ptr + absmax.to(tl.int32))
        return multiply(code, nested_absmax, PTX) + offset
    else:
        return absmax


@triton.jit
def decoded(words, scale, value, table_ptr, PTX: tl.constexpr):
    """Decodes words, [ROWS, WORDS], with the scales of their chunks, [ROWS, CHUNKS]:
    [ROWS, 8 · WORDS] float32.

    value: this lane's value, of the shape of the words; read with PTX.
    """
    OF_CHUNK: tl.constexpr = words.shape[1] // scale.shape[1]
    by_word = tl.broadcast_to(scale[:, :, None], (scale.shape[0], scale.shape[1], OF_CHUNK))
    spread = tl.reshape(by_word, words.shape)
    if PTX:
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            VALUES,
            VALUES_OPERANDS,
            [words, value, spread],
            dtype=(
                tl.float32, tl.float32, tl.float32, tl.float32,
                tl.float32, tl.float32, tl.float32, tl.float32,
            ),
            is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        v0 = multiply(value_of(table_ptr, words, 0), spread, False)
        v1 = multiply(value_of(table_ptr, words, 1), spread, False)
        v2 = multiply(value_of(table_ptr, words, 2), spread, False)
        v3 = multiply(value_of(table_ptr, words, 3), spread, False)
        v4 = multiply(value_of(table_ptr, words, 4), spread, False)
        v5 = multiply(value_of(table_ptr, words, 5), spread, False)
        v6 = multiply(value_of(table_ptr, words, 6), spread, False)
        v7 = multiply(value_of(table_ptr, words, 7), spread, False)
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.reshape(tl.join(even, odd), (words.shape[0], words.shape[1] * 8))


@triton.jit
def value_of(table_ptr, words, ELEMENT: tl.constexpr):
    """Looks up the value of one of 8 codes of words, without shuffles."""
    SHIFT: tl.constexpr = ELEMENT // 2 * 8 + 4 - ELEMENT % 2 * 4
    return lookup(table_ptr, words >> SHIFT, False).to(tl.float32, bitcast=True)
