"""Packed 4-bit codes and absmax, plain or nested → weight: one pass, one launch.

A *slot* is 16 bytes of output, what one thread stores at once: 8 half-precision elements from one
packed 32-bit word, or 4 float32 elements from 16 packed bits.

    absmax   once for each block; nested: code[q] · nested_absmax, rounded, then + offset, rounded: never one FMA
    value    the 16 values sit in the lanes of a warp and are looked up by shuffles (tables.py, docs/kernels.md)
    product  value · absmax in float32, flushed, then one rounding to the output dtype
"""

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.arithmetic import lane_entry, multiply
from nf4conv.codec.kernels.assembly import decode_assembly
from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.slots import access, configuration, load_packed
from nf4conv.codec.kernels.tables import value_table
from nf4conv.codec.quant_state import Decoding

CONFIGURATIONS = {2: (128, 1), 4: (256, 4)}
"""Element size of the output → slots and warps of a program: the fastest of the sweep in
docs/kernels.md. The next smaller program would be limited by how fast the card can start programs.
"""

STREAM_BYTES = 24 << 20
"""A larger output, about half an L2 cache, is marked to leave the cache first; a smaller one stays
for its reader.
"""


def dequantize_blocks(packed: torch.Tensor, decoding: Decoding, out: torch.Tensor) -> None:
    """Decode blocks of a weight; arguments as `reference.dequantize_blocks`, `packed` and `out` in
    any shape.
    """
    n = out.numel()
    if n == 0:
        return
    blocksize = decoding.blocksize
    tile, num_warps = configuration(out.dtype, blocksize, CONFIGURATIONS)
    stream = out.nbytes > STREAM_BYTES
    _launch(
        -(-n // tile),
        (packed, *decoding.pointers(), value_table(decoding.quant_type, out.device), out, n),
        (blocksize, tile, access(out, packed, n, tile), stream, out.is_cuda),
        (out.dtype, decoding.state2 is None),
        num_warps,
    )


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
    """Decode a tile of TILE elements.

    Pointers to tensors:
        packed_ptr: [ceil(n / 2)] uint8.
        absmax_ptr: [ceil(n / BLOCKSIZE)] float32, or uint8 where it is nested.
        nested_code_ptr, nested_absmax_ptr, offset_ptr: [256], [ceil(blocks / 256)], [1] float32;
            read where it is.
        table_ptr: [32] int32, tables.value_table.
        out_ptr: [n] float32, float16 or bfloat16, written.

    Constexprs:
        ACCESS: FULL, SLOTWISE or ELEMENTWISE of slots.py.
        STREAM: whether the output is too large to be found in L2 by who reads it.
        PTX: whether inline assembly may be used.
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
    scale = tl.reshape(tl.broadcast_to(absmax[:, None], (BLOCKS, BLOCKSIZE // SLOT)), (SLOTS,))
    out_ptr += first
    if PTX and ACCESS != 2:
        # decode by shuffles and store 16 bytes a thread
        value = lane_entry(tl.zeros((SLOTS,), tl.int64) + table_ptr.to(tl.int64), True)
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            decode_assembly(DTYPE),
            "=r,=r,=r,=r,r,f,r",
            [words, scale, value],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        decoded = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (SLOTS, 4))
        slot = tl.arange(0, SLOTS)[:, None]
        word_ptr = (
            tl.multiple_of(out_ptr.to(tl.pointer_type(tl.int32)), 16)
            + slot * 4
            + tl.arange(0, 4)[None, :]
        )
        policy: tl.constexpr = "evict_first" if STREAM else ""
        if ACCESS == 1:
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
    """Two [BLOCKS] float32: absmax of consecutive blocks, decoded, and nested_absmax, which is 0
    where there is none.

    The state is absmax_ptr … offset_ptr of dequantize_kernel.
    """
    absmax_ptr, nested_code_ptr, nested_absmax_ptr, offset_ptr = state
    block = tl.arange(0, BLOCKS)
    if ACCESS == 0:
        absmax = tl.load(absmax_ptr + first_block + block)
    else:
        block = tl.minimum(block, (count - 1) // BLOCKSIZE)
        absmax = tl.load(absmax_ptr + first_block + block)
    if absmax_ptr.dtype.element_ty == tl.uint8:
        code = tl.load(nested_code_ptr + absmax.to(tl.int32))
        nested_absmax = tl.load(nested_absmax_ptr + (first_block + block) // 256)
        return multiply(code, nested_absmax, PTX) + tl.load(offset_ptr), nested_absmax
    else:
        return absmax, tl.zeros((BLOCKS,), tl.float32)


@triton.jit
def plain_values(words, scale, table_ptr, SLOT: tl.constexpr, PTX: tl.constexpr):
    """Two [SLOTS, SLOT / 2] float32: the elements of even and of odd index."""
    shift = tl.arange(0, SLOT // 2)[None, :] * 8
    spread = tl.broadcast_to(scale[:, None], (words.shape[0], SLOT // 2))
    even = tl.load(table_ptr + ((words[:, None] >> (shift + 4)) & 15)).to(tl.float32, bitcast=True)
    odd = tl.load(table_ptr + ((words[:, None] >> shift) & 15)).to(tl.float32, bitcast=True)
    return multiply(even, spread, PTX), multiply(odd, spread, PTX)
