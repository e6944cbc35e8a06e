"""Describes what verification measured of each packed weight, and of all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class WeightRow:
    """Describes one packed weight, as `verify` measured it.

    Attributes:
        name: the name of the weight.
        stack: the path of its stack of layers, such as "model.layers". Empty outside of a stack.
        layer: the number of its layer. None outside of a stack.
        kind: the path of its module inside a layer, such as "mlp.down_proj".
        file: the name of the file that holds it.
        quant_type: "nf4" or "fp4", as its quant state says.
        blocksize: the number of elements that share an absmax, as its quant state says.
        dtype: the dtype that it decodes to, as its quant state says.
        shape: the shape of the weight before it was packed, as its quant state says.
        nested_offset: the number that is added to the decoded absmax. None without double
            quantization.
        double_quant: True if its absmax is quantized.
        scales: how its blocks were scaled, "absmax" or "search", as nf4conv.json says of it.
        parameters: the number of elements of the weight.
        bytes: the size of all its components.
        relative_error: ‖W - Ŵ‖ / ‖W‖. None without a source.
        tolerance: the largest relative error that passes.
        snr_db: the relative error as signal to noise ratio, in decibels. None without a source.
        largest_error: the largest |error| of an element. None without a source.
        largest_error_of_absmax: the largest |error| of an element / absmax of its block. None
            without a source.
        outside: the number of elements whose error exceeds the format's worst case. None without a
            source.
        not_nearest: the number of codes for which another code is nearer to the element. None
            without a source.
        bytes_differing: the number of bytes, of all components, that differ from those that
            quantizing the source gives. None without a source.
        squared_error: the sum of the squared errors. None without a source.
        squared_weight: the sum of the squared elements of the source. None without a source.
    """

    name: str
    stack: str
    layer: int | None
    kind: str
    file: str
    quant_type: str
    blocksize: int
    dtype: str
    shape: tuple[int, ...]
    nested_offset: float | None
    double_quant: bool
    scales: str
    parameters: int
    bytes: int
    relative_error: float | None = None
    tolerance: float
    snr_db: float | None = None
    largest_error: float | None = None
    largest_error_of_absmax: float | None = None
    outside: int | None = None
    not_nearest: int | None = None
    bytes_differing: int | None = None
    squared_error: float | None = None
    squared_weight: float | None = None

    @property
    def error(self) -> float:
        """The relative error of a weight that was compared with a source."""
        assert self.relative_error is not None
        return self.relative_error

    def inside(self, submodel: str) -> "WeightRow":
        """Puts the submodel of a diffusers pipeline before the names of weight, file and stack."""
        name = f"{submodel}/{self.name}"
        stack = f"{submodel}/{self.stack}" if self.stack else ""
        return replace(self, name=name, file=f"{submodel}/{self.file}", stack=stack)


@dataclass(frozen=True)
class WeightKind:
    """Sums up the packed weights of one kind in one stack of layers.

    Attributes:
        stack: the path of the stack of layers, such as "model.layers". Empty outside of a stack.
        kind: the path of the module inside a layer, such as "mlp.down_proj".
        weights: the number of weights.
        parameters: the number of elements of all of them.
        bytes: the size of all their components.
        relative_error: ‖W - Ŵ‖ / ‖W‖ of all of them taken together. None without a source.
        largest_relative_error: the largest relative error of one of them. None without a source.
    """

    stack: str
    kind: str
    weights: int
    parameters: int
    bytes: int
    relative_error: float | None
    largest_relative_error: float | None

    def inside(self, submodel: str) -> "WeightKind":
        """Puts the submodel of a diffusers pipeline before the stack, or else the kind."""
        if self.stack:
            return replace(self, stack=f"{submodel}/{self.stack}")
        return replace(self, kind=f"{submodel}/{self.kind}")


@dataclass(frozen=True)
class ComparedTensors:
    """Sums up the tensors that are not packed, compared bit for bit with those of the source.

    Those of a decoded checkpoint are compared with what the source decodes to.

    Attributes:
        compared: the number of tensors.
        differing: the number of those that are not equal.
        values: the number of values in all of them.
        values_differing: the number of values that are not equal.
        largest_difference: the largest |difference| of a float. Infinite where one of the two is
            NaN or infinite, and the other is not.
        largest_relative_error: the largest ‖A - B‖ / ‖A‖ of a tensor, where nothing says how the
            checkpoint was made from the source; otherwise None.
    """

    compared: int
    differing: int
    values: int
    values_differing: int
    largest_difference: float
    largest_relative_error: float | None = None

    def __add__(self, other: "ComparedTensors") -> "ComparedTensors":
        """Sums up two submodels."""
        return ComparedTensors(
            compared=self.compared + other.compared,
            differing=self.differing + other.differing,
            values=self.values + other.values,
            values_differing=self.values_differing + other.values_differing,
            largest_difference=max(self.largest_difference, other.largest_difference),
            largest_relative_error=_larger(
                self.largest_relative_error, other.largest_relative_error
            ),
        )


def _larger(error: float | None, other: float | None) -> float | None:
    known = [one for one in (error, other) if one is not None]
    return max(known, default=None)


@dataclass(frozen=True)
class CheckResult:
    """Describes a check that ran.

    Attributes:
        meaning: what the check holds the checkpoint to.
        passed: True if the check found no fault.
    """

    meaning: str
    passed: bool


@dataclass(frozen=True)
class VerificationSummary:
    """Sums up what `quantize --verify` measured.

    Attributes:
        packed: the number of weights that are packed.
        copied: the number of tensors that are kept.
        largest_relative_error: the largest relative error of a weight.
        median_relative_error: the median of the weights' relative errors.
        bytes_differing: the number of bytes that differ from those that quantizing the source
            gives.
        weights: one row for each packed weight. Empty in a result that was complete before, because
            its nf4conv.json keeps only the sums.
    """

    packed: int
    copied: int
    largest_relative_error: float
    median_relative_error: float
    bytes_differing: int
    weights: tuple[WeightRow, ...] = ()

    @classmethod
    def of(cls, rows: Sequence[WeightRow], copies: int) -> "VerificationSummary":
        """Sums up the rows of packed weights, beside which `copies` tensors were kept."""
        import statistics  # it takes half as long as --help

        errors = [row.relative_error for row in rows if row.relative_error is not None]
        differing = 0
        for row in rows:
            differing += row.bytes_differing or 0
        median = statistics.median(errors) if errors else 0.0
        return cls(
            packed=len(rows),
            copied=copies,
            largest_relative_error=max(errors, default=0.0),
            median_relative_error=median,
            bytes_differing=differing,
            weights=tuple(rows),
        )

    @classmethod
    def joined(cls, parts: Sequence[Mapping[str, Any]]) -> "VerificationSummary":
        """Sums up the summaries of several shards, given the `asdict` of each, read from JSON."""
        rows: list[WeightRow] = []
        copies = 0
        for part in parts:
            copies += part["copied"]
            for row in part["weights"]:
                shape = tuple(row["shape"])
                rows.append(WeightRow(**{**row, "shape": shape}))
        rows.sort(key=lambda row: row.name)
        return cls.of(rows, copies)

    def to_record(self) -> dict[str, int | float]:
        """Returns the figures as nf4conv.json keeps them.

        They are rounded to the digits that do not depend on how the work was divided.
        """
        return {
            "packed": self.packed,
            "copied": self.copied,
            "largest_relative_error": round(self.largest_relative_error, 6),
            "median_relative_error": round(self.median_relative_error, 6),
            "bytes_differing": self.bytes_differing,
        }

    @classmethod
    def from_record(cls, record: Any) -> "VerificationSummary | None":
        """Reads what `to_record` gave to nf4conv.json; None if the file holds something else."""
        if not isinstance(record, dict):
            return None
        if record.keys() != {field.name for field in fields(cls)} - {"weights"}:
            return None
        for figure in record.values():
            if type(figure) not in (int, float):  # a bool is an int, but no figure
                return None
        return cls(**record)
