"""Decodes packed 4-bit codes with absmax, plain or nested: one pass, one launch.

A *slot* is 16 bytes of output, what one thread stores at once: 8 half-precision elements from one
packed 32-bit word, or 4 float32 elements from 16 packed bits.

absmax   once for each block; nested: code[q] · nested_absmax, rounded, then + offset, rounded:
         never one FMA
value    the 16 values, tables.value_table, sit in the lanes of a warp and are looked up by shuffles
         (docs/kernels.md); without inline assembly, in memory
product  value · absmax in float32, flushed, then one rounding to the output dtype
"""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.arithmetic import lane_entry, lookup, multiply
from nf4conv.codec.kernels.assembly import decode_assembly, values_assembly
from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.slots import (
    ELEMENTWISE,
    FULL,
    SLOTWISE,
    access,
    by_slot,
    configuration,
    load_packed,
)
from nf4conv.codec.kernels.tables import value_table
from nf4conv.codec.quant_state import Addresses, Decoding, Form

CONFIGURATIONS = {2: (128, 1), 4: (256, 4)}
"""By bytes of an element of the output, slots and warps of a program: the fastest of the sweep in
docs/kernels.md. The next smaller program would be limited by how fast the card can start programs.
"""

STREAM_BYTES = 24 << 20
"""An output larger than this, about half an L2 cache, is marked to leave the cache first; a smaller
one stays for its reader.
"""

_VALUES = tl.constexpr(values_assembly())


