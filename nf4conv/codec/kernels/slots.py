"""Reads weights and packed codes: 16 bytes of weight, a *slot*, at a time.

A slot is what one thread loads at once: 8 half-precision elements, whose codes are one packed
32-bit word, or 4 float32 elements, whose codes are 16 bits. A program takes a *tile*: SLOTS slots,
which are whole blocks.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

# Values of a kernel's constexpr ACCESS: how it may touch a weight and its packed form.
FULL = tl.constexpr(0)  # every program has all its elements, and pointers are aligned: no masks
SLOTWISE = tl.constexpr(1)  # the size is a multiple of a slot, pointers are aligned: masks by slot
ELEMENTWISE = tl.constexpr(2)  # any size, any alignment


def configuration(
    dtype: torch.dtype, blocksize: int, configurations: Mapping[int, tuple[int, int]]
) -> tuple[int, int]:
    """Returns the elements and the warps of a program that takes whole blocks, given for a kernel
    by bytes of an element the slots and warps of a program.
    """
    slot = 16 // dtype.itemsize
    slots, num_warps = configurations[dtype.itemsize]
    return max(slots, blocksize // slot) * slot, num_warps


def access(n: int, dtype: torch.dtype, tile: int, weight: int, packed: int) -> int:
    """Returns how a kernel may touch a weight of n elements and its packed form at two addresses,
    if a program takes `tile` elements: FULL, SLOTWISE or ELEMENTWISE.
    """
    if n * dtype.itemsize % 16 or weight % 16 or packed % 4:
        return int(ELEMENTWISE.value)
    return int(SLOTWISE.value if n % tile else FULL.value)


@triton.jit
def load_words(
    weight_ptr,
    count,
    DTYPE: tl.constexpr,
    SLOT: tl.constexpr,
    SLOTS: tl.constexpr,
    ACCESS: tl.constexpr,
):
    """Loads the bits of a tile, zeros behind its `count` elements: [SLOTS, 4] int32."""
    slot = tl.arange(0, SLOTS)[:, None]
    word = slot * 4 + tl.arange(0, 4)[None, :]
    word_ptr = weight_ptr.to(tl.pointer_type(tl.int32))
    if ACCESS == FULL:
        return tl.load(tl.multiple_of(word_ptr, 16) + word, eviction_policy="evict_first")
    elif ACCESS == SLOTWISE:
        mask = slot * SLOT < count
        return tl.load(
            tl.multiple_of(word_ptr, 16) + word, mask=mask, other=0, eviction_policy="evict_first"
        )
    elif DTYPE == tl.float32:
        return tl.load(word_ptr + word, mask=word < count, other=0)
    else:
        half_ptr = weight_ptr.to(tl.pointer_type(tl.int16)) + word * 2
        low = tl.load(half_ptr, mask=word * 2 < count, other=0).to(tl.int32) & 0xFFFF
        high = tl.load(half_ptr + 1, mask=word * 2 + 1 < count, other=0).to(tl.int32)
        return low | (high << 16)


@triton.jit
def split_words(words):
    """Returns the four columns of [SLOTS, 4]."""
    w02, w13 = tl.split(tl.reshape(words, (words.shape[0], 2, 2)))
    w0, w2 = tl.split(w02)
    w1, w3 = tl.split(w13)
    return w0, w1, w2, w3


@triton.jit
def halves(words, DTYPE: tl.constexpr):
    """Returns the elements of even and of odd index of loaded words, as float32: [SLOTS, 4] each,
    or [SLOTS, 2] of float32 weights.
    """
    if DTYPE == tl.float32:
        return tl.split(tl.reshape(words.to(tl.float32, bitcast=True), (words.shape[0], 2, 2)))
    elif DTYPE == tl.bfloat16:
        low = words << 16
        high = words & -65536
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(tl.float16, bitcast=True)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def load_packed(packed_ptr, count, SLOT: tl.constexpr, SLOTS: tl.constexpr, ACCESS: tl.constexpr):
    """Loads the packed codes of each slot in its low 32 (or 16) bits: [SLOTS] int32."""
    slot = tl.arange(0, SLOTS)
    if ACCESS == ELEMENTWISE:
        byte = tl.arange(0, SLOT // 2)[None, :]
        index = slot[:, None] * (SLOT // 2) + byte
        values = tl.load(packed_ptr + index, mask=index * 2 < count, other=0).to(tl.int32)
        return tl.sum(values << (byte * 8), axis=1)
    else:
        word: tl.constexpr = tl.int32 if SLOT == 8 else tl.int16
        # This hint is not true. It makes Triton give each thread one word at a time, so that the
        # output comes out as 16 bytes a thread with neighbouring threads side by side, and needs no
        # exchange through shared memory.
        single = tl.max_contiguous(tl.multiple_of(slot, [1]), [1])
        word_ptr = packed_ptr.to(tl.pointer_type(word)) + single
        if ACCESS == SLOTWISE:
            mask = slot * SLOT < count
            codes = tl.load(word_ptr, mask=mask, other=0, eviction_policy="evict_first")
        else:
            codes = tl.load(word_ptr, eviction_policy="evict_first")
        return codes.to(tl.int32)


@triton.jit
def by_slot(of_block, SLOTS: tl.constexpr):
    """Repeats the values of blocks for their slots: [blocks] → [SLOTS]."""
    SHAPE: tl.constexpr = (of_block.shape[0], SLOTS // of_block.shape[0])
    return tl.reshape(tl.broadcast_to(of_block[:, None], SHAPE), (SLOTS,))


@triton.jit
def tile_of_program(rows, columns, tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the rows, [ROWS, 1], and columns, [1, COLUMNS], of a program of one matrix, `tiles`
    for each row; and which elements there are.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles * ROWS + tl.arange(0, ROWS)[:, None]
    column = program % tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < rows) & (column < columns)
