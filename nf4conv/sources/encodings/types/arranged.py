"""Describes tensors that are cut out of others or put together from several."""

from dataclasses import dataclass
from typing import ClassVar

from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.sources.tensors import Encoding, FileRange, Parts, TensorInfo


@dataclass(frozen=True, slots=True)
class Columns(Encoding):
    """Some columns of a matrix that is stored as it is; only a part of another encoding."""

    name: ClassVar[str] = "columns"

    values: TensorInfo  # the whole matrix
    first: int
    last: int  # the column after the last one

    @property
    def parts(self) -> Parts:
        return (("values", self.values),)

    @property
    def file_ranges(self) -> list[FileRange]:
        """Returns where the columns are, row by row."""
        matrix = self.values
        rows, width = matrix.shape
        size = DTYPE_BITS[matrix.dtype] // 8
        ranges = []
        for row in range(rows):
            start = matrix.start + row * width * size
            ranges.append((matrix.file, start + self.first * size, start + self.last * size))
        return ranges

    @property
    def nbytes(self) -> int:
        rows = self.values.shape[0]
        return rows * (self.last - self.first) * DTYPE_BITS[self.values.dtype] // 8

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, Columns)


@dataclass(frozen=True, slots=True)
class Strided(Encoding):
    """A tensor that is cut out of a larger one, with steps between its elements."""

    name: ClassVar[str] = "strided"

    values: TensorInfo  # [n]: everything from the tensor's first element to its last
    strides: tuple[int, ...]  # elements of `values` from one index of each dimension to the next

    @property
    def parts(self) -> Parts:
        return (("values", self.values),)

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, Strided) and self.strides == other.strides


@dataclass(frozen=True, slots=True)
class Joined(Encoding):
    """The rows of several tensors, encoded or not, one after the other."""

    name: ClassVar[str] = "joined"

    tensors: tuple[TensorInfo, ...]

    @property
    def parts(self) -> Parts:
        first, *others = self.tensors
        numbered = ((str(number), tensor) for number, tensor in enumerate(others, start=1))
        return ("values", first), *numbered

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, Joined)


@dataclass(frozen=True, slots=True)
class Excerpt(Encoding):
    """A run of the elements of a larger tensor, which is decoded for it."""

    name: ClassVar[str] = "cut out of a larger tensor"

    base: TensorInfo
    first: int  # how many elements of the base are before the run

    @property
    def parts(self) -> Parts:
        return (("values", self.base),)

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, Excerpt) and self.first == other.first


@dataclass(frozen=True, slots=True)
class StackedExperts(Encoding):
    """Matrices of experts that are stored one by one, as the tensor that stacks them.

    The tensor is [experts, rows, columns], [experts · rows, columns], or [rows, columns] of a
    single expert; of biases it is [experts, elements].
    """

    name: ClassVar[str] = "stacked from single experts"

    # the projections of each expert, encoded or not: [out, in], or [out] of biases. The outputs of
    # several projections are fused
    experts: tuple[tuple[TensorInfo, ...], ...]
    is_transposed: bool = False  # True if the stack has [in, out] of each expert
    is_interleaved: bool = False  # True if the outputs of fused projections alternate

    @property
    def parts(self) -> Parts:
        matrices = [matrix for projections in self.experts for matrix in projections]
        numbered = [(str(number), matrix) for number, matrix in enumerate(matrices)]
        return ("values", matrices[0]), *numbered[1:]

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, StackedExperts) and self == other