def dequantize_blocks(packed: torch.Tensor, decoding: Decoding, out: torch.Tensor) -> None:
    """Decodes a packed weight, of any shape, as `reference.dequantize_blocks` does."""
    n = out.numel()
    if n == 0:
        return
    blocksize = decoding.blocksize
    tile, num_warps = configuration(out.dtype, blocksize, CONFIGURATIONS)
    table = value_table(decoding.quant_type, out.device)
    touched = access(n, out.dtype, tile, out.data_ptr(), packed.data_ptr())
    stream = out.nbytes > STREAM_BYTES
    _launch(
        -(-n // tile),
        (packed, *decoding.pointers(), table, out, n),
        (blocksize, tile, touched, stream, out.is_cuda),
        (out.dtype, decoding.offset is None),
        num_warps,
    )


def prepare_dequantize(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, form: Form, alignment: int
) -> Callable[[int, int, Addresses], None]:
    """Prepares to decode all weights of one shape and form, whose packed codes begin at a multiple
    of `alignment`, for less than a call of `dequantize_blocks` takes.

    Returns a function of a stream, the address of the output, which is a multiple of 16, and a
    weight.
    """
    n = math.prod(shape)
    tile, num_warps = configuration(dtype, form.blocksize, CONFIGURATIONS)
    table = value_table(form.quant_type, device).data_ptr()
    touched = access(n, dtype, tile, 0, alignment)
    stream_out = n * dtype.itemsize > STREAM_BYTES
    absmax = torch.uint8 if form.nested else torch.float32
    others = torch.float32
    launch = _launch.prepare(
        device,
        (torch.uint8, absmax, others, others, others, torch.int32, dtype, n),
        (form.blocksize, tile, touched, stream_out, True),
        (dtype, not form.nested),
        num_warps,
    )
    programs = -(-n // tile)

    def decode(stream: int, out: int, weight: Addresses) -> None:
        launch(programs, stream, *weight, table, out, n)

    return decode


@kernel
def dequantize_kernel(
    packed_ptr,
    absmax_ptr,
    nested_code_ptr,
    nested_absmax_ptr,
    offset_ptr,
    table_ptr,
    out_ptr,
    n: tl.int64,
    BLOCKSIZE: tl.constexpr,
    TILE: tl.constexpr,
    ACCESS: tl.constexpr,
    STREAM: tl.constexpr,
    PTX: tl.constexpr,
):
    """Decodes a tile of TILE elements.

    Pointers to tensors:
        packed_ptr: [ceil(n / 2)] uint8.
        absmax_ptr: [ceil(n / BLOCKSIZE)] float32, or uint8 if it is nested.
        nested_code_ptr, nested_absmax_ptr, offset_ptr: [256], [ceil(blocks / 256)], [1] float32;
            read if absmax is nested.
        table_ptr: [32] int32, tables.value_table.
        out_ptr: [n] float32, float16 or bfloat16, written.

    Constexprs:
        ACCESS: FULL, SLOTWISE or ELEMENTWISE of slots.py.
        BLOCKSIZE: elements that share one absmax.
        TILE: elements of a program, a multiple of BLOCKSIZE.
        STREAM: True if the output is too large for its reader to find it in L2.
        PTX: True to use inline assembly; False in the interpreter.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    SLOT: tl.constexpr = 4 if DTYPE == tl.float32 else 8
    SLOTS: tl.constexpr = TILE // SLOT
    BLOCKS: tl.constexpr = TILE // BLOCKSIZE
    program = tl.program_id(0).to(tl.int64)
    first = program * TILE
    count = tl.minimum(n - first, TILE).to(tl.int32)
    words = load_packed(packed_ptr + first // 2, count, SLOT, SLOTS, ACCESS)
    state = (absmax_ptr, nested_code_ptr, nested_absmax_ptr, offset_ptr)
    absmax, _ = load_absmax(state, program * BLOCKS, count, BLOCKSIZE, BLOCKS, ACCESS, PTX)
    scale = by_slot(absmax, SLOTS)
    out_ptr += first
    if PTX and ACCESS != ELEMENTWISE:
        # decode by shuffles and store 16 bytes a thread
        decoded = shuffled_values(words, scale, table_ptr, DTYPE)
        slot = tl.arange(0, SLOTS)[:, None]
        word_ptr = tl.multiple_of(out_ptr.to(tl.pointer_type(tl.int32)), 16)
        word_ptr = word_ptr + slot * 4 + tl.arange(0, 4)[None, :]
        policy: tl.constexpr = "evict_first" if STREAM else ""
        if ACCESS == SLOTWISE:
            tl.store(word_ptr, decoded, mask=slot * SLOT < count, eviction_policy=policy)
        else:
            tl.store(word_ptr, decoded, eviction_policy=policy)
    else:
        even, odd = plain_values(words, scale, table_ptr, SLOT, PTX)
        values = tl.interleave(even, odd).to(DTYPE)
        element = tl.arange(0, SLOTS)[:, None] * SLOT + tl.arange(0, SLOT)[None, :]
        tl.store(out_ptr + element, values, mask=element < count)


_launch = Launcher(dequantize_kernel)


@triton.jit
def load_absmax(
    state,
    first_block,
    count,
    BLOCKSIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ACCESS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Loads and decodes the absmax of consecutive blocks.

    `state` has the pointers absmax_ptr, nested_code_ptr, nested_absmax_ptr and offset_ptr of
    dequantize_kernel. `count` elements of the tile are there.

    Returns absmax and the nested absmax of each block, 0 if there is none: twice [BLOCKS] float32.
    """
    absmax_ptr, nested_code_ptr, nested_absmax_ptr, offset_ptr = state
    block = tl.arange(0, BLOCKS)
    if ACCESS == FULL:
        absmax = tl.load(absmax_ptr + first_block + block)
    else:
        # blocks behind the last one read it again
        block = tl.minimum(block, (count - 1) // BLOCKSIZE)
        absmax = tl.load(absmax_ptr + first_block + block)
    if absmax_ptr.dtype.element_ty == tl.uint8:
        code = tl.load(nested_code_ptr + absmax.to(tl.int32))
        nested_absmax = tl.load(nested_absmax_ptr + (first_block + block) // 256)
        return multiply(code, nested_absmax, PTX) + tl.load(offset_ptr), nested_absmax
    else:
        return absmax, tl.zeros((BLOCKS,), tl.float32)


@triton.jit
def shuffled_values(words, scale, table_ptr, DTYPE: tl.constexpr):
    """Decodes slots by shuffles.

    words: [SLOTS] int32, the packed codes. scale: [SLOTS] float32, absmax. DTYPE: of the elements.

    Returns the elements as words, [SLOTS, 4] int32.
    """
    w0, w1, w2, w3 = tl.inline_asm_elementwise(
        decode_assembly(DTYPE),
        "=r,=r,=r,=r,r,f,r",
        [words, scale, lane_entry(table_ptr, words)],
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
    words each as there are for a chunk. value: lane_entry of the table, read with PTX.

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
