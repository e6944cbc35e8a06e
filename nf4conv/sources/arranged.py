"""Describes tensors that are cut out of others, put together, or changed by adapters."""

from dataclasses import dataclass, replace
from typing import ClassVar

from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.sources.tensors import Encoding, FileRange, TensorInfo


@dataclass(frozen=True, slots=True)
class Columns(Encoding):
    """Some columns of a matrix that is stored as it is; only a part of another encoding."""

    name: ClassVar[str] = "columns"

    values: TensorInfo  # the whole matrix
    first: int
    last: int  # the column after the last one

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


def cut_columns(part: TensorInfo, first: int, last: int) -> TensorInfo:
    """Cuts columns out of a matrix that is stored as it is, or of some of its columns."""
    if (first, last) == (0, part.shape[1]):
        return part
    if isinstance(part.encoding, Columns):
        before = part.encoding.first
        cut = Columns(part.encoding.values, before + first, before + last)
    else:
        cut = Columns(part, first, last)
    return part._replace(shape=(part.shape[0], last - first), encoding=cut)


@dataclass(frozen=True, slots=True)
class Strided(Encoding):
    """A tensor that is cut out of a larger one, with steps between its elements."""

    name: ClassVar[str] = "strided"

    values: TensorInfo  # [n]: everything from the tensor's first element to its last
    strides: tuple[int, ...]  # elements of `values` from one index of each dimension to the next


@dataclass(frozen=True, slots=True)
class Excerpt(Encoding):
    """A run of the elements of a larger tensor, which is decoded for it."""

    name: ClassVar[str] = "cut out of a larger tensor"

    base: TensorInfo
    first: int  # how many elements of the base are before the run


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

    def rows_together(self, tensor: TensorInfo) -> int:
        return max(tensor.shape[0] // len(self.experts), 1)

    def rows(self, tensor: TensorInfo, start: int, stop: int) -> Encoding:
        height = self.rows_together(tensor)
        return replace(self, experts=self.experts[start // height : -(-stop // height)])

    def is_stack(self, tensor: TensorInfo) -> bool:
        return tensor.shape[0] == len(self.experts)  # else a convolution

    def matrix(self, tensor: TensorInfo, index: int) -> Encoding:
        return replace(self, experts=self.experts[index : index + 1])


@dataclass(frozen=True, slots=True)
class LowRankDelta:
    """The addition of scale · up · down to a matrix, or to each matrix of a stack (LoRA).

    With a magnitude, every row is then scaled to a given norm (DoRA).
    """

    up: TensorInfo  # [out, rank], of several experts [out, rank · experts]: lora_B
    down: TensorInfo  # [rank, in], of several experts [experts · rank, in]: lora_A
    scale: float
    is_transposed: bool = False  # True if the tensor is [in, out]
    magnitude: TensorInfo | None = None  # [out]: the norms that DoRA gives the rows
    rows: tuple[int, int] | None = None  # rows of the product that are added; None for all
    row_step: int = 1  # distance between them
    experts: int = 0  # how many experts the factors stack; 0 if they are those of a single matrix
    expert: int | None = None  # which expert the tensor is; None if it is a stack of all of them

    @property
    def needs_all_rows(self) -> bool:
        """Returns True if a row of the result depends on other rows of the tensor."""
        return self.magnitude is not None and self.is_transposed


@dataclass(frozen=True, slots=True)
class Merged(Encoding):
    """Another tensor, encoded or not, which adapters change."""

    name: ClassVar[str] = "merged with an adapter"

    base: TensorInfo  # the tensor that is changed, or a piece of it
    deltas: tuple[LowRankDelta, ...]  # the changes, in the order in which they are made
    first_row: int = 0  # how many rows of the whole tensor are before those of `base`

    @property
    def made_from(self) -> str:
        return f"{self.base.made_from}, merged with adapters"

    @property
    def unmerged(self) -> TensorInfo:
        return self.base

    def rows_together(self, tensor: TensorInfo) -> int | None:
        if any(delta.needs_all_rows for delta in self.deltas):
            return None
        return self.base.rows_together

    def rows(self, tensor: TensorInfo, start: int, stop: int) -> Encoding:
        base = self.base.rows(start, stop)
        return replace(self, base=base, first_row=self.first_row + start)

    def is_stack(self, tensor: TensorInfo) -> bool:
        return self.base.is_stack

    def matrix(self, tensor: TensorInfo, index: int) -> Encoding:
        deltas = tuple(replace(delta, expert=index) for delta in self.deltas)
        return replace(self, base=self.base.matrix(index), deltas=deltas)
