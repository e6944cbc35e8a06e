"""absmax → 8-bit codes: the second quantization, of absmax itself in blocks of 256.

The mean that is subtracted first is torch's own reduction, so its bits are those that bitsandbytes gets.
"""

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.arithmetic import magnitude, multiply, reciprocal
from nf4conv.codec.kernels.launch import Launcher
from nf4conv.codec.kernels.tables import middle_table

NUM_WARPS = 4


def compress_absmax(absmax: torch.Tensor, codes: torch.Tensor, nested_absmax: torch.Tensor) -> torch.Tensor:
    """Quantize absmax to 8 bits.

    Args:
        absmax: [blocks] float32.
        codes: [blocks] uint8, written.
        nested_absmax: [ceil(blocks / 256)] float32, written.

    Returns:
        The offset, 0-d float32 on absmax's device; nothing waits for it.
    """
    offset = absmax.mean()
    blocks = absmax.numel()
    if blocks:
        _launch(
            nested_absmax.numel(),
            (absmax, offset, codes, nested_absmax, middle_table(absmax.device), blocks),
            (absmax.is_cuda,),
            None,
            NUM_WARPS,
        )
    return offset


@triton.jit(
    do_not_specialize=["blocks"],
    do_not_specialize_on_alignment=["absmax_ptr", "offset_ptr", "codes_ptr", "nested_absmax_ptr", "middle_ptr"],
)
def _compress_kernel(
    absmax_ptr, offset_ptr, codes_ptr, nested_absmax_ptr, middle_ptr, blocks: tl.int64, PTX: tl.constexpr
):
    program = tl.program_id(0)
    first = program.to(tl.int64) * 256
    count = tl.minimum(blocks - first, 256).to(tl.int32)
    compress_tile(
        absmax_ptr + first, offset_ptr, codes_ptr + first, nested_absmax_ptr + program, middle_ptr, count, PTX
    )


_launch = Launcher(_compress_kernel)


@triton.jit
def compress_tile(absmax_ptr, offset_ptr, codes_ptr, nested_absmax_ptr, middle_ptr, count, PTX: tl.constexpr):
    """Encode one nested block of `count` ≤ 256 values."""
    index = tl.arange(0, 256)
    mask = index < count
    offset = tl.load(offset_ptr)
    # behind the end the library quantizes zeros
    difference = tl.where(mask, tl.load(absmax_ptr + index, mask=mask, other=0.0) - offset, 0.0)
    peak = tl.max(magnitude(difference), axis=0)
    peak = tl.where(tl.abs(peak) < 1.1754943508222875e-38, 0.0, peak)
    tl.store(nested_absmax_ptr, peak)
    scale = reciprocal(tl.full((256,), 0.0, tl.float32) + peak, PTX)
    quotient = multiply(difference, scale, PTX)
    # the number of middles below the quotient; a tie goes to the even code
    code = tl.zeros((256,), tl.int32)
    for level in tl.static_range(8):
        middle = tl.load(middle_ptr + code + ((128 >> level) - 1))
        above = quotient > middle if level == 7 else quotient >= middle
        code += tl.where(above, 128 >> level, 0)
    tl.store(codes_ptr + index, code.to(tl.uint8), mask=mask)
