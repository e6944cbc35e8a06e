"""Encodes a tile of a weight with absmax: one pass, every element read once.

A program encodes SLOTS slots (slots.py), whole blocks of them:

words     [SLOTS, 4] int32 as loaded
absmax    the largest magnitude in a slot, then over the slots of a block
quotient  x · (1 / absmax), with the hardware's reciprocal
code      a bucket of the quotient's range, found with one rounded operation; then the number of
          cuts below the bucket plus one exact comparison with the only cut inside it. Both tables
          sit in the lanes of a warp, one entry each, and are looked up by shuffles (tables.py,
          docs/kernels.md).
"""

import triton
import triton.language as tl

from nf4conv.codec.kernels.arithmetic import (
    LOWEST,
    SMALLEST_NORMAL,
    gather,
    lane_entry,
    magnitude,
    multiply,
    reciprocal,
)
from nf4conv.codec.kernels.assembly import encode_assembly, peak_assembly
from nf4conv.codec.kernels.slots import (
    ELEMENTWISE,
    FULL,
    SLOTWISE,
    by_slot,
    halves,
    load_words,
    split_words,
)

CONFIGURATIONS = {2: (512, 4), 4: (256, 4)}
"""By bytes of an element, slots and warps of a program: the fastest of the sweep in
docs/kernels.md.
"""

_COEFFICIENTS = tl.constexpr(64)  # where they begin in tables.bucket_table, for a reciprocal


@triton.jit
def quantize_tile(
    tile,
    BLOCKSIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_FP4: tl.constexpr,
    ACCESS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Encodes a tile with absmax.

    `tile` has the pointers of quantize_kernel, at the tile, and its number of elements, `count` ≤
    TILE. TILE is a multiple of BLOCKSIZE.
    """
    weight_ptr, packed_ptr, absmax_ptr, table_ptr, count = tile
    DTYPE: tl.constexpr = weight_ptr.dtype.element_ty
    SLOT: tl.constexpr = 4 if DTYPE == tl.float32 else 8
    SLOTS: tl.constexpr = TILE // SLOT
    BLOCKS: tl.constexpr = TILE // BLOCKSIZE
    words = load_words(weight_ptr, count, DTYPE, SLOT, SLOTS, ACCESS)
    if PTX:
        w0, w1, w2, w3 = split_words(words)
        peak = tl.inline_asm_elementwise(
            peak_assembly(DTYPE),
            "=f,r,r,r,r",
            [w0, w1, w2, w3],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        even, odd = halves(words, DTYPE)
        peak = tl.max(tl.maximum(magnitude(even), magnitude(odd)), axis=1)
    peak = tl.max(tl.reshape(peak, (BLOCKS, BLOCKSIZE // SLOT)), axis=1)
    # the lowest float32 where a block holds only NaN
    peak = tl.maximum(peak, LOWEST)
    absmax = tl.where(tl.abs(peak) < SMALLEST_NORMAL, 0.0, peak)
    block = tl.arange(0, BLOCKS)
    if ACCESS == FULL:
        tl.store(absmax_ptr + block, absmax)
    else:
        tl.store(absmax_ptr + block, absmax, mask=block * BLOCKSIZE < count)
    scale = by_slot(reciprocal(absmax, table_ptr + _COEFFICIENTS, PTX), SLOTS)
    if PTX:
        cut = lane_entry(table_ptr, scale)
        below = lane_entry(table_ptr + 32, scale)
        codes = tl.inline_asm_elementwise(
            encode_assembly(DTYPE, IS_FP4),
            "=r,r,r,r,r,f,r,r",
            [w0, w1, w2, w3, scale, cut, below],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        codes = plain_codes(even, odd, scale, table_ptr, IS_FP4)
    store_codes(packed_ptr, codes, count, SLOT, SLOTS, ACCESS)


@triton.jit
def plain_codes(even, odd, scale, table_ptr, IS_FP4: tl.constexpr):
    """Returns the packed codes of each slot in its low 32 (or 16) bits, [SLOTS] int32.

    This is the plain form, without inline assembly.

    even, odd: [SLOTS, 4], or [SLOTS, 2] of float32 weights. scale: [SLOTS], 1 / absmax.
    """
    scale = tl.broadcast_to(scale[:, None], even.shape)
    high = plain_code(multiply(even, scale, False), table_ptr, IS_FP4, False)
    low = plain_code(multiply(odd, scale, False), table_ptr, IS_FP4, False)
    shift = tl.arange(0, even.shape[1])[None, :] * 8
    return tl.sum(((high << 4) | low) << shift, axis=1)


@triton.jit
def plain_code(quotient, table_ptr, IS_FP4: tl.constexpr, PTX: tl.constexpr):
    """Returns the int32 codes of quotients from -1 to 1, or NaN.

    table_ptr is tables.bucket_table.
    """
    m = tl.abs(quotient) if IS_FP4 else quotient
    position = m * 16.0 if IS_FP4 else m * 15.25 + 15.0
    # positions are not negative, so adding half and cutting off rounds; NaN has a bucket of its own
    bucket = tl.where(m == m, position + 0.5, 31.0).to(tl.int32)
    cut = gather(table_ptr, bucket, PTX).to(tl.float32, bitcast=True)
    rank = gather(table_ptr, bucket + 32, PTX) + (m > cut).to(tl.int32)
    if IS_FP4:
        # ranks 0 … 7 are the codes 0, 1, 6, 7, 4, 5, 2, 3
        return rank ^ ((rank & 2) << 1) | tl.where(quotient < 0.0, 8, 0)
    else:
        return rank


@triton.jit
def store_codes(
    packed_ptr, codes, count, SLOT: tl.constexpr, SLOTS: tl.constexpr, ACCESS: tl.constexpr
):
    """Writes the packed codes of every slot; bytes behind the last element are left alone."""
    slot = tl.arange(0, SLOTS)
    if ACCESS == ELEMENTWISE:
        byte = tl.arange(0, SLOT // 2)[None, :]
        bytes_of_slot = (codes[:, None] >> (byte * 8)).to(tl.uint8)
        index = slot[:, None] * (SLOT // 2) + byte
        tl.store(packed_ptr + index, bytes_of_slot, mask=index * 2 < count)
    else:
        word: tl.constexpr = tl.int32 if SLOT == 8 else tl.int16
        word_ptr = packed_ptr.to(tl.pointer_type(word)) + slot
        if ACCESS == SLOTWISE:
            tl.store(word_ptr, codes.to(word), mask=slot * SLOT < count)
        else:
            tl.store(word_ptr, codes.to(word))
