"""What verification and comparison measure of a tensor, gathered from the pieces that several
workers look at.

Of a packed weight also its row, its faults, and totals by kind of module.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_type_hints

from nf4conv.options import VerifyOptions
from nf4conv.report.places import by_kind, place_of
from nf4conv.report.rows import WeightKind, WeightRow, decibels, relative_error
from nf4conv.report.tolerance import RELATIVE_ERRORS
from nf4conv.sources.stored_weights import StoredWeight
from nf4conv.sources.tensors import TensorInfo

M = TypeVar("M")


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
    # bytes of scales that quantizing the source would make otherwise, the offset counting as one
    differing: int = 0
    described: int = 0  # bytes of the code maps and of the JSON blob that it would


@dataclass
class WeightResult:
    """One packed weight."""

    weight: StoredWeight  # as it is stored
    improper: int = 0  # scales that are infinite, NaN or, if they were not searched, negative
    scales: ScaleErrors | None = (
        None  # how the scales compare with the source's; None without a source
    )
    _pieces: dict[int, PieceErrors] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_improper(self, count: int) -> None:
        with self._lock:
            self.improper += count

    def add_piece(self, start: int, errors: PieceErrors) -> None:
        self._pieces[start] = errors

    @property
    def errors(self) -> PieceErrors | None:
        """Of the whole weight; None if it was not compared. Independent of the order in which
        pieces came.
        """
        return _whole(PieceErrors, self._pieces)

    @property
    def relative_error(self) -> float | None:
        """‖W - Ŵ‖ / ‖W‖; None without a source."""
        errors = self.errors
        return (
            None if errors is None else relative_error(errors.squared_error, errors.squared_weight)
        )

    @property
    def bytes_differing(self) -> int | None:
        """Of all components, from those that quantizing the source gives; None without a source."""
        errors, scales = self.errors, self.scales
        return (
            None
            if errors is None or scales is None
            else errors.differing + scales.differing + scales.described
        )


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

    def add_piece(self, start: int, difference: PieceDifference) -> None:
        self._pieces[start] = difference

    @property
    def difference(self) -> PieceDifference | None:
        """Of the values of the whole tensor; None if they were not compared."""
        return _whole(PieceDifference, self._pieces)


def _whole(kind: Callable[..., M], pieces: Mapping[int, Any]) -> M | None:
    """What pieces add up to, in their order: sums and maxima; None if there are none."""
    if not pieces:
        return None
    columns = zip(*(pieces[start] for start in sorted(pieces)), strict=True)
    return kind(*(add(column) for add, column in zip(_adding(kind), columns, strict=True)))


@cache
def _adding(kind: Callable[..., M]) -> tuple[Callable[[Sequence[Any]], Any], ...]:
    """How each field of the whole comes from those of the pieces; to find that out takes longer
    than to do it.
    """
    return tuple(
        # of a sum of floats ten digits are kept, because the last of sixteen depend on how a device
        # adds
        max
        if name.startswith(("max", "largest"))
        else sum
        if hint is int
        else lambda x: float(f"{math.fsum(x):.10g}")
        for name, hint in get_type_hints(kind).items()
    )


def weight_faults(result: WeightResult, options: VerifyOptions) -> Iterator[tuple[str, str]]:
    """(check, text) of everything that is wrong with a weight's values."""
    errors, scales = result.errors, result.scales
    if result.improper:
        yield (
            "scales",
            f"{result.improper:,} scales are infinite, NaN or, though not searched, negative",
        )
    if errors is None or scales is None:
        return
    if scales.wrong:
        yield (
            "scales",
            f"{scales.wrong:,} scales do not follow from the source; the first is of block "
            f"{scales.first:,}",
        )
    if scales.wrong_nested:
        yield (
            "scales",
            f"{scales.wrong_nested:,} nested scales, or the offset, do not follow from the source",
        )
    if errors.not_nearest:
        yield (
            "codes",
            f"{errors.not_nearest:,} of {result.weight.elements:,} codes are not the nearest",
        )
    if errors.outside:
        yield (
            "bound",
            f"{errors.outside:,} values are beyond the worst case of "
            f"{result.weight.format.quant_type}",
        )
    error, tolerance = result.relative_error, _tolerance(result, options)
    if error is None or not error <= tolerance:
        yield "tolerance", f"relative error {error:.4f}, more than {tolerance:g}"
    if options.exact and result.bytes_differing:
        counts = f"{errors.differing:,} bytes of codes, {scales.differing:,} of scales"
        yield "exact", f"{counts} and {scales.described:,} of code maps and quant state differ"
    values = result.weight.values
    if options.exact and values.shape != (values.elements, 1):
        yield "exact", f"the codes are {list(values.shape)}, expected {[values.elements, 1]}"


def _tolerance(result: WeightResult, options: VerifyOptions) -> float:
    if options.tolerance is not None:
        return options.tolerance
    format = result.weight.format
    return RELATIVE_ERRORS[format.scales, format.quant_type][format.blocksize][2]


def weight_row(result: WeightResult, options: VerifyOptions) -> WeightRow:
    weight, errors, error = result.weight, result.errors, result.relative_error
    format = {
        name: getattr(weight.format, name)
        for name in ("quant_type", "blocksize", "dtype", "double_quant")
    }
    counted = ("outside", "not_nearest", "squared_error", "squared_weight")
    sums: dict[str, Any] = {name: getattr(errors, name, None) for name in counted}
    return WeightRow(
        name=weight.name,
        **place_of(weight.name)._asdict(),
        file=weight.values.file.name,
        **format,
        shape=weight.shape,
        nested_offset=weight.nested_offset,
        parameters=weight.elements,
        bytes=weight.nbytes,
        relative_error=error,
        tolerance=_tolerance(result, options),
        snr_db=None if error is None else decibels(error),
        largest_error=None if errors is None else errors.max_error,
        largest_error_of_absmax=None if errors is None else errors.max_relative_error,
        bytes_differing=result.bytes_differing,
        **sums,
    )


def weight_kinds(rows: Iterable[WeightRow]) -> Iterator[WeightKind]:
    """Totals of the weights of one kind in one stack of layers."""
    for stack, kind, members in by_kind(rows, lambda row: row):
        errors = [row.relative_error for row in members if row.relative_error is not None]
        squared_error = math.fsum(
            row.squared_error for row in members if row.squared_error is not None
        )
        squared_weight = math.fsum(
            row.squared_weight for row in members if row.squared_weight is not None
        )
        yield WeightKind(
            stack=stack,
            kind=kind,
            weights=len(members),
            parameters=sum(row.parameters for row in members),
            bytes=sum(row.bytes for row in members),
            relative_error=relative_error(squared_error, squared_weight)
            if squared_weight
            else None,
            largest_relative_error=max(errors, default=None),
        )
