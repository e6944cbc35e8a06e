"""Decodes types whose codes choose points of a grid: [n, bytes] uint8 → [n, 256] float32.

A point gives 4 or 8 values at once. grids.json has, for each grid, the values that a coordinate can
have, and each point as 4 hexadecimal digits: the numbers of its coordinates, the first one lowest,
in 2 bits each of 8 or in 4 bits each of 4 (the tables of ggml-common.h in llama.cpp).
"""

import json
from functools import cache
from pathlib import Path

import torch

from nf4conv.codec.decode.ggml.bytes import (
    bits_of_words,
    fields,
    halves,
    parts,
    signs,
    words_16,
    words_32,
)

_DELTA = 0.125
"""What IQ1 types add to the coordinates of a point, or subtract."""


@cache
def grid_points(name: str, device: torch.device) -> torch.Tensor:
    """Returns the points of a grid: [points, 4 or 8] float32."""
    path = Path(__file__).with_name("grids.json")
    table = json.loads(path.read_text(encoding="utf-8"))[name]
    digits = "".join(table["points"])
    numbers = [int(digits[start : start + 4], 16) for start in range(0, len(digits), 4)]
    bits = 2 if len(table["levels"]) < 4 else 4
    words = torch.tensor(numbers).unsqueeze(1)
    coordinates = bits_of_words(words, bits, bits, 16 // bits)
    levels = torch.tensor(table["levels"], dtype=torch.float32)
    return levels[coordinates].to(device)


def _points(name: str, numbers: torch.Tensor) -> torch.Tensor:
    """Returns the coordinates of points: [n, k] int → [n, k * 4 or 8] float32."""
    return grid_points(name, numbers.device)[numbers.long()].flatten(1)


def _scaled(scale: torch.Tensor, values: torch.Tensor, flips: torch.Tensor) -> torch.Tensor:
    """Multiplies values with the scales of their groups, and with signs."""
    grouped = values.view(*scale.shape, -1)
    products = scale.unsqueeze(2) * grouped
    return products.flatten(1) * flips


def _signs_of_seven(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the signs of 8 values by 7 bits: the last sign makes the number of minuses even.

    Args:
        numbers: [n, k] int, 0 to 127.

    Returns:
        [n, k * 8] float32.
    """
    bits = bits_of_words(numbers, 1, 1, 7).view(*numbers.shape, 7)
    last = bits.sum(dim=2, keepdim=True) & 1
    return signs(torch.cat([bits, last], dim=2).flatten(1))


def decode_iq2_xxs(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 8 times: 4 points, and a word with 4 times 7 signs and a scale]."""
    scale, rest = parts(block, 2, 64)
    numbers, words = parts(rest.reshape(-1, 8), 4, 4)
    numbers = numbers.reshape(len(block), 32)
    words = words_32(words.reshape(len(block), 32))
    nested = (words >> 28).float()
    flips = _signs_of_seven(bits_of_words(words, 7, 7, 4))
    scales = halves(scale) * (0.5 + nested) * 0.25
    return _scaled(scales, _points("IQ2_XXS", numbers), flips)


def decode_iq2_xs(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 32 words with a point and 7 signs | 16 scales of 4 bits]."""
    scale, packed, nested = parts(block, 2, 64, 8)
    words = words_16(packed)
    scales = _quarter_scales(scale, nested)
    points = _points("IQ2_XS", words & 511)
    return _scaled(scales, points, _signs_of_seven(words >> 9))


def _quarter_scales(scale: torch.Tensor, nested: torch.Tensor) -> torch.Tensor:
    """Returns scale * (1/2 + nested scale) / 4, of nested scales of 4 bits."""
    codes = fields(nested, 4, 1).float()
    return halves(scale) * (0.5 + codes) * 0.25


def decode_iq2_s(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 32 bytes of points | 32 of signs | 8 of the points' high bits | scales]."""
    scale, low, flips, high, nested = parts(block, 2, 32, 32, 8, 8)
    high_bits = fields(high, 2, 1).int() << 8
    numbers = low.int() | high_bits
    scales = _quarter_scales(scale, nested)
    points = _points("IQ2_S", numbers)
    return _scaled(scales, points, signs(fields(flips, 1, 1)))


def decode_iq3_xxs(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 64 bytes of points | 8 words with 4 times 7 signs and a scale]."""
    scale, numbers, packed = parts(block, 2, 64, 32)
    words = words_32(packed)
    nested = (words >> 28).float()
    scales = halves(scale) * (0.5 + nested) * 0.5
    flips = _signs_of_seven(bits_of_words(words, 7, 7, 4))
    return _scaled(scales, _points("IQ3_XXS", numbers), flips)


def decode_iq3_s(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 64 bytes of points | 8 of their high bits | 32 of signs | 4 of scales]."""
    scale, low, high, flips, nested = parts(block, 2, 64, 8, 32, 4)
    high_bits = fields(high, 1, 1).int() << 8
    numbers = low.int() | high_bits
    codes = fields(nested, 4, 1).float()
    scales = halves(scale) * (1 + 2 * codes)
    points = _points("IQ3_S", numbers)
    return _scaled(scales, points, signs(fields(flips, 1, 1)))


def decode_iq1_s(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 32 bytes of points | 8 words with high bits, a scale and a sign]."""
    scale, low, packed = parts(block, 2, 32, 16)
    words = words_16(packed)
    high_bits = bits_of_words(words, 3, 3, 4) << 8
    numbers = low.int() | high_bits
    nested = 2 * (words >> 12 & 7) + 1
    scales = halves(scale) * nested.float()
    points = _points("IQ1_S", numbers).view(len(block), 8, 32)
    shifted = points + _delta(words >> 15)
    return (scales.unsqueeze(2) * shifted).flatten(1)


def decode_iq1_m(block: torch.Tensor) -> torch.Tensor:
    """Decodes [32 bytes of points | 16 of their high bits and signs | 4 words of scales]."""
    low, packed, nested = parts(block, 32, 16, 8)
    words = words_16(nested)
    codes = 2 * bits_of_words(words, 3, 3, 4) + 1
    scales = _scale_in_pieces(words) * codes.float()
    high = fields(packed, 4, 1).int()
    numbers = low.int() | (high & 7) << 8
    points = _points("IQ1_S", numbers).view(len(block), 32, 8)
    shifted = points + _delta(high >> 3)
    grouped = shifted.view(len(block), 16, 16)
    return (scales.unsqueeze(2) * grouped).flatten(1)


def _delta(bits: torch.Tensor) -> torch.Tensor:
    """Returns what is added to points, for the sign bit of each group: [n, groups, 1]."""
    return (_DELTA * signs(bits)).unsqueeze(2)


def _scale_in_pieces(words: torch.Tensor) -> torch.Tensor:
    """Returns the scale that is in the highest 4 bits of four words, the lowest piece first."""
    shifts = torch.tensor([12, 8, 4, 0], device=words.device)
    pieces = (words & 0xF000) >> shifts
    bits = pieces.sum(dim=1, keepdim=True)
    return bits.to(torch.int16).view(torch.float16).float()
