"""What verification and comparison measure of a tensor, gathered from the pieces that several workers look at."""

import math
import re
import threading
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from nf4conv.checkpoint.header import TensorInfo
from nf4conv.checkpoint.module_names import module_of
from nf4conv.checkpoint.structure import StoredWeight
from nf4conv.report.rows import relative_error

_NUMBER: Final = re.compile(r"(^|\.)(\d+)(?=\.|$)")


class ModulePlace(NamedTuple):
    """Where a weight stands in a model."""

    stack: str  # the path before the first number, such as "model.layers"; empty if there is no number
    layer: int | None  # that number; None if there is none
    kind: str  # the rest of the module's path without further numbers, such as "mlp.experts.down_proj"


def place_of(name: str) -> ModulePlace:
    """The place of a weight, by its name."""
    module = module_of(name)
    match = _NUMBER.search(module)
    if match is None:
        return ModulePlace("", None, module)
    kind = _NUMBER.sub("", module[match.end() :]).strip(".")
    return ModulePlace(module[: match.start()], int(match[2]), kind or module[: match.start()])


class PieceErrors(NamedTuple):
    """What one piece of a weight adds; sums in float64, see codec/error_sums.py."""

    squared_error: float  # Σ error²
    squared_weight: float  # Σ weight²
    max_error: float  # the largest |error|
    max_relative_error: float  # the largest |error| / absmax of its block
    outside: int  # values beyond the format's worst case
    differing: int  # bytes of codes that quantizing the source would make otherwise
    not_nearest: int  # codes for which another is nearer to the value


class ScaleErrors(NamedTuple):
    """How the scales of a weight compare with those of its source."""

    wrong: int = 0  # absmax, or their codes, that are not the source's
    first: int = 0  # index of the first of them
    wrong_nested: int = 0  # nested absmax that are not the largest of what they scale
    differing: int = 0  # bytes of scales that quantizing the source would make otherwise, the offset counting as one
    described: int = 0  # bytes of the code maps and of the JSON blob that it would


@dataclass
class WeightResult:
    """One packed weight."""

    weight: StoredWeight  # as it is stored
    improper: int = 0  # scales that are infinite, NaN or, if they were not searched, negative
    scales: ScaleErrors | None = None  # how the scales compare with the source's; None without a source
    _pieces: dict[int, PieceErrors] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_improper(self, count: int) -> None:
        with self._lock:
            self.improper += count

    def add_piece(self, start: int, errors: PieceErrors) -> None:
        with self._lock:
            self._pieces[start] = errors

    @property
    def errors(self) -> PieceErrors | None:
        """Of the whole weight; None if it was not compared. Independent of the order in which pieces came."""
        if not self._pieces:
            return None
        columns = list(zip(*(self._pieces[start] for start in sorted(self._pieces)), strict=True))
        return PieceErrors(
            squared_error=math.fsum(columns[0]),
            squared_weight=math.fsum(columns[1]),
            max_error=max(columns[2]),
            max_relative_error=max(columns[3]),
            outside=sum(columns[4]),
            differing=sum(columns[5]),
            not_nearest=sum(columns[6]),
        )

    @property
    def relative_error(self) -> float | None:
        """‖W - Ŵ‖ / ‖W‖; None without a source."""
        errors = self.errors
        return None if errors is None else relative_error(errors.squared_error, errors.squared_weight)

    @property
    def bytes_differing(self) -> int | None:
        """Of all components, from those that quantizing the source gives; None without a source."""
        errors, scales = self.errors, self.scales
        return None if errors is None or scales is None else errors.differing + scales.differing + scales.described


@dataclass
class CopyResult:
    """One tensor that is not packed."""

    tensor: TensorInfo  # as it is stored
    differing: int = 0  # elements that are not the source's
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, differing: int) -> None:
        with self._lock:
            self.differing += differing


class PieceDifference(NamedTuple):
    """What one piece of a tensor adds to its comparison with another; sums in float64."""

    squared_difference: float  # Σ (a - b)²
    squared_values: float  # Σ a², of the values that are finite
    # the largest |a - b|; infinite where one of the two is NaN or infinite, and the other is not
    largest_difference: float
    differing: int  # values that are not equal; NaN equals NaN


@dataclass
class TensorDifference:
    """The tensors of one name in two checkpoints."""

    a: TensorInfo  # in the one, as what it is decoded to
    b: TensorInfo  # in the other
    # whether all bytes are equal; None where the two are not stored alike, or not compared yet
    is_identical: bool | None = None
    _pieces: dict[int, PieceDifference] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_piece(self, start: int, difference: PieceDifference) -> None:
        with self._lock:
            self._pieces[start] = difference

    @property
    def difference(self) -> PieceDifference | None:
        """Of the values of the whole tensor; None if they were not compared."""
        if not self._pieces:
            return None
        columns = list(zip(*(self._pieces[start] for start in sorted(self._pieces)), strict=True))
        return PieceDifference(math.fsum(columns[0]), math.fsum(columns[1]), max(columns[2]), sum(columns[3]))
