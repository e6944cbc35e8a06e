"""Gathers what verification measures of a tensor, and judges it.

Several workers look at the pieces of one tensor, in any order. What each piece adds is kept by the
place where the piece starts, and summed up in that order, so that results do not depend on who was
first.
"""

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from nf4conv.options import VerifyOptions
from nf4conv.plan.rows import Errors, TensorRow
from nf4conv.report.results import ComparedTensors
from nf4conv.report.tolerance import tolerance_of
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.tensors import TensorInfo


class Wrong(NamedTuple):
    """Counts the values of a component that do not follow from the source."""

    number: int
    first: int  # the index of the first of them


class ScaleErrors(NamedTuple):
    """The differences between a weight and what its source gives, by the component.

    Attributes:
        wrong: the scales that do not follow from the source.
        differing: the number of bytes that quantizing the source would make otherwise: of scales,
            code maps and quant state.
    """

    wrong: Mapping[str, Wrong] = MappingProxyType({})
    differing: Mapping[str, int] = MappingProxyType({})


@dataclass
class _Pieces:
    """Gathers the errors of pieces, by the element that each starts at."""

    _pieces: dict[int, Errors] = field(default_factory=dict, init=False)

    def add_piece(self, start: int, errors: Errors) -> None:
        """Keeps the errors of the piece that starts at element `start`; from any thread."""
        self._pieces[start] = errors

    @property
    def errors(self) -> Errors | None:
        """The errors of the whole; None if no values were compared."""
        if not self._pieces:
            return None
        return Errors.sum_up([self._pieces[start] for start in sorted(self._pieces)])


@dataclass
class WeightResult(_Pieces):
    """Gathers what is measured of one packed weight. Of its bytes, errors count codes alone.

    Attributes:
        weight: the weight as it is stored.
        improper: the number of scales that are infinite or NaN, or negative although they were
            not searched.
        scales: the differences between its scales and those of the source. None if it was not
            compared with a source.
        is_damaged: True if it is not what calibration made of it.
    """

    weight: Bitsandbytes4bit
    improper: int = 0
    scales: ScaleErrors | None = None
    is_damaged: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_improper(self, count: int) -> None:
        """Counts improper scales; from any thread."""
        with self._lock:
            self.improper += count

    def row(self, options: VerifyOptions) -> TensorRow:
        """Returns the row of a report that describes the weight."""
        weight = self.weight
        errors = None
        codes = self.errors
        if codes is not None and self.scales is not None:
            differing = codes.differing + sum(self.scales.differing.values())
            errors = replace(codes, differing=differing)
        return TensorRow(
            name=weight.values.name,
            file=weight.values.file.name,
            dtype=weight.format.dtype,
            shape=weight.shape,
            parameters=weight.elements,
            bytes=weight.nbytes,
            format=weight.format,
            nested_offset=weight.nested_offset,
            tolerance=tolerance_of(weight.format, options.tolerance),
            errors=errors,
        )

    def faults(self, options: VerifyOptions) -> Iterator[tuple[str, str]]:
        """Yields the check that each fault of the values fails, and a text for the user."""
        if self.improper:
            yield (
                "scales",
                f"{self.improper:,} scales are infinite or NaN, or negative without being searched",
            )
        if self.is_damaged:
            yield "codes", "is not what calibration made of it"
        row = self.row(options)
        errors = row.errors
        if errors is None or self.scales is None:
            return
        if self.scales.wrong:
            found = [
                f"{number:,} of {name}, the first at {first:,}"
                for name, (number, first) in self.scales.wrong.items()
            ]
            yield "scales", f"scales do not follow from the source: {'; '.join(found)}"
        weight = self.weight
        if errors.not_nearest:
            text = f"{errors.not_nearest:,} of {weight.elements:,} codes are not the nearest"
            yield "codes", text
        if errors.outside:
            worst = f"the worst case of {weight.format.quant_type}"
            yield "bound", f"{errors.outside:,} values are beyond {worst}"
        if row.is_beyond:
            yield "tolerance", f"relative error {row.error:.4f}, more than {row.tolerance:g}"
        if options.exact:
            yield from self._exact_faults(errors.differing, self.scales)

    def _exact_faults(self, differing: int, scales: ScaleErrors) -> Iterator[tuple[str, str]]:
        """Yields in which bytes the weight is not what quantizing its source gives."""
        if differing:
            by_component = {"codes": differing - sum(scales.differing.values()), **scales.differing}
            counts = [f"{count:,} of {name}" for name, count in by_component.items() if count]
            yield "exact", f"{differing:,} bytes differ: {', '.join(counts)}"
        values = self.weight.values
        expected = (values.elements, 1)
        if values.shape != expected:
            yield "exact", f"the codes are {list(values.shape)}, expected {list(expected)}"


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

    @property
    def fault(self) -> str:
        """Says how many of its values are wrong; empty if none is."""
        if not self.differing:
            return ""
        return f"{self.differing:,} of {self.tensor.elements:,} values are not the source's"

    def compared(self) -> ComparedTensors:
        return ComparedTensors(
            compared=1,
            differing=1 if self.differing else 0,
            values=self.tensor.elements,
            values_differing=self.differing,
            largest_difference=self.largest_difference,
        )


@dataclass
class TensorDifference(_Pieces):
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

    @property
    def relative_error(self) -> float:
        """‖A - B‖ / ‖A‖; of complex numbers, of which only bytes are compared, 0 or infinite."""
        errors = self.errors
        if errors is not None:
            return errors.relative_error
        return math.inf if self.is_identical is False else 0.0

    @property
    def text(self) -> str:
        """Says how the two differ; empty if all values are equal."""
        errors = self.errors
        if errors is None:
            return "the bytes differ" if self.is_identical is False else ""
        if not errors.differing:
            return ""
        return (
            f"{errors.differing:,} of {self.a.elements:,} values differ, relative error "
            f"{errors.relative_error:.4g}, largest difference {errors.largest:.4g}"
        )

    def compared(self) -> ComparedTensors:
        errors = self.errors
        return ComparedTensors(
            compared=1,
            differing=1 if self.text else 0,
            values=self.a.elements,
            values_differing=0 if errors is None else errors.differing,
            largest_difference=0.0 if errors is None else errors.largest,
            largest_relative_error=self.relative_error,
        )
