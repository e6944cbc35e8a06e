"""Gathers what verification measures of tensors, judges it, and composes the report.

Several workers look at the pieces of one tensor, in any order. What each piece adds is kept by the
place where the piece starts, and summed up in that order, so that results do not depend on who was
first.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from nf4conv.check.pairing import Comparison
from nf4conv.check.relation import Relation
from nf4conv.check.structure import Finding, Structure
from nf4conv.options import VerifyOptions
from nf4conv.plan.rows import Errors, TensorRow, bits_per_parameter, distance, summed
from nf4conv.report.inspected import tensor_row, weight_row
from nf4conv.report.results import VerifyReport
from nf4conv.report.tolerance import FOREIGN_ERROR, tolerance_of
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.tensors import TensorInfo

CHECKS: Final = {
    # found in the headers and small tensors of the checkpoint itself
    "files": "",
    "index": "",
    "components": "made",
    "quant state": "weights",
    "layout": "weights",
    "one shard": "weights",
    "code maps": "weights",
    "uniform": "weights",
    "experts": "weights",
    "config": "made",
    "skip list": "weights",
    # found in the values, most of it with the source beside the checkpoint
    "scales": "weights",
    "finite": "alone",
    "source": "source",
    "names": "source",
    "model config": "made source",
    "record": "made record",
    "copied files": "made source",
    "copies": "made source",
    "codes": "weights source",
    "bound": "weights source",
    "calibrated": "calibrated source",
    "tolerance": "weights source",
    "values": "alike",
    "exact": "weights source exact",
}
"""The words for what each check needs before it can run, which `_ran` explains. Reports list checks
in this order; docs/verify.md says what each holds a checkpoint to.
"""


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
    """

    weight: Bitsandbytes4bit
    improper: int = 0
    scales: ScaleErrors | None = None

    def row(self, options: VerifyOptions) -> TensorRow:
        """Returns the row of a report that describes the weight."""
        errors = self.errors
        if errors is not None and self.scales is not None:
            differing = errors.differing + sum(self.scales.differing.values())
            errors = replace(errors, differing=differing)
        tolerance = tolerance_of(self.weight.format, options.tolerance)
        return replace(weight_row(self.weight), tolerance=tolerance, errors=errors)

    def faults(self, options: VerifyOptions) -> Iterator[tuple[str, str]]:
        """Yields the check that each fault of the values fails, and a text for the user."""
        if self.improper:
            yield (
                "scales",
                f"{self.improper:,} scales are infinite or NaN, or negative without being searched",
            )
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
class TensorDifference(_Pieces):
    """Gathers the differences between a tensor that is not packed and that of the source.

    Attributes:
        a: the tensor of the source. With `b` it is compared as both are decoded, or cast to `b`.
        b: the tensor as it is stored.
        is_identical: True if all bytes are equal. None if the two are not stored alike, or were
            not compared yet.
    """

    a: TensorInfo
    b: TensorInfo
    is_identical: bool | None = None

    @property
    def errors(self) -> Errors:
        """The errors of the whole. Of complex numbers only bytes are compared."""
        if self.is_identical is False and not self._pieces:
            return Errors(math.inf, 0.0, math.inf, self.b.elements)
        return super().errors or Errors(0.0, 0.0, 0.0, 0)

    @property
    def text(self) -> str:
        """Says how the two differ; empty if all values are equal."""
        errors = self.errors
        if not errors.differing:
            return ""
        text = f"{errors.differing:,} of {self.b.elements:,} values are not the source's"
        if errors.squared_error:  # else only bits were compared
            text += f", relative error {errors.relative_error:.4g}"
        return f"{text}, largest difference {errors.largest:.4g}"

    def row(self) -> TensorRow:
        """Returns the row of a report that describes the tensor."""
        return replace(tensor_row(self.b), errors=self.errors)


@dataclass(frozen=True)
class Measured:
    """Everything that was measured of the values of a checkpoint.

    Attributes:
        device: the device that measured it.
        weights: what was measured of each packed weight, by its name.
        copies: what was measured of each tensor that is not packed, by its name; of all tensors if
            nothing says how the checkpoint was made. Empty without a source.
        not_finite: how many values of a tensor that is compared with nothing are NaN or infinite,
            by its name.
    """

    device: str
    weights: Mapping[str, WeightResult]
    copies: Mapping[str, TensorDifference]
    not_finite: Mapping[str, int] = field(default_factory=dict)


