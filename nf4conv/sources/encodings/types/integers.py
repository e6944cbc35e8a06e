"""Describes weights of integers that are packed into words, with scales and zero points."""

from dataclasses import dataclass
from typing import Final

from nf4conv.format.dtypes import DTYPE_BITS
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
    scale: TensorInfo  # [rows, groups] of compressed-tensors, [groups, rows] of the others
    # the zero points of the groups; None if all are 2^(bits - 1). Floats of torchao are added to
    # the products instead
    zeros: TensorInfo | None
    group_index: TensorInfo | None  # [columns]: the group of each column; None if in order
    packing: str  # "compressed-tensors", "GPTQ", "AWQ" or "torchao"
    bits: int
    columns: int  # of the weight as [rows, columns], that is, [out, in]
    group_size: int  # columns that share a scale, if they are in order
    zeros_less_one: bool = False  # True if the zero points are stored one too small: GPTQ's v1
    # True if no code crosses the border of two words: compressed-tensors before release 0.18
    is_padded: bool = False
    # True if codes, and packed zero points, are in two's complement
    is_signed: bool = False
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
            and self.is_signed == other.is_signed
            and self.is_transposed == other.is_transposed
        )


@dataclass(frozen=True, slots=True)
class HalfQuadratic(Encoding):
    """A weight of HQQ, or a run of its elements.

    A word holds a code of each of several parts of the weight. A run within a part is decoded from
    a run of words. One that goes on in the next part takes the first words, too.
    """

    words: TensorInfo  # [words] U8, or I32 of 3 bits: all of the weight
    scales: TensorInfo  # one for each group of the weight
    zeros: TensorInfo  # the zero point of each group
    bits: int  # of a code: 1, 2, 3, 4 or 8
    axis: int  # 1 if groups are runs of elements, 0 if their elements are at equal distances
    group_size: int
    elements: int  # of the run
    first: int = 0  # elements of the weight before it

    @property
    def name(self) -> str:
        return f"HQQ {self.bits}-bit, groups of {self.group_size}"

    @property
    def first_word(self) -> int:
        """Returns where the words of "values" begin among those of the weight."""
        return 0 if self._takes_all_words else self.first % self.words.elements

    @property
    def _takes_all_words(self) -> bool:
        return self.elements > self.words.elements

    @property
    def first_group(self) -> int:
        """Returns how many groups come before those of "scale" and "zero"."""
        return self.first // self.group_size if self.axis == 1 else 0

    @property
    def parts(self) -> Parts:
        words = self.words.elements
        start = self.first % words
        stop = start + self.elements
        if self._takes_all_words:
            found = [("values", self.words)]
        else:
            found = [("values", _run(self.words, start, min(stop, words)))]
            if stop > words:
                found.append(("after", _run(self.words, 0, stop - words)))
        groups = self.scales.elements
        if self.axis == 1:
            groups = -(-(self.first + self.elements) // self.group_size)
        found.append(("scale", _run(self.scales, self.first_group, groups)))
        found.append(("zero", _run(self.zeros, self.first_group, groups)))
        return tuple(found)

    def decodes_like(self, other: "Encoding") -> bool:
        if not isinstance(other, HalfQuadratic):
            return False
        same_codes = self.bits == other.bits and self.words.elements == other.words.elements
        same_groups = self.axis == other.axis and self.group_size == other.group_size
        return same_codes and same_groups and self.first == other.first


def _run(part: TensorInfo, first: int, last: int) -> TensorInfo:
    """Returns a run of the elements of a tensor that is stored as it is."""
    size = DTYPE_BITS[part.dtype] // 8
    start = part.start + first * size
    return part._replace(shape=(last - first,), start=start, stop=part.start + last * size)
