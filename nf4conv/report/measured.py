"""Gathers what verification and comparison measure of a tensor.

Several workers look at the pieces of one tensor, in any order. What each piece adds is kept by the
place where the piece starts, and summed up in that order, so that results do not depend on who was
first.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from nf4conv.report.rows.figures import relative_error
from nf4conv.sources.stored_weights import StoredWeight
from nf4conv.sources.tensors import TensorInfo

PieceT = TypeVar("PieceT")


class PieceErrors(NamedTuple):
    """The errors of one piece of a packed weight, or of the whole weight.

    Sums are in float64, see codec/error_sums.py.

    Attributes:
        squared_error: the sum of the squared errors.
        squared_weight: the sum of the squared elements of the source.
        max_error: the largest |error|.
        max_relative_error: the largest |error| / absmax of its block.
        outside: the number of elements whose error exceeds the format's worst case.
        differing: the number of bytes of codes that differ from those that quantizing the source
            gives.
        not_nearest: the number of codes for which another code is nearer to the element.
    """

    squared_error: float
    squared_weight: float
    max_error: float
    max_relative_error: float
    outside: int
    differing: int
    not_nearest: int

    @classmethod
    def sum_up(cls, pieces: Sequence["PieceErrors"]) -> "PieceErrors":
        """Returns the errors of the whole weight, which has at least one piece."""
        squared_errors = []
        squared_weights = []
        max_error = pieces[0].max_error
        max_relative_error = pieces[0].max_relative_error
        outside = 0
        differing = 0
        not_nearest = 0
        for piece in pieces:
            squared_errors.append(piece.squared_error)
            squared_weights.append(piece.squared_weight)
            max_error = max(max_error, piece.max_error)
            max_relative_error = max(max_relative_error, piece.max_relative_error)
            outside += piece.outside
            differing += piece.differing
            not_nearest += piece.not_nearest
        return cls(
            squared_error=_add_floats(squared_errors),
            squared_weight=_add_floats(squared_weights),
            max_error=max_error,
            max_relative_error=max_relative_error,
            outside=outside,
            differing=differing,
            not_nearest=not_nearest,
        )


class ScaleErrors(NamedTuple):
    """The differences between the scales of a weight and those that its source gives.

    Attributes:
        wrong: the number of absmax, or of their codes, that do not follow from the source.
        first: the index of the first of them.
        wrong_nested: the number of nested_absmax, and of nested offsets, that do not follow.
        differing: the number of bytes of scales that quantizing the source would make otherwise;
            the nested offset counts as one.
        described: the number of bytes of code maps and quant state that it would make otherwise.
    """

    wrong: int = 0
    first: int = 0
    wrong_nested: int = 0
    differing: int = 0
    described: int = 0


@dataclass
class WeightResult:
    """Gathers what is measured of one packed weight.

    Attributes:
        weight: the weight as it is stored.
        improper: the number of scales that are infinite or NaN, or negative although they were
            not searched.
        scales: the differences between its scales and those of the source. None if it was not
            compared with a source.
        is_damaged: True if it is not what calibration made of it.
    """

    weight: StoredWeight
    improper: int = 0
    scales: ScaleErrors | None = None
    is_damaged: bool = False
    _pieces: dict[int, PieceErrors] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_improper(self, count: int) -> None:
        """Counts improper scales; from any thread."""
        with self._lock:
            self.improper += count

    def add_piece(self, start: int, errors: PieceErrors) -> None:
        """Keeps the errors of the piece that starts at element `start`; from any thread."""
        self._pieces[start] = errors

    @property
    def errors(self) -> PieceErrors | None:
        """The errors of the whole weight; None if it was not compared with a source."""
        if not self._pieces:
            return None
        return PieceErrors.sum_up(_in_order(self._pieces))

    @property
    def relative_error(self) -> float | None:
        """‖W - Ŵ‖ / ‖W‖; None if the weight was not compared with a source."""
        errors = self.errors
        if errors is None:
            return None
        return relative_error(errors.squared_error, errors.squared_weight)

    @property
    def bytes_differing(self) -> int | None:
        """The number of bytes, of all components, that quantizing the source would make otherwise.

        None if the weight was not compared with a source.
        """
        errors = self.errors
        if errors is None or self.scales is None:
            return None
        return errors.differing + self.scales.differing + self.scales.described


@dataclass
class CopyResult:
    """Gathers what is measured of one tensor that is not packed.

    Attributes:
        tensor: the tensor as it is stored.
        differing: the number of elements that differ from those of the source.
        largest_difference: the largest |difference| of such an element, if they are floats.
    """

    tensor: TensorInfo
    differing: int = 0
    largest_difference: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, differing: int, largest_difference: float) -> None:
        """Counts elements that differ from those of the source; from any thread."""
        with self._lock:
            self.differing += differing
            self.largest_difference = max(self.largest_difference, largest_difference)


class PieceDifference(NamedTuple):
    """The difference between a piece of a tensor, or the whole tensor, and another tensor.

    Sums are in float64.

    Attributes:
        squared_difference: the sum of (a - b)².
        squared_values: the sum of a², over the values that are finite.
        largest_difference: the largest |a - b|. Infinite where one of the two is NaN or infinite
            and the other is not.
        differing: the number of values that are not equal; NaN equals NaN.
    """

    squared_difference: float
    squared_values: float
    largest_difference: float
    differing: int

    @classmethod
    def sum_up(cls, pieces: Sequence["PieceDifference"]) -> "PieceDifference":
        """Returns the difference of the whole tensor, which has at least one piece."""
        squared_differences = []
        squared_values = []
        largest_difference = pieces[0].largest_difference
        differing = 0
        for piece in pieces:
            squared_differences.append(piece.squared_difference)
            squared_values.append(piece.squared_values)
            largest_difference = max(largest_difference, piece.largest_difference)
            differing += piece.differing
        return cls(
            squared_difference=_add_floats(squared_differences),
            squared_values=_add_floats(squared_values),
            largest_difference=largest_difference,
            differing=differing,
        )


@dataclass
class TensorDifference:
    """Gathers the differences between the tensors of one name in two checkpoints.

    Attributes:
        a: the tensor in the first checkpoint, with the dtype that it is decoded to.
        b: the tensor in the second checkpoint, with the dtype that it is decoded to.
        is_identical: True if all bytes are equal. None if the two are not stored alike, or were
            not compared yet.
    """

    a: TensorInfo
    b: TensorInfo
    is_identical: bool | None = None
    _pieces: dict[int, PieceDifference] = field(default_factory=dict)

    def add_piece(self, start: int, difference: PieceDifference) -> None:
        """Keeps the difference of the piece that starts at element `start`; from any thread."""
        self._pieces[start] = difference

    @property
    def difference(self) -> PieceDifference | None:
        """The difference between the values of both; None if no values were compared."""
        if not self._pieces:
            return None
        return PieceDifference.sum_up(_in_order(self._pieces))


def _in_order(pieces: Mapping[int, PieceT]) -> list[PieceT]:
    return [pieces[start] for start in sorted(pieces)]


def _add_floats(values: Sequence[float]) -> float:
    """Adds floats up to ten digits: the last of sixteen depend on how a device adds."""
    return float(f"{math.fsum(values):.10g}")
