"""Describes tensors one by one, by kind of module and all together: the rows of every report.

Field names are the keys of --json, in their order.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final

from nf4conv.format.layout import Format
from nf4conv.models.module_names import module_of

_FATES: Final = {
    "pack": "packed",
    "decode": "decoded",
    "copy": "kept",
    "cast": "kept, cast",
    "stay": "as it is",
    "merge": "merged",
}
"""Each action in the words that a user reads."""


def relative_error(squared_error: float, squared_weight: float) -> float:
    """Returns ‖W - Ŵ‖ / ‖W‖, given the sums of the squared errors and of the squared elements.

    It is 0 if both sums are 0, and infinite if only the elements' is.
    """
    if squared_weight == 0:
        return 0.0 if squared_error == 0 else math.inf
    return math.sqrt(squared_error / squared_weight)


@dataclass(frozen=True)
class Errors:
    """Describes how far values are from those of a source: of a piece, or of a whole tensor.

    Sums are in float64. The last three figures are those of packed weights, see
    codec/error_sums.py.

    Attributes:
        squared_error: the sum of the squared errors.
        squared_weight: the sum of the squared elements of the source, as far as they are finite.
        largest: the largest |error|. Infinite where one of two values is NaN or infinite and the
            other is not.
        differing: the number of bytes, of all components of a packed weight, that differ from
            those that quantizing the source gives. Of two tensors that are not packed, the number
            of values that are not equal; NaN equals NaN.
        largest_of_absmax: the largest |error| of an element / absmax of its block.
        outside: the number of elements whose error exceeds the format's worst case.
        not_nearest: the number of codes for which another code is nearer to the element.
        relative_error: ‖W - Ŵ‖ / ‖W‖; computed from the other fields.
    """

    squared_error: float
    squared_weight: float
    largest: float
    differing: int
    largest_of_absmax: float = 0.0
    outside: int = 0
    not_nearest: int = 0
    relative_error: float = field(init=False)

    def __post_init__(self) -> None:
        error = relative_error(self.squared_error, self.squared_weight)
        object.__setattr__(self, "relative_error", error)

    @classmethod
    def sum_up(cls, pieces: Sequence["Errors"]) -> "Errors":
        """Returns the errors of the whole, which has at least one piece."""
        return cls(
            squared_error=_add_floats([piece.squared_error for piece in pieces]),
            squared_weight=_add_floats([piece.squared_weight for piece in pieces]),
            largest=max(piece.largest for piece in pieces),
            differing=sum(piece.differing for piece in pieces),
            largest_of_absmax=max(piece.largest_of_absmax for piece in pieces),
            outside=sum(piece.outside for piece in pieces),
            not_nearest=sum(piece.not_nearest for piece in pieces),
        )


def _add_floats(values: Sequence[float]) -> float:
    """Adds floats up to ten digits: the last of sixteen depend on how a device adds."""
    return float(f"{math.fsum(values):.10g}")


def bits_per_parameter(size: int, parameters: int) -> float:
    """Returns how many bits a parameter takes, of so many bytes for all of them."""
    return 8 * size / max(parameters, 1)


def distance(error: float | None) -> float:
    """Returns a number by which relative errors sort: NaN is the farthest, None the nearest."""
    if error is None:
        return -1.0
    return math.inf if math.isnan(error) else error


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """Describes one tensor, or one weight with all its components.

    Attributes:
        name: the name of the tensor.
        file: the name of the file that holds it; of a plan, of the output's.
        dtype: the dtype of the tensor, or the one that a packed weight decodes to. In the plan of
            a quantization it is the source's.
        shape: the shape of the tensor, or the one that a packed weight decodes to.
        parameters: the number of elements.
        bytes: the size of the tensor, or of all components; of a plan, in the output.
        encoding: how a tensor is stored that is neither in bitsandbytes' 4 bits nor in `dtype`.
            Empty for all others, and in plans.
        format: how a packed weight is stored. None for other tensors, and in plans.
        action: what a plan makes of it: "pack", "decode", "copy", "cast", "stay" (a weight that is
            in 4 bits already) or "merge" (a weight that an adapter is merged into). Otherwise
            empty.
        reason: why this becomes of it. Empty if nothing does.
        bytes_before: the size in the source of a plan. Otherwise None.
        tolerance: the largest relative error that passes. None if it was not verified.
        errors: how far it is from its source. None if it was not compared with one.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    parameters: int
    bytes: int
    encoding: str = ""
    format: Format | None = None
    action: str = ""
    reason: str = ""
    bytes_before: int | None = None
    tolerance: float | None = None
    errors: Errors | None = None

    @property
    def stored(self) -> str:
        """Says how it is stored, in one word: "nf4/64", an encoding, or a dtype."""
        return str(self.format) if self.format is not None else self.encoding or self.dtype

    @property
    def is_calibrated(self) -> bool:
        """True if its scales were calibrated."""
        return self.format is not None and self.format.scales == "calibrated"

    @property
    def error(self) -> float | None:
        """Its relative error; None if it was not compared with a source."""
        return None if self.errors is None else self.errors.relative_error

    @property
    def is_beyond(self) -> bool:
        """True if its error is more than the tolerance; NaN is no error that passes."""
        return self.error is not None and not self.error <= (self.tolerance or 0.0)

    def inside(self, submodel: str) -> "TensorRow":
        """Puts the submodel of a diffusers pipeline, if it is one, before both names."""
        if not submodel:
            return self
        return replace(self, name=f"{submodel}/{self.name}", file=f"{submodel}/{self.file}")


