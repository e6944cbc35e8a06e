"""One byte → float32: FP8 E4M3 and E5M2, INT8, and E8M0, a power of two (OCP Microscaling Formats v1.0, section 5)."""

from typing import Final

import torch
import triton
import triton.language as tl

E4M3 = tl.constexpr(0)
E5M2 = tl.constexpr(1)
INT8 = tl.constexpr(2)
E8M0 = tl.constexpr(3)
FLOAT = tl.constexpr(4)  # not a byte: float32, float16 or bfloat16

KINDS: Final[dict[torch.dtype, int]] = {
    torch.float8_e4m3fn: E4M3.value,
    torch.float8_e5m2: E5M2.value,
    torch.int8: INT8.value,
    torch.uint8: E8M0.value,
    torch.float8_e8m0fnu: E8M0.value,
}
"""What a byte of this dtype means; of other dtypes FLOAT."""


def kind_of(tensor: torch.Tensor) -> int:
    """Which kind its elements are."""
    return KINDS.get(tensor.dtype, int(FLOAT.value))


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as kernels take them: bytes as uint8."""
    return tensor.view(torch.uint8) if tensor.dtype in KINDS else tensor


@triton.jit
def to_float(stored, KIND: tl.constexpr):
    """float32, any shape. Exact: subnormal numbers, NaN and the infinities of E5M2 included."""
    if KIND == FLOAT:
        return stored.to(tl.float32)
    byte = stored.to(tl.int32)
    if KIND == INT8:
        return ((byte << 24) >> 24).to(tl.float32)
    elif KIND == E8M0:
        # 0 is 2^-127, a subnormal float32
        bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
        return bits.to(tl.float32, bitcast=True)
    elif KIND == E5M2:
        return (byte << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        magnitude = byte & 0x7F
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        return signed(tl.where(magnitude == 0x7F, float("nan"), value), byte >> 7)


@triton.jit
def signed(value, negative):
    """A float32 that is not negative, with a sign bit; Triton's own minus would lose that of zero."""
    return (value.to(tl.int32, bitcast=True) | (negative << 31)).to(tl.float32, bitcast=True)
