"""Describes weights of BitNet, whose values are -1, 0 or 1, times a scale."""

from dataclasses import dataclass
from typing import ClassVar

from nf4conv.sources.tensors import Encoding, Parts, TensorInfo


@dataclass(frozen=True, slots=True)
class Ternary(Encoding):
    """Some rows of a weight of BitNet, or all.

    A byte holds a code for each quarter of the rows: the first row of bytes has the first row of
    each. Rows of one quarter are decoded from as many rows of bytes, all others from all of them.
    """

    name: ClassVar[str] = "BitNet ternary"

    codes: TensorInfo  # U8 [rows / 4, columns]: all of the weight
    scale: TensorInfo  # one value for all
    is_divided: bool  # True if values are divided by the scale, False if they are multiplied
    rows: int  # that are decoded
    first: int = 0  # rows of the weight before them

    @property
    def quarter(self) -> int:
        """The number of rows of a quarter of the weight."""
        return self.codes.shape[0]

    @property
    def first_line(self) -> int:
        """The number of rows of bytes before those of the part "values"."""
        return self.first % self.quarter if self._is_in_a_quarter else 0

    @property
    def _is_in_a_quarter(self) -> bool:
        return self.first // self.quarter == (self.first + self.rows - 1) // self.quarter

    @property
    def parts(self) -> Parts:
        values = self.codes
        if self._is_in_a_quarter:
            start = values.start + self.first_line * values.shape[1]
            stop = start + self.rows * values.shape[1]
            shape = (self.rows, values.shape[1])
            values = values._replace(shape=shape, start=start, stop=stop)
        return ("values", values), ("scale", self.scale)

    def decodes_like(self, other: "Encoding") -> bool:
        if not isinstance(other, Ternary) or self.is_divided != other.is_divided:
            return False
        return self.quarter == other.quarter and self.first == other.first
