"""Decodes values of types whose blocks of 256 have quantized scales, as codec/decode/ggml/nested.py
does.
"""

from typing import Final

import triton
import triton.language as tl

from nf4conv.codec.kernels.decoding.ggml.bytes import byte, field, half, signed_byte, word_16
from nf4conv.codec.kernels.decoding.ggml.simple import non_linear

Q2_K = tl.constexpr(10)
Q3_K = tl.constexpr(11)
Q4_K = tl.constexpr(12)
Q5_K = tl.constexpr(13)
Q6_K = tl.constexpr(14)
IQ4_XS = tl.constexpr(23)

NESTED: Final = (10, 11, 12, 13, 14, 23)
"""The numbers of these types."""


@triton.jit
def nested_value(block_ptr, place, inside, TYPE: tl.constexpr):
    """Returns values of one of the types above."""
    if TYPE == Q2_K:
        nested = byte(block_ptr, place // 16, inside)
        code = field(block_ptr, 16, place, 2, 32, inside)
        value = _scaled(half(block_ptr, 80, inside), nested & 15, code)
        return value - half(block_ptr, 82, inside) * (nested >> 4).to(tl.float32)
    elif TYPE == Q3_K:
        scale = _scale_of_q3_k(block_ptr, place // 16, inside)
        missing = 1 - field(block_ptr, 0, place, 1, 32, inside)
        code = field(block_ptr, 32, place, 2, 32, inside) - 4 * missing
        return _scaled(half(block_ptr, 108, inside), scale, code)
    elif TYPE == Q4_K:
        code = field(block_ptr, 16, place, 4, 32, inside)
        return _scaled_less_minimum(block_ptr, place // 32, code, inside)
    elif TYPE == Q5_K:
        fifth = field(block_ptr, 16, place, 1, 32, inside)
        code = field(block_ptr, 48, place, 4, 32, inside) | (fifth << 4)
        return _scaled_less_minimum(block_ptr, place // 32, code, inside)
    elif TYPE == Q6_K:
        high = field(block_ptr, 128, place, 2, 32, inside)
        code = field(block_ptr, 0, place, 4, 64, inside) | (high << 4)
        scale = signed_byte(block_ptr, 192 + place // 16, inside)
        return _scaled(half(block_ptr, 208, inside), scale, code - 32)
    else:
        group = place // 32
        high = word_16(block_ptr, 2, inside) >> (2 * group) & 3
        low = field(block_ptr, 4, group, 4, 1, inside)
        code = field(block_ptr, 8, place, 4, 16, inside)
        factor = half(block_ptr, 0, inside) * ((low | (high << 4)) - 32).to(tl.float32)
        return factor * non_linear(code)


@triton.jit
def _scaled(scale, nested, code):
    """Returns scale * nested scale * code; `nested` and `code` are int32."""
    return (scale * nested.to(tl.float32)) * code.to(tl.float32)


@triton.jit
def _scale_of_q3_k(block_ptr, group, inside):
    """Returns the scales of groups, whose low 4 bits and high 2 bits stand apart."""
    low = field(block_ptr, 96, group, 4, 8, inside)
    high = field(block_ptr, 104, group, 2, 4, inside)
    return (low | (high << 4)) - 32


@triton.jit
def _scaled_less_minimum(block_ptr, group, code, inside):
    """Returns values of Q4_K and Q5_K.

    The scales and minimums of the first four groups are whole in bytes 4 to 11. The other four have
    their low bits in bytes 12 to 15 and their high bits above the first four.
    """
    in_four = group % 4
    is_whole = group < 4
    first = byte(block_ptr, 4 + in_four, inside)
    second = byte(block_ptr, 8 + in_four, inside)
    mixed = byte(block_ptr, 12 + in_four, inside)
    nested_scale = tl.where(is_whole, first & 63, (mixed & 15) | (first >> 2 & 48))
    nested_minimum = tl.where(is_whole, second & 63, (mixed >> 4) | (second >> 2 & 48))
    minimum = half(block_ptr, 2, inside) * nested_minimum.to(tl.float32)
    return _scaled(half(block_ptr, 0, inside), nested_scale, code) - minimum
