"""Describes tensors that adapters change, and the changes."""

from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from nf4conv.sources.tensors import Encoding, TensorInfo


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
    # True if the columns of `up` are sorted by expert and then by rank; False if by rank first
    is_expert_major: bool = False

    @property
    def needs_all_rows(self) -> bool:
        """Returns True if a row of the result depends on other rows of the tensor."""
        return self.magnitude is not None and self.is_transposed


@dataclass(frozen=True, slots=True)
class VectorDelta:
    """The addition of scale · vector to a bias."""

    vector: TensorInfo  # of the shape of the bias
    scale: float


@dataclass(frozen=True, slots=True)
class RowsDelta:
    """New rows in the place of others: tokens that an adapter trained."""

    rows: TensorInfo  # [rows, columns]
    indices: tuple[int, ...]  # the row of the tensor that each of them replaces


Delta: TypeAlias = LowRankDelta | VectorDelta | RowsDelta
"""What an adapter does to a tensor."""


@dataclass(frozen=True, slots=True)
class Merged(Encoding):
    """Another tensor, encoded or not, which adapters change."""

    name: ClassVar[str] = "merged with an adapter"

    base: TensorInfo  # the tensor that is changed, or a piece of it
    deltas: tuple[Delta, ...]  # the changes, in the order in which they are made
    first_row: int = 0  # how many rows of the whole tensor are before those of `base`

    @property
    def made_from(self) -> str:
        return f"{self.base.made_from}, merged with adapters"

    @property
    def unmerged(self) -> TensorInfo:
        return self.base

    def rows_together(self, tensor: TensorInfo) -> int | None:
        for delta in self.deltas:
            if isinstance(delta, LowRankDelta) and delta.needs_all_rows:
                return None
        return self.base.rows_together

    def rows(self, tensor: TensorInfo, start: int, stop: int) -> Encoding:
        base = self.base.rows(start, stop)
        return replace(self, base=base, first_row=self.first_row + start)

    def is_stack(self, tensor: TensorInfo) -> bool:
        return self.base.is_stack

    def matrix(self, tensor: TensorInfo, index: int) -> Encoding:
        deltas = []
        for delta in self.deltas:
            if isinstance(delta, LowRankDelta):
                delta = replace(delta, expert=index)
            deltas.append(delta)
        return replace(self, base=self.base.matrix(index), deltas=tuple(deltas))