def verification_report(
    path: str,
    options: VerifyOptions,
    compared: Mapping[str, Comparison],
    measured: Sequence[Measured],
    around: Sequence[Finding],
    started: float,
) -> VerifyReport:
    """Composes the report of a checkpoint, whose name in `compared` is empty, or of a diffusers
    pipeline, where names of tensors and files begin with the submodel.

    Adds the faults of values to those of headers, small tensors and config, which have been noted
    before. `around` holds the faults of the files beside the submodels. `started` is
    `time.perf_counter()` when the verification began.
    """
    findings = [*around]
    weights: list[TensorRow] = []
    tensors: list[TensorRow] = []
    stored: list[Bitsandbytes4bit | TensorInfo] = []
    ran: set[str] = set()
    for (submodel, one), found in zip(compared.items(), measured, strict=True):
        structure = one.structure
        if one.relation is Relation.NONE:
            tolerance = 0.0 if options.exact else options.tolerance
            _note_differences(structure, found.copies, tolerance)
        else:
            _note_faults(structure, found, options)
        ran |= _ran(one, options)
        findings += [finding.inside(submodel) for finding in structure.findings]
        weights += [result.row(options).inside(submodel) for result in found.weights.values()]
        tensors += [copy.row().inside(submodel) for copy in found.copies.values()]
        stored += [*structure.weights.values(), *structure.plain.values()]
    order = list(CHECKS)
    findings.sort(key=lambda finding: order.index(finding.check))
    failed = {finding.check for finding in findings if finding.is_fault}
    relations = [one.relation for one in compared.values()]
    relation = relations[0]
    if weights:
        relation = Relation.QUANTIZED
    elif Relation.DECODED in relations:
        relation = Relation.DECODED
    is_judged = relation is not Relation.NONE or options.exact or options.tolerance is not None
    size = sum(one.nbytes for one in stored)
    parameters = sum(one.elements for one in stored)
    identical = None
    if options.source is not None:
        rows = weights if relation is Relation.QUANTIZED else tensors
        identical = all(row.errors is not None and not row.errors.differing for row in rows)
        identical &= not any(finding.check == "calibrated" for finding in findings)
    return VerifyReport(
        path=path,
        source=None if options.source is None else str(options.source),
        passed=is_judged and not failed,
        checks={name: name not in failed for name in order if name in ran | failed},
        findings=tuple(findings),
        made=next(iter(compared.values())).structure.record,
        weights=tuple(weights),
        kinds=summed(weights),
        tensors=tuple(tensors),
        relation=str(relation),
        bytes=size,
        parameters=parameters,
        bits_per_parameter=bits_per_parameter(size, parameters),
        identical=identical,
        options=replace(options, token=None, progress=None),
        device=measured[0].device,
        seconds=time.perf_counter() - started,
    )


def _note_differences(
    structure: Structure, found: Mapping[str, TensorDifference], tolerance: float | None
) -> None:
    """Notes every tensor that differs, the one with the largest error first."""
    for result in sorted(found.values(), key=lambda one: -distance(one.errors.relative_error)):
        if result.text:
            is_fault = tolerance is not None and not result.errors.relative_error <= tolerance
            structure.note("values", result.b.file, result.b.name, result.text, is_fault=is_fault)


def _note_faults(structure: Structure, measured: Measured, options: VerifyOptions) -> None:
    """Adds what is wrong with values to the findings."""
    foreign = _what_is_foreign(measured)
    if foreign:
        text = f"{options.source} is not what this was made from: {foreign}"
        structure.note("source", "", "", text)
        return
    for result in measured.weights.values():
        for check, text in result.faults(options):
            structure.note(check, result.weight.values.file, result.weight.values.name, text)
    for copy in measured.copies.values():
        if copy.text:
            structure.note("copies", copy.b.file, copy.b.name, copy.text)
    for name, count in measured.not_finite.items():
        if count:
            tensor = structure.tensors[name]
            text = f"{count:,} of {tensor.elements:,} values are NaN or infinite"
            structure.note("finite", tensor.file, name, text)


def _what_is_foreign(measured: Measured) -> str:
    """Returns in a few words that most values have nothing to do with the source; or nothing."""
    errors = [result.errors for result in measured.weights.values()]
    compared = [found.relative_error for found in errors if found is not None]
    far = sum(not error <= FOREIGN_ERROR for error in compared)
    if 2 * far > len(compared):
        return f"{far:,} of {len(compared):,} weights are far from those in it"
    differing = sum(copy.errors.differing for copy in measured.copies.values())
    values = sum(copy.b.elements for copy in measured.copies.values())
    if not measured.weights and 2 * differing > values:
        return f"{differing:,} of {values:,} values are others"
    return ""


def _ran(compared: Comparison, options: VerifyOptions) -> set[str]:
    """Returns the names of the checks that were made: those for which everything is there."""
    structure, relation = compared.structure, compared.relation
    weights = structure.weights.values()
    there = {
        "made": relation is not Relation.NONE,  # it says how it was made
        "weights": relation is Relation.QUANTIZED,
        "source": compared.source is not None,
        "alone": relation is Relation.DECODED and compared.source is None,
        "alike": relation is Relation.NONE,
        "record": structure.record is not None,
        "calibrated": any(weight.format.scales == "calibrated" for weight in weights),
        "exact": options.exact,
    }
    return {name for name, needs in CHECKS.items() if all(there[need] for need in needs.split())}
