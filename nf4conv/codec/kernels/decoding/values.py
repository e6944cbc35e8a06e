"""Decodes packed codes: the values of 4-bit codes, times absmax, as bitsandbytes rounds them.

The values are the entries of tables.value_table. With inline assembly each lane of a warp holds one
of them, and they are looked up by shuffles; without, in memory.
"""

import triton
import triton.language as tl

from nf4conv.codec.kernels.arithmetic import lane_entry, lookup, multiply
from nf4conv.codec.kernels.assembly import decode_assembly, values_assembly

_VALUES = tl.constexpr(values_assembly())


@triton.jit
def lane_values(table_ptr, words):
    """Returns the entry of a lane of the table, of the shape of words."""
    return lane_entry(tl.zeros(words.shape, tl.int64) + table_ptr.to(tl.int64), True)


@triton.jit
def shuffled_values(words, scale, table_ptr, DTYPE: tl.constexpr):
    """Decodes slots by shuffles.

    words: [SLOTS] int32, the packed codes. scale: [SLOTS] float32, absmax. DTYPE: of the elements.

    Returns the elements as words, [SLOTS, 4] int32.
    """
    w0, w1, w2, w3 = tl.inline_asm_elementwise(
        decode_assembly(DTYPE),
        "=r,=r,=r,=r,r,f,r",
        [words, scale, lane_values(table_ptr, words)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (words.shape[0], 4))


@triton.jit
def plain_values(words, scale, table_ptr, SLOT: tl.constexpr, PTX: tl.constexpr):
    """Decodes slots without shuffles.

    words: [SLOTS] int32, the packed codes. scale: [SLOTS] float32, absmax.

    Returns the elements of even and of odd index: twice [SLOTS, SLOT / 2] float32.
    """
    shift = tl.arange(0, SLOT // 2)[None, :] * 8
    spread = tl.broadcast_to(scale[:, None], (words.shape[0], SLOT // 2))
    even = lookup(table_ptr, words[:, None] >> (shift + 4), False).to(tl.float32, bitcast=True)
    odd = lookup(table_ptr, words[:, None] >> shift, False).to(tl.float32, bitcast=True)
    return multiply(even, spread, PTX), multiply(odd, spread, PTX)


@triton.jit
def tile_values(words, scale, value, table_ptr, PTX: tl.constexpr):
    """Decodes words that stand in rows.

    words: [ROWS, WORDS] int32, eight codes each. scale: [ROWS, CHUNKS] float32, absmax of as many
    words each as there are for a chunk. value: lane_values, read with PTX.

    Returns the elements, [ROWS, 8 · WORDS] float32.
    """
    OF_CHUNK: tl.constexpr = words.shape[1] // scale.shape[1]
    COUNT: tl.constexpr = words.shape[0] * words.shape[1]
    by_word = tl.broadcast_to(scale[:, :, None], (scale.shape[0], scale.shape[1], OF_CHUNK))
    spread = tl.reshape(by_word, words.shape)
    if PTX:
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            _VALUES,
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,f",
            [words, value, spread],
            dtype=(
                tl.float32, tl.float32, tl.float32, tl.float32,
                tl.float32, tl.float32, tl.float32, tl.float32,
            ),
            is_pure=True,
            pack=1,
        )  # fmt: skip
        even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
        odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
        values = tl.join(even, odd)
    else:
        flat = tl.reshape(words, (COUNT,))
        even, odd = plain_values(flat, tl.reshape(spread, (COUNT,)), table_ptr, 8, False)
        values = tl.interleave(even, odd)
    return tl.reshape(values, (words.shape[0], words.shape[1] * 8))
