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
    signs,
    words_16,
    words_32,
)

_DELTA = 0.125
"""What IQ1 types add to the coordinates of a point, or subtract."""


@cache
def _grid(name: str, device: torch.device) -> torch.Tensor:
    """Returns the points of a grid: [points, 4 or 8] float32."""
    path = Path(__file__).with_name("grids.json")
    table = json.loads(path.read_text(encoding="utf-8"))[name]
    digits = "".join(table["points"])
    numbers = [int(digits[start : start + 4], 16) for start in range(0, len(digits), 4)]
    bits = 2 if len(table["levels"]) < 4 else 4
    shifts = torch.arange(0, 16, bits)
    coordinates = (torch.tensor(numbers).unsqueeze(1) >> shifts) & (2**bits - 1)
    levels = torch.tensor(table["levels"], dtype=torch.float32)
    return levels[coordinates].to(device)


def _points(name: str, numbers: torch.Tensor) -> torch.Tensor:
    """Returns the coordinates of points: [n, k] int → [n, k * 4 or 8] float32."""
    return _grid(name, numbers.device)[numbers.long()].flatten(1)


def _scaled(scale: torch.Tensor, values: torch.Tensor, flips: torch.Tensor) -> torch.Tensor:
    """Multiplies values with the scales of their groups, and with signs."""
    grouped = (scale.unsqueeze(2) * values.view(*scale.shape, -1)).flatten(1)
    return grouped * flips


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
    pairs = block[:, 2:].reshape(len(block), 8, 8)
    numbers = pairs[..., :4].flatten(1)
    words = words_32(pairs[..., 4:].flatten(1))
    scale = halves(block[:, :2]) * (0.5 + (words >> 28).float()) * 0.25
    flips = _signs_of_seven(bits_of_words(words, 7, 7, 4))
    return _scaled(scale, _points("IQ2_XXS", numbers), flips)


def decode_iq2_xs(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 32 words with a point and 7 signs | 16 scales of 4 bits]."""
    words = words_16(block[:, 2:66])
    scale = halves(block[:, :2]) * (0.5 + fields(block[:, 66:], 4, 1).float()) * 0.25
    return _scaled(scale, _points("IQ2_XS", words & 511), _signs_of_seven(words >> 9))


def decode_iq2_s(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 32 bytes of points | 32 of signs | 8 of the points' high bits | scales]."""
    high = fields(block[:, 66:74], 2, 1).int()
    numbers = block[:, 2:34].int() | high << 8
    scale = halves(block[:, :2]) * (0.5 + fields(block[:, 74:], 4, 1).float()) * 0.25
    return _scaled(scale, _points("IQ2_S", numbers), signs(fields(block[:, 34:66], 1, 1)))


def decode_iq3_xxs(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 64 bytes of points | 8 words with 4 times 7 signs and a scale]."""
    words = words_32(block[:, 66:])
    scale = halves(block[:, :2]) * (0.5 + (words >> 28).float()) * 0.5
    flips = _signs_of_seven(bits_of_words(words, 7, 7, 4))
    return _scaled(scale, _points("IQ3_XXS", block[:, 2:66]), flips)


def decode_iq3_s(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 64 bytes of points | 8 of their high bits | 32 of signs | 8 scales]."""
    numbers = block[:, 2:66].int() | fields(block[:, 66:74], 1, 1).int() << 8
    scale = halves(block[:, :2]) * (1 + 2 * fields(block[:, 106:], 4, 1).float())
    return _scaled(scale, _points("IQ3_S", numbers), signs(fields(block[:, 74:106], 1, 1)))


def decode_iq1_s(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 32 bytes of points | 8 words with high bits, a scale and a sign]."""
    words = words_16(block[:, 34:])
    numbers = block[:, 2:34].int() | bits_of_words(words, 3, 3, 4) << 8
    scale = halves(block[:, :2]) * (2 * (words >> 12 & 7) + 1).float()
    delta = _DELTA * signs(words >> 15)
    points = _points("IQ1_S", numbers).view(len(block), 8, 32)
    return (scale.unsqueeze(2) * (points + delta.unsqueeze(2))).flatten(1)


def decode_iq1_m(block: torch.Tensor) -> torch.Tensor:
    """Decodes [32 bytes of points | 16 of their high bits and signs | 4 words of scales].

    The highest 4 bits of the four words are the scale of the block, in half precision.
    """
    words = words_16(block[:, 48:])
    shifts = torch.tensor([12, 8, 4, 0], device=block.device)
    bits = ((words & 0xF000) >> shifts).sum(dim=1, keepdim=True)
    scale_of_block = bits.to(torch.int16).view(torch.float16).float()
    scale = scale_of_block * (2 * bits_of_words(words, 3, 3, 4) + 1).float()
    high = fields(block[:, 32:48], 4, 1).int()
    numbers = block[:, :32].int() | (high & 7) << 8
    delta = _DELTA * signs(high >> 3)
    points = _points("IQ1_S", numbers).view(len(block), 32, 8) + delta.unsqueeze(2)
    return (scale.unsqueeze(2) * points.view(len(block), 16, 16)).flatten(1)
