"""Decodes values of types with one scale for a block, as codec/decode/ggml/simple.py does."""

import triton
import triton.language as tl

from nf4conv.codec.kernels.decoding.ggml.bytes import byte, field, half, signed_byte

Q4_0 = tl.constexpr(2)
Q4_1 = tl.constexpr(3)
Q5_0 = tl.constexpr(6)
Q5_1 = tl.constexpr(7)
Q8_0 = tl.constexpr(8)
IQ4_NL = tl.constexpr(20)
TQ1_0 = tl.constexpr(34)
TQ2_0 = tl.constexpr(35)
MXFP4 = tl.constexpr(39)
NVFP4 = tl.constexpr(40)

# The values of IQ4_NL by code, 8 of them in the bytes of a word each, the first one lowest.
_LOW_CODES = tl.constexpr(-654466911485192063)  # -127 -104 -83 -65 -49 -35 -22 -10
_HIGH_CODES = tl.constexpr(8167635493787864321)  # 1 13 25 38 53 69 89 113


@triton.jit
def simple_value(block_ptr, place, inside, TYPE: tl.constexpr):
    """Returns values of one of the types above."""
    if TYPE == Q4_0:
        code = field(block_ptr, 2, place, 4, 16, inside)
        return half(block_ptr, 0, inside) * (code - 8).to(tl.float32)
    elif TYPE == Q4_1:
        code = field(block_ptr, 4, place, 4, 16, inside)
        product = half(block_ptr, 0, inside) * code.to(tl.float32)
        return product + half(block_ptr, 2, inside)
    elif TYPE == Q5_0:
        code = _five_bits(block_ptr, 2, place, inside)
        return half(block_ptr, 0, inside) * (code - 16).to(tl.float32)
    elif TYPE == Q5_1:
        code = _five_bits(block_ptr, 4, place, inside)
        product = half(block_ptr, 0, inside) * code.to(tl.float32)
        return product + half(block_ptr, 2, inside)
    elif TYPE == Q8_0:
        code = signed_byte(block_ptr, 2 + place, inside)
        return code.to(tl.float32) * half(block_ptr, 0, inside)
    elif TYPE == IQ4_NL:
        code = field(block_ptr, 2, place, 4, 16, inside)
        return half(block_ptr, 0, inside) * non_linear(code)
    elif TYPE == TQ1_0:
        return half(block_ptr, 52, inside) * _ternary(block_ptr, place, inside)
    elif TYPE == TQ2_0:
        code = field(block_ptr, 0, place, 2, 32, inside)
        return half(block_ptr, 64, inside) * (code - 1).to(tl.float32)
    elif TYPE == MXFP4:
        code = field(block_ptr, 1, place, 4, 16, inside)
        return _half_of_power(byte(block_ptr, 0, inside)) * _doubled_e2m1(code)
    else:
        code = field(block_ptr, 4, place, 4, 8, inside)
        scale = _half_of_e4m3(byte(block_ptr, place // 16, inside))
        return scale * _doubled_e2m1(code)


@triton.jit
def _five_bits(block_ptr, first, place, inside):
    """Returns codes whose 32 fifth bits begin at byte `first`, before the other four."""
    fifth = field(block_ptr, first, place, 1, 1, inside)
    return field(block_ptr, first + 4, place, 4, 16, inside) | (fifth << 4)


@triton.jit
def non_linear(code):
    """Returns the values of IQ4_NL and IQ4_XS in float32."""
    word = tl.where(code < 8, _LOW_CODES, _HIGH_CODES)
    found = (word >> (code % 8 * 8).to(tl.int64)).to(tl.int32)
    return ((found << 24) >> 24).to(tl.float32)


@triton.jit
def _ternary(block_ptr, place, inside):
    """Returns -1, 0 and 1 in float32: digits of runs of 32, 16 and 4 bytes.

    A byte times 3^k has digit k in the highest part of its low 8 bits.
    """
    second = place - 160
    third = place - 240
    number = tl.where(place < 240, 32 + second % 16, 48 + third % 4)
    number = tl.where(place < 160, place % 32, number)
    digit = tl.where(place < 240, second // 16, third // 4)
    digit = tl.where(place < 160, place // 32, digit)
    power = tl.where(digit == 0, 1, tl.where(digit == 1, 3, 9))
    power = tl.where(digit < 3, power, tl.where(digit == 3, 27, 81))
    shifted = byte(block_ptr, number, inside) * power & 255
    return ((shifted * 3 >> 8) - 1).to(tl.float32)


@triton.jit
def _doubled_e2m1(code):
    """Returns twice the values of E2M1 in float32; the second 0 has no sign."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    normal = (2 + mantissa) << tl.maximum(exponent - 1, 0)
    magnitude = tl.where(exponent == 0, mantissa, normal)
    return tl.where(code < 8, magnitude, -magnitude).to(tl.float32)


@triton.jit
def _half_of_power(exponent):
    """Returns half of 2^(exponent - 127)."""
    subnormal = 0x00200000 << tl.minimum(exponent, 1)
    bits = tl.where(exponent < 2, subnormal, (exponent - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _half_of_e4m3(scale):
    """Returns half of scales in unsigned E4M3; the code of NaN stands for 0."""
    exponent = (scale >> 3) & 15
    mantissa = scale & 7
    bits = ((119 + exponent) << 23) | (mantissa << 20)
    normal = bits.to(tl.float32, bitcast=True)
    subnormal = mantissa.to(tl.float32) * 0.0009765625  # 2^-10
    value = tl.where(exponent == 0, subnormal, normal)
    return tl.where(scale == 0x7F, 0.0, value)
