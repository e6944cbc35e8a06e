"""One tensor, or one kind of module, in a result. Field names are the keys of --json, in their
order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, TypeVar


@dataclass(frozen=True)
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

    name: str  # of the weight
    stack: str  # its place, see places.ModulePlace
    layer: int | None  # its place, see places.ModulePlace
    kind: str  # its place, see places.ModulePlace
    file: str  # that holds it
    quant_type: str  # what its quant state says
    blocksize: int  # what its quant state says
    dtype: str  # what its quant state says
    shape: tuple[int, ...]  # what its quant state says
    nested_offset: float | None  # what its quant state says
    double_quant: bool  # whether its absmax is quantized
    parameters: int  # elements of the weight
    bytes: int  # of all its tensors
    # ‖W - Ŵ‖ / ‖W‖; this and what follows, but for the tolerance, is None without a source
    relative_error: float | None
    tolerance: float  # how large the relative error may be
    snr_db: float | None  # the relative error as signal to noise, in decibels
    largest_error: float | None  # the largest |error|
    largest_error_of_absmax: float | None  # the largest |error| / absmax of its block
    outside: int | None  # values beyond the format's worst case
    not_nearest: int | None  # codes for which another is nearer to the value
    bytes_differing: int | None  # of codes and scales, from those that quantizing the source gives
    squared_error: float | None  # sums
    squared_weight: float | None  # sums

    @property
    def error(self) -> float:
        """The relative error of a weight that was compared."""
        assert self.relative_error is not None
        return self.relative_error


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

    packed: int  # weights that are packed
    copied: int  # tensors that are kept
    largest_relative_error: float  # of the weights
    median_relative_error: float  # of the weights
    bytes_differing: int  # from those that quantizing the source gives
    weights: tuple[WeightRow, ...] = ()  # a row for each that is packed

    def measured(self) -> dict[str, int | float]:
        """The figures, to as many digits as do not depend on how the work was divided."""
        figures = {key: value for key, value in vars(self).items() if key != "weights"}
        return {key: round(value, 6) for key, value in figures.items()}

    @classmethod
    def from_measured(cls, figures: Any) -> "VerificationSummary | None":
        """What `measured` gave, from a file; None if the file holds something else."""
        names = {field.name for field in fields(cls)} - {"weights"}
        if not isinstance(figures, dict) or figures.keys() != names:
            return None
        return cls(**figures) if {*map(type, figures.values())} <= {int, float} else None

    @classmethod
    def of(cls, rows: Sequence[WeightRow], copies: int) -> "VerificationSummary":
        import statistics  # it takes half as long as --help

        errors = [row.relative_error for row in rows if row.relative_error is not None]
        return cls(
            packed=len(rows),
            copied=copies,
            largest_relative_error=max(errors, default=0.0),
            median_relative_error=statistics.median(errors) if errors else 0.0,
            bytes_differing=sum(row.bytes_differing or 0 for row in rows),
            weights=tuple(rows),
        )

    @classmethod
    def joined(cls, parts: Sequence[Mapping[str, Any]]) -> "VerificationSummary":
        """The summary of what several have looked at, given the `asdict` of each."""
        rows = (
            WeightRow(**row | {"shape": tuple(row["shape"])})
            for part in parts
            for row in part["weights"]
        )
        return cls.of(sorted(rows, key=lambda row: row.name), sum(part["copied"] for part in parts))


class Status(str, Enum):
    """Names how the tensors of one name in two checkpoints compare; the worst comes first."""

    ONLY_A = "only in A"
    ONLY_B = "only in B"
    SHAPE = "another shape"
    DIFFERENT = "different"
    EQUAL = "equal in value"
    IDENTICAL = "identical"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class ComparedRow:
    """Describes how the tensors of one name in two checkpoints compare.

    Attributes:
        name: the name of both tensors.
        stack: the path of their stack of layers, such as "model.layers". Empty outside of a stack.
        layer: the number of their layer. None outside of a stack.
        kind: the path of their module inside a layer, such as "mlp.down_proj".
        parameters: the number of elements of the tensor.
        format_a: how the first checkpoint stores it, in a few words. None where it lacks the
            tensor.
        format_b: how the second checkpoint stores it, in a few words. None where it lacks the
            tensor.
        shape_a: the shape in the first checkpoint. None where it lacks the tensor.
        shape_b: the shape in the second checkpoint. None where it lacks the tensor.
        status: how the two compare.
        differing: the number of values that are not equal. None where no values were compared.
        relative_error: ‖A - B‖ / ‖A‖. None where no values were compared.
        snr_db: the relative error as signal to noise ratio, in decibels. None where no values were
            compared.
        largest_difference: the largest |a - b|. None where no values were compared.
        squared_difference: the sum of (a - b)². None where no values were compared.
        squared_values: the sum of a². None where no values were compared.
        passed: True if the tolerance that was given lets the difference pass.
    """

    name: str  # of both
    stack: str  # their place, see places.ModulePlace
    layer: int | None  # their place, see places.ModulePlace
    kind: str  # their place, see places.ModulePlace
    parameters: int  # elements of the tensor
    format_a: str | None  # how each is stored, in a few words; None where there is none
    format_b: str | None  # how each is stored, in a few words; None where there is none
    shape_a: tuple[int, ...] | None  # of each
    shape_b: tuple[int, ...] | None  # of each
    status: Status  # how they compare
    # values that are not equal; this and what follows is None where no values were compared
    differing: int | None = None
    relative_error: float | None = None  # ‖A - B‖ / ‖A‖
    snr_db: float | None = None  # that as signal to noise, in decibels
    largest_difference: float | None = None  # the largest |a - b|
    squared_difference: float | None = None  # sums
    squared_values: float | None = None  # sums
    passed: bool = False  # whether that is let pass


@dataclass(frozen=True)
class ComparedKind:
    """Sums up the compared tensors of one kind in one stack of layers.

    Attributes:
        stack: the path of the stack of layers, such as "model.layers". Empty outside of a stack.
        kind: the path of the module inside a layer, such as "mlp.down_proj".
        tensors: the number of tensors.
        parameters: the number of elements of all of them.
        identical: the number of tensors whose bytes are all equal.
        differing: the number of values that are not equal.
        relative_error: ‖A - B‖ / ‖A‖ of all of them taken together. None if no values were
            compared.
        largest_relative_error: the largest relative error of one of them. None if no values were
            compared.
    """

    stack: str
    kind: str
    tensors: int
    parameters: int
    identical: int
    differing: int
    relative_error: float | None
    largest_relative_error: float | None


@dataclass(frozen=True)
class StoredQuantization:
    """Describes how a packed weight is stored, as its quant state says.

    Attributes:
        quant_type: "nf4" or "fp4".
        blocksize: the number of elements that share an absmax.
        double_quant: True if its absmax is quantized.
        nested_offset: the number that is added to the decoded absmax, as the quant state spells it.
            None without double quantization.
        storage: the dtype of the packed codes (bitsandbytes' quant_storage).
        tensors: dtype and shape of each component, by its suffix; the packed codes have none.
    """

    quant_type: str
    blocksize: int
    double_quant: bool
    nested_offset: Any
    storage: str
    tensors: dict[str, str]


@dataclass(frozen=True)
class InspectedRow:
    """Describes one tensor, or one packed weight with all its components.

    Attributes:
        name: the name of the tensor.
        file: the name of the file that holds it.
        dtype: the dtype of the tensor. For a packed weight, the dtype that it decodes to.
        shape: the shape of the tensor. For a packed weight, the shape that it decodes to.
        parameters: the number of elements.
        bytes: the size of the tensor, or of all components.
        bits_per_parameter: bits per element.
        format: how the tensor is stored, in one word: "nf4/64", or a dtype.
        quantization: how a packed weight is stored. None for other tensors.
    """

    name: str  # of the tensor
    file: str  # that holds it
    dtype: str  # of a packed weight, those that it decodes to
    shape: tuple[int, ...]  # of a packed weight, those that it decodes to
    parameters: int  # elements
    bytes: int  # of all its tensors
    bits_per_parameter: float  # of it
    format: str  # how it is stored, in one word
    quantization: StoredQuantization | None  # None unless it is packed


@dataclass(frozen=True)
class InspectedKind:
    """Sums up the tensors of one kind in one stack of layers.

    Attributes:
        stack: the path of the stack of layers, such as "model.layers". Empty outside of a stack.
        kind: the path of the module inside a layer, such as "mlp.down_proj".
        tensors: the number of tensors; the components of a packed weight count as one.
        formats: how they are stored; every format that occurs.
        parameters: the number of elements of all of them.
        bytes: the size of all of them.
        bits_per_parameter: bits per element.
    """

    stack: str
    kind: str
    tensors: int
    formats: tuple[str, ...]
    parameters: int
    bytes: int
    bits_per_parameter: float


@dataclass(frozen=True)
class InspectionTotals:
    """Sums up what a checkpoint holds.

    Attributes:
        tensors: the number of tensors; the components of a packed weight count as one.
        packed: the number of weights in 4 bits.
        parameters: the number of elements of all tensors.
        bytes: the size of all tensors.
        bits_per_parameter: bits per element.
    """

    tensors: int
    packed: int
    parameters: int
    bytes: int
    bits_per_parameter: float

    @classmethod
    def of(cls, rows: Sequence[InspectedRow]) -> "InspectionTotals":
        parameters, size = sum(row.parameters for row in rows), sum(row.bytes for row in rows)
        packed = sum(row.quantization is not None for row in rows)
        return cls(len(rows), packed, parameters, size, 8 * size / max(parameters, 1))


def format_name(quant_type: str, double_quant: bool, blocksize: int) -> str:
    """How a packed weight is stored, in one word: "nf4/64", with a "+" before the slash where
    absmax is quantized.
    """
    return f"{quant_type}{'+' if double_quant else ''}/{blocksize}"


def relative_error(squared_error: float, squared_weight: float) -> float:
    """‖W - Ŵ‖ / ‖W‖ from the squares of both; 0 for two weights of zeros, infinite if only W is
    one.
    """
    if squared_weight == 0:
        return 0.0 if squared_error == 0 else math.inf
    return math.sqrt(squared_error / squared_weight)


def distance(error: float | None) -> float:
    """A relative error to sort by: NaN is the farthest, none the nearest."""
    return -1.0 if error is None else math.inf if math.isnan(error) else error


def decibels(error: float) -> float:
    """A relative error as the ratio of signal to noise: infinite for 0, and -infinite for an
    infinite error.
    """
    if math.isnan(error):
        return error
    return math.inf if error == 0 else -math.inf if math.isinf(error) else -20 * math.log10(error)


RowT = TypeVar("RowT", WeightRow, WeightKind, InspectedRow, InspectedKind)


def inside(submodel: str, row: RowT) -> RowT:
    """A row with the submodel of a diffusers pipeline, if there is one, before its name, file and
    stack of layers.

    A kind of modules that are in no stack has the submodel before itself.
    """
    if not submodel:
        return row
    found = {key: getattr(row, key, "") for key in ("name", "file", "stack")}
    if not found["name"] and not found["stack"]:
        found["kind"] = getattr(row, "kind", "")
    changes: dict[str, Any] = {key: f"{submodel}/{value}" for key, value in found.items() if value}
    return replace(row, **changes)
