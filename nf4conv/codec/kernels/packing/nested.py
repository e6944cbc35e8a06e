"""Encodes absmax to 8 bits: the second quantization, of absmax itself in blocks of 256.

The mean that is subtracted first is torch's own reduction, so its bits are those that bitsandbytes
gets.
"""

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.arithmetic import (
    SMALLEST_NORMAL,
    lane_entry,
    magnitude,
    multiply,
    reciprocal,
)
from nf4conv.codec.kernels.assembly import bisect_assembly
from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.packing.pack import find_tile
from nf4conv.codec.kernels.tables import middle_table

NUM_WARPS = 1


def compress_absmax(
    absmax: torch.Tensor, codes: torch.Tensor, nested_absmax: torch.Tensor
) -> torch.Tensor:
    """Quantizes absmax to 8 bits, as `reference.compress_absmax` does. Nothing waits for the
    device.
    """
    offset = absmax.mean()
    blocks = absmax.numel()
    if blocks:
        arguments = (absmax, offset, codes, nested_absmax, middle_table(absmax.device), blocks)
        _launch(nested_absmax.numel(), arguments, (absmax.is_cuda,), None, NUM_WARPS)
    return offset


@kernel
def _compress_kernel(
    absmax_ptr,
    offset_ptr,
    codes_ptr,
    nested_absmax_ptr,
    middle_ptr,
    blocks: tl.int64,
    PTX: tl.constexpr,
):
    """Encodes a nested block of an absmax vector.

    Pointers to tensors:
        absmax_ptr: [blocks] float32.
        offset_ptr: [1] float32, what is subtracted.
        codes_ptr: [blocks] uint8, written.
        nested_absmax_ptr: [ceil(blocks / 256)] float32, written.
        middle_ptr: [20, 32] float32, tables.middle_table.
    """
    block = tl.program_id(0).to(tl.int64)
    first = block * 256
    count = tl.minimum(blocks - first, 256).to(tl.int32)
    absmax_ptr += first
    codes_ptr += first
    nested_absmax_ptr += block
    _compress_tile(absmax_ptr, offset_ptr, codes_ptr, nested_absmax_ptr, middle_ptr, count, PTX)


_launch = Launcher(_compress_kernel)


@kernel
def compress_batch_kernel(table_ptr, means_ptr, middle_ptr, tensors: tl.int64, PTX: tl.constexpr):
    """Encodes a nested block of one of many absmax vectors to 8 bits.

    Pointers to tensors:
        table_ptr: [5, tensors] int64: addresses of absmax (float32), of its codes (uint8, written)
            and of nested_absmax (float32, written); the number of blocks; the first tile.
        means_ptr: [tensors] float32, what is subtracted.
        middle_ptr: [20, 32] float32, tables.middle_table.
    """
    tensor, first, count, addresses = find_tile(table_ptr, tensors, 256)
    absmax_ptr = addresses[0].to(tl.pointer_type(tl.float32)) + first
    codes_ptr = addresses[1].to(tl.pointer_type(tl.uint8)) + first
    nested_absmax_ptr = addresses[2].to(tl.pointer_type(tl.float32)) + first // 256
    _compress_tile(
        absmax_ptr, means_ptr + tensor, codes_ptr, nested_absmax_ptr, middle_ptr, count, PTX
    )


@triton.jit
def _compress_tile(
    absmax_ptr, offset_ptr, codes_ptr, nested_absmax_ptr, middle_ptr, count, PTX: tl.constexpr
):
    """Encodes a nested block of `count` ≤ 256 values; the pointers are _compress_kernel's, at the
    block.
    """
    index = tl.arange(0, 256)[None, :]
    mask = index < count
    offset = tl.load(offset_ptr)
    absmax = tl.load(absmax_ptr + index, mask=mask, other=0.0)
    difference = tl.where(mask, absmax - offset, 0.0)  # the library quantizes zeros behind the end
    peak = tl.max(magnitude(difference), axis=1)
    peak = tl.where(tl.abs(peak) < SMALLEST_NORMAL, 0.0, peak)
    tl.store(nested_absmax_ptr + tl.arange(0, 1), peak)
    scale = reciprocal(peak, middle_ptr.to(tl.pointer_type(tl.int32)) + 256, PTX)
    quotient = multiply(difference, tl.broadcast_to(scale[:, None], (1, 256)), PTX)
    code = _bisect(quotient, middle_ptr) if PTX else _plain_bisect(quotient, middle_ptr)
    tl.store(codes_ptr + index, code.to(tl.uint8), mask=mask)


@triton.jit
def _bisect(quotient, middle_ptr):
    """Returns the codes of quotients, int32, by shuffles; middle_ptr is tables.middle_table."""
    rows = ()  # a tuple that grows, which the compiler unrolls
    for row in tl.static_range(8):
        rows = rows + (lane_entry(middle_ptr + 32 * row, quotient),)  # type: ignore[assignment]
    return tl.inline_asm_elementwise(
        bisect_assembly(),
        "=r,f,r,r,r,r,r,r,r,r",
        (quotient,) + rows,
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _plain_bisect(quotient, middle_ptr):
    """Returns the number of middles below the quotients, int32, without inline assembly.

    A middle itself counts if its index is odd: ties go to even codes.
    """
    code = tl.zeros(quotient.shape, tl.int32)
    for level in tl.static_range(8):
        index = code + ((128 >> level) - 1)
        middle = tl.load(middle_ptr + index % 8 * 32 + index // 8)
        above = quotient > middle if level == 7 else quotient >= middle
        code += tl.where(above, 128 >> level, 0)
    return code
