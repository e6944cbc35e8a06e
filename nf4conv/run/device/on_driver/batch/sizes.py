"""Computes how many bytes things take on the GPU, and where they begin."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Final

from nf4conv.format.dtypes import DTYPE_BITS

DECODED: Final = 2
"""Pieces of an encoded weight that are decoded at a time, as far as a piece holds them."""


def bytes_of(tag: str, elements: int) -> int:
    """Returns the bytes of so many elements of the dtype that a tag names."""
    return DTYPE_BITS[tag] * elements // 8


def starts(sizes: Iterable[int]) -> list[int]:
    """Returns where each of some neighbours begins, and where the last one ends."""
    return list(accumulate(sizes, initial=0))
