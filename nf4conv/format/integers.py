"""Integers of few bits in words of 32 bits: how the codes of a weight lie."""

from dataclasses import dataclass
from typing import Final

WORD: Final = 32
"""Bits of a word; as many rows share whole words, whatever the bits of a code."""


def words_of(codes: int, bits: int) -> int:
    """Returns how many words codes take."""
    return -(-codes * bits // WORD)


@dataclass(frozen=True, slots=True)
class IntegerLayout:
    """Tells how the codes of a weight lie; codec/decode/integers.py says more of each packing."""

    packing: str  # "compressed-tensors", "GPTQ", "AWQ" or "torchao"
    bits: int  # of a code: 1 to 8
    columns: int  # of the weight as [rows, columns], that is, [out, in]
    group_size: int  # columns that share a scale, unless a group index says which
    zeros_less_one: bool = False  # True if zero points are stored one too small: GPTQ's version 1
