"""Describes weights of integers that are packed into words, with scales and zero points."""

from dataclasses import dataclass
from typing import Final

from nf4conv.sources.tensors import Encoding, Parts, TensorInfo

WORD: Final = 32  # bits


def words_of(codes: int, bits: int, *, is_padded: bool = False) -> int:
    """Returns how many words codes take: all bits of each, or of padded ones as many as fit."""
    return -(-codes // (WORD // bits)) if is_padded else -(-codes * bits // WORD)


@dataclass(frozen=True, slots=True)
class PackedIntegers(Encoding):
    """Integers of few bits, packed into words, times scales that groups of columns share.

    value = (code - zero) * scale. codec/decode/integers.py says how the codes lie in the words.
    """

    values: TensorInfo  # I32: [rows, words], [words, rows] of GPTQ, [columns, words] of AWQ
    scale: TensorInfo  # [rows, groups]; [groups, rows] of GPTQ and AWQ
    zeros: TensorInfo | None  # the zero points of the groups; None if all are 2^(bits - 1)
    group_index: TensorInfo | None  # [columns]: the group of each column; None if in order
    packing: str  # "compressed-tensors", "GPTQ" or "AWQ"
    bits: int
    columns: int  # of the weight as [rows, columns], that is, [out, in]
    group_size: int  # columns that share a scale, if they are in order
    zeros_less_one: bool = False  # True if the zero points are stored one too small: GPTQ's v1
    # True if no code crosses the border of two words: compressed-tensors before release 0.18
    is_padded: bool = False
    # True if the weight is [out, in] here and [in, out] in its family
    is_transposed: bool = False

    @property
    def name(self) -> str:
        groups = "by row" if self.group_size >= self.columns else f"groups of {self.group_size}"
        return f"{self.packing} {self.bits}-bit, {groups}"

    @property
    def has_kernel(self) -> bool:
        """Returns True if a kernel decodes the weight; torch's operations decode any."""
        return not self.is_padded and (self.packing != "AWQ" or self.bits == 4)

    @property
    def rows_together(self) -> int:
        """Returns how many rows share whole words, if codes are packed along rows."""
        return WORD // self.bits if self.is_padded else WORD

    @property
    def parts(self) -> Parts:
        parts = [("values", self.values), ("scale", self.scale)]
        if self.zeros is not None:
            parts.append(("zeros", self.zeros))
        if self.group_index is not None:
            parts.append(("group_index", self.group_index))
        return tuple(parts)

    def decodes_like(self, other: "Encoding") -> bool:
        return (
            isinstance(other, PackedIntegers)
            and self.packing == other.packing
            and self.bits == other.bits
            and self.columns == other.columns
            and self.group_size == other.group_size
            and self.zeros_less_one == other.zeros_less_one
            and self.is_padded == other.is_padded
            and self.is_transposed == other.is_transposed
        )


@dataclass(frozen=True, slots=True)
class HalfQuadratic(Encoding):
    """A weight of HQQ: integers whose words hold codes of several parts of the weight.

    It is read as a whole, since its first rows and its last ones share words.
    """

    values: TensorInfo  # [words] U8, or I32 of 3 bits
    scale: TensorInfo  # one for each group
    zero: TensorInfo  # the zero point of each group
    bits: int  # of a code: 1, 2, 3, 4 or 8
    axis: int  # 1 if groups are runs of elements, 0 if their elements are at equal distances
    group_size: int

    @property
    def name(self) -> str:
        return f"HQQ {self.bits}-bit, groups of {self.group_size}"

    @property
    def parts(self) -> Parts:
        return ("values", self.values), ("scale", self.scale), ("zero", self.zero)

    def decodes_like(self, other: "Encoding") -> bool:
        return (
            isinstance(other, HalfQuadratic)
            and self.bits == other.bits
            and self.axis == other.axis
            and self.group_size == other.group_size
        )
