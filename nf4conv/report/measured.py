"""What verification and comparison measure of a tensor, gathered from the pieces that several workers look at."""

import math
import re
import threading
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from nf4conv.checkpoint.header import TensorInfo
from nf4conv.checkpoint.module_names import module_of
from nf4conv.checkpoint.stored import StoredWeight
from nf4conv.report.rows import relative_error

_NUMBER: Final = re.compile(r"(^|\.)(\d+)(?=\.|$)")


class ModulePlace(NamedTuple):
    """Where a weight stands in a model.

    Attributes:
        stack: the path before the first number, such as "model.layers"; empty if there is no number.
        layer: that number; None if there is none.
        kind: the rest of the module's path without further numbers, such as "mlp.experts.down_proj".
    """

    stack: str
    layer: int | None
    kind: str


def place_of(name: str) -> ModulePlace:
    """The place of a weight, by its name."""
    module = module_of(name)
    match = _NUMBER.search(module)
    if match is None:
        return ModulePlace("", None, module)
    kind = _NUMBER.sub("", module[match.end() :]).strip(".")
    return ModulePlace(module[: match.start()], int(match[2]), kind or module[: match.start()])


class PieceErrors(NamedTuple):
    """What one piece of a weight adds; sums in float64, see codec/error_sums.py.

    Attributes:
        squared_error: Σ error².
        squared_weight: Σ weight².
        max_error: the largest |error|.
        max_relative_error: the largest |error| / absmax of its block.
        outside: values beyond the format's worst case.
        differing: bytes of codes that quantizing the source would make otherwise.
        not_nearest: codes for which another is nearer to the value.
    """

    squared_error: float
    squared_weight: float
    max_error: float
    max_relative_error: float
    outside: int
    differing: int
    not_nearest: int


class ScaleErrors(NamedTuple):
    """How the scales of a weight compare with those of its source.

    Attributes:
        wrong: absmax, or their codes, that are not the source's.
        first: index of the first of them.
        wrong_nested: nested absmax that are not the largest of what they scale.
        differing: bytes of scales that quantizing the source would make otherwise, the offset counting as one.
        described: bytes of the code maps and of the JSON blob that it would.
    """

    wrong: int = 0
    first: int = 0
    wrong_nested: int = 0
    differing: int = 0
    described: int = 0


@dataclass
class WeightResult:
    """One packed weight.

    Attributes:
        weight: as it is stored.
        improper: scales that are infinite, NaN or, if they were not searched, negative.
        scales: how the scales compare with the source's; None without a source.
    """

    weight: StoredWeight
    improper: int = 0
    scales: ScaleErrors | None = None
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
    """One tensor that is not packed.

    Attributes:
        tensor: as it is stored.
        differing: elements that are not the source's.
    """

    tensor: TensorInfo
    differing: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, differing: int) -> None:
        with self._lock:
            self.differing += differing


class PieceDifference(NamedTuple):
    """What one piece of a tensor adds to its comparison with another; sums in float64.

    Attributes:
        squared_difference: Σ (a - b)².
        squared_values: Σ a², of the values that are finite.
        largest_difference: the largest |a - b|; infinite where one of the two is NaN or infinite, and the other is not.
        differing: values that are not equal; NaN equals NaN.
    """

    squared_difference: float
    squared_values: float
    largest_difference: float
    differing: int


@dataclass
class TensorDifference:
    """The tensors of one name in two checkpoints.

    Attributes:
        a: in the one, as what it is decoded to.
        b: in the other.
        is_identical: whether all bytes are equal; None where the two are not stored alike, or not compared yet.
    """

    a: TensorInfo
    b: TensorInfo
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