@dataclass(frozen=True, kw_only=True)
class KindRow:
    """Sums up the tensors of one kind of module of which the same becomes, or all tensors.

    Attributes:
        kind: the name of the modules, with a star in place of the layer's number and without the
            numbers of experts, such as "model.layers.*.mlp.down_proj". Empty for all tensors.
        tensors: the number of tensors; the components of a packed weight count as one.
        packed: how many of them are in bitsandbytes' 4 bits; 0 in plans.
        formats: how they are stored; every format that occurs.
        parameters: the number of elements of all of them.
        bytes: the size of all of them.
        bits_per_parameter: bits per element.
        action: what becomes of them, as in TensorRow.
        reason: why this becomes of them.
        bytes_before: their size in the source of a plan. Otherwise None.
        relative_error: ‖W - Ŵ‖ / ‖W‖ of all of them taken together. None without a source.
        largest_relative_error: the largest relative error of one of them. None without a source.
    """

    kind: str
    tensors: int
    packed: int
    formats: tuple[str, ...]
    parameters: int
    bytes: int
    bits_per_parameter: float
    action: str
    reason: str
    bytes_before: int | None
    relative_error: float | None
    largest_relative_error: float | None

    @property
    def fate(self) -> str:
        """Says what becomes of them, in a few words."""
        fate = _FATES[self.action]
        return fate if self.reason == fate else f"{fate}: {self.reason}"


def kind_of(name: str) -> str:
    """Returns the kind of module that a tensor is of, such as "model.layers.*.mlp.down_proj".

    The star stands for the number of the layer; further numbers, of experts, are left out.
    """
    parts = module_of(name.removesuffix(".bias")).split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            inside = [other for other in parts[place + 1 :] if not other.isdecimal()]
            return ".".join([*parts[:place], "*", *(inside or parts[:place])])
    return ".".join(parts)


def summed(rows: Iterable[TensorRow]) -> tuple[KindRow, ...]:
    """Sums up the rows of each kind of module of which the same becomes."""
    groups: defaultdict[tuple[str, str, str], list[TensorRow]] = defaultdict(list)
    for row in rows:
        groups[kind_of(row.name), row.action, row.reason].append(row)
    return tuple(total_of(members, kind=kind) for (kind, _, _), members in groups.items())


def total_of(rows: Sequence[TensorRow], *, kind: str = "") -> KindRow:
    """Sums up rows of which the same becomes, or those of a checkpoint that is there."""
    parameters = sum(row.parameters for row in rows)
    size = sum(row.bytes for row in rows)
    errors = [row.errors for row in rows if row.errors is not None]
    squared_weight = math.fsum(one.squared_weight for one in errors)
    error = None
    if squared_weight:
        error = relative_error(math.fsum(one.squared_error for one in errors), squared_weight)
    before = [row.bytes_before for row in rows if row.bytes_before is not None]
    return KindRow(
        kind=kind,
        tensors=len(rows),
        packed=sum(row.format is not None for row in rows),
        formats=tuple(sorted({row.stored for row in rows})),
        parameters=parameters,
        bytes=size,
        bits_per_parameter=bits_per_parameter(size, parameters),
        action=rows[0].action if rows else "",
        reason=rows[0].reason if rows else "",
        bytes_before=sum(before) if before else None,
        relative_error=error,
        largest_relative_error=max((one.relative_error for one in errors), default=None),
    )


@dataclass(frozen=True, kw_only=True)
class PlanTotals:
    """Sums up a plan.

    Attributes:
        packed: the number of weights in 4 bits that a quantization gives; 0 for others.
        stay: how many of them were in 4 bits already, and stay bit for bit.
        decoded: the number of weights that a dequantization decodes; 0 for others.
        copied: the number of tensors that are kept.
        shards: the number of output files.
        parameters: the number of elements of all tensors.
        bytes_before: the size of all tensors of the source.
        bytes_after: the most that the output files take. They can be a few bytes smaller for each
            weight with double quantization: the digits of its nested offset are not known before.
        compression: `bytes_before` / `bytes_after`; computed from the other fields.
        bits_per_parameter: bits per parameter of the output; computed from the other fields.
    """

    packed: int = 0
    stay: int = 0
    decoded: int = 0
    copied: int
    shards: int
    parameters: int
    bytes_before: int
    bytes_after: int
    compression: float = field(init=False)
    bits_per_parameter: float = field(init=False)

    def __post_init__(self) -> None:
        compression = self.bytes_before / max(self.bytes_after, 1)
        bits = bits_per_parameter(self.bytes_after, self.parameters)
        object.__setattr__(self, "compression", compression)
        object.__setattr__(self, "bits_per_parameter", bits)


def add_totals(parts: Sequence[PlanTotals]) -> PlanTotals:
    """Adds up the totals of several plans."""
    names = [one.name for one in fields(PlanTotals) if one.init]
    return PlanTotals(**{name: sum(getattr(part, name) for part in parts) for name in names})
