"""Decodes values of types whose codes are points of a grid, as codec/decode/ggml/grids.py does.

A grid is a table of int8: a row of 4 or 8 coordinates for each point.
"""

from typing import Final

import triton
import triton.language as tl

from nf4conv.codec.kernels.decoding.ggml.bytes import (
    byte,
    field,
    half,
    sign,
    to_half,
    word_16,
    word_32,
)

IQ2_XXS = tl.constexpr(16)
IQ2_XS = tl.constexpr(17)
IQ3_XXS = tl.constexpr(18)
IQ1_S = tl.constexpr(19)
IQ3_S = tl.constexpr(21)
IQ2_S = tl.constexpr(22)
IQ1_M = tl.constexpr(29)

GRIDS: Final = {
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_S",
}
"""The grid of each of these types, as grids.json names it, by the type's number."""


@triton.jit
def grid_value(block_ptr, grid_ptr, place, inside, TYPE: tl.constexpr):
    """Returns values of one of the types above."""
    if TYPE == IQ2_XXS:
        return _iq2_xxs(block_ptr, grid_ptr, place, inside)
    elif TYPE == IQ2_XS:
        return _iq2_xs(block_ptr, grid_ptr, place, inside)
    elif TYPE == IQ2_S:
        return _iq2_s(block_ptr, grid_ptr, place, inside)
    elif TYPE == IQ3_XXS:
        return _iq3_xxs(block_ptr, grid_ptr, place, inside)
    elif TYPE == IQ3_S:
        return _iq3_s(block_ptr, grid_ptr, place, inside)
    elif TYPE == IQ1_S:
        return _iq1_s(block_ptr, grid_ptr, place, inside)
    else:
        return _iq1_m(block_ptr, grid_ptr, place, inside)


@triton.jit
def _iq2_xxs(block_ptr, grid_ptr, place, inside):
    first = 2 + place // 32 * 8
    in_group = place // 8 % 4
    number = byte(block_ptr, first + in_group, inside)
    word = word_32(block_ptr, first + 4, inside)
    scale = _scale(block_ptr, word >> 28 & 15, 0.25, inside)
    flip = _sign_of_seven(word >> (7 * in_group), place)
    return scale * _point(grid_ptr, number, place, 8) * flip


@triton.jit
def _iq2_xs(block_ptr, grid_ptr, place, inside):
    word = word_16(block_ptr, 2 + place // 8 * 2, inside)
    nested = field(block_ptr, 66, place // 16, 4, 1, inside)
    scale = _scale(block_ptr, nested, 0.25, inside)
    flip = _sign_of_seven(word >> 9, place)
    return scale * _point(grid_ptr, word & 511, place, 8) * flip


@triton.jit
def _iq2_s(block_ptr, grid_ptr, place, inside):
    high = field(block_ptr, 66, place // 8, 2, 1, inside)
    number = byte(block_ptr, 2 + place // 8, inside) | (high << 8)
    nested = field(block_ptr, 74, place // 16, 4, 1, inside)
    scale = _scale(block_ptr, nested, 0.25, inside)
    flip = sign(field(block_ptr, 34, place, 1, 1, inside))
    return scale * _point(grid_ptr, number, place, 8) * flip


@triton.jit
def _iq3_xxs(block_ptr, grid_ptr, place, inside):
    number = byte(block_ptr, 2 + place // 4, inside)
    word = word_32(block_ptr, 66 + place // 32 * 4, inside)
    scale = _scale(block_ptr, word >> 28 & 15, 0.5, inside)
    flip = _sign_of_seven(word >> (7 * (place // 8 % 4)), place)
    return scale * _point(grid_ptr, number, place, 4) * flip


@triton.jit
def _iq3_s(block_ptr, grid_ptr, place, inside):
    high = field(block_ptr, 66, place // 4, 1, 1, inside)
    number = byte(block_ptr, 2 + place // 4, inside) | (high << 8)
    nested = field(block_ptr, 106, place // 32, 4, 1, inside)
    scale = half(block_ptr, 0, inside) * (1 + 2 * nested).to(tl.float32)
    flip = sign(field(block_ptr, 74, place, 1, 1, inside))
    return scale * _point(grid_ptr, number, place, 4) * flip


@triton.jit
def _iq1_s(block_ptr, grid_ptr, place, inside):
    word = word_16(block_ptr, 34 + place // 32 * 2, inside)
    high = word >> (3 * (place // 8 % 4)) & 7
    number = byte(block_ptr, 2 + place // 8, inside) | (high << 8)
    nested = 2 * (word >> 12 & 7) + 1
    scale = half(block_ptr, 0, inside) * nested.to(tl.float32)
    return scale * (_point(grid_ptr, number, place, 8) + 0.125 * sign(word >> 15))


@triton.jit
def _iq1_m(block_ptr, grid_ptr, place, inside):
    high = field(block_ptr, 32, place // 8, 4, 1, inside)
    number = byte(block_ptr, place // 8, inside) | ((high & 7) << 8)
    word = word_16(block_ptr, 48 + place // 64 * 2, inside)
    nested = 2 * (word >> (3 * (place // 16 % 4)) & 7) + 1
    scale = _scale_in_pieces(block_ptr, inside) * nested.to(tl.float32)
    return scale * (_point(grid_ptr, number, place, 8) + 0.125 * sign(high >> 3))


@triton.jit
def _point(grid_ptr, number, place, COORDINATES: tl.constexpr):
    """Returns the coordinates of points that stand for these places, in float32."""
    return tl.load(grid_ptr + number * COORDINATES + place % COORDINATES).to(tl.float32)


@triton.jit
def _scale(block_ptr, nested, factor, inside):
    """Returns scale * (1/2 + nested scale) * factor."""
    return half(block_ptr, 0, inside) * (0.5 + nested.to(tl.float32)) * factor


@triton.jit
def _sign_of_seven(bits, place):
    """Returns the signs of places in groups of 8, by the lowest 7 bits of numbers.

    The last sign of a group makes the number of minuses even.
    """
    seven = bits & 127
    parity = seven ^ (seven >> 4)
    parity = parity ^ (parity >> 2)
    parity = parity ^ (parity >> 1)
    with_last = seven | ((parity & 1) << 7)
    return sign(with_last >> (place % 8) & 1)


@triton.jit
def _scale_in_pieces(block_ptr, inside):
    """Returns the scale whose bits are the highest 4 of four words, the lowest piece first."""
    bits = byte(block_ptr, 49, inside) >> 4
    bits = bits | (byte(block_ptr, 51, inside) >> 4 << 4)
    bits = bits | (byte(block_ptr, 53, inside) >> 4 << 8)
    return to_half(bits | (byte(block_ptr, 55, inside) >> 4 << 12))
