"""Gathers what verification measures of tensors, judges it, and composes the report.

Several workers look at the pieces of one tensor, in any order. What each piece adds is kept by the
place where the piece starts, and summed up in that order, so that results do not depend on who was
first.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from nf4conv.check.relation import Relation
from nf4conv.check.structure import Finding, Structure
from nf4conv.options import VerifyOptions
from nf4conv.plan.rows import Errors, TensorRow, distance
from nf4conv.report.results import CheckResult, ComparedTensors, VerifyReport
from nf4conv.report.tolerance import FOREIGN_ERROR, tolerance_of
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.tensors import TensorInfo

CHECKS: Final = {
    # what is found in the headers and small tensors of the checkpoint itself
    "files": ("every weight file is a whole safetensors file, and no other lies beside them", ""),
    "index": ("the index and the headers name the same tensors in the same files", ""),
    "components": ("every packed weight has all its tensors, and none is left over", "made"),
    "quant state": ("every quant state is what bitsandbytes reads", "weights"),
    "layout": ("dtypes and shapes of the tensors of a weight agree", "weights"),
    "one shard": ("the tensors of a weight are in one file", "weights"),
    "code maps": ("the stored code values are those of the data type", "weights"),
    "uniform": ("one data type and one nesting for the whole checkpoint", "weights"),
    "experts": ("the experts of each layer are whole, and packed alike", "weights"),
    "config": ("config.json describes what is stored", "made"),
    "skip list": (
        "every loader would make those modules 4-bit that are packed, and no others",
        "weights",
    ),
    # what is found in the values, most of it with the source beside the checkpoint
    "scales": (
        "every scale is finite and, if not searched, not negative; "
        "with a source, it is that of the source",
        "weights",
    ),
    "finite": ("no value of a tensor that is compared with nothing is NaN or infinite", "alone"),
    "source": ("the source is the model that this was made from", "source"),
    "names": ("the tensors are those of the source", "source"),
    "model config": ("config.json describes the model of the source", "made source"),
    "record": ("nf4conv.json says what is stored", "made record"),
    "copied files": ("the files beside the weights are those of the source", "made source"),
    "copies": ("tensors that are not packed equal the source's", "made source"),
    "codes": ("every code is the nearest to its value in the source", "weights source"),
    "bound": ("every value is within the format's worst-case error", "weights source"),
    "calibrated": (
        "the bytes of calibrated weights are those that nf4conv.json has the SHA-256 of",
        "calibrated source",
    ),
    "tolerance": ("the relative error of every weight is within the tolerance", "weights source"),
    "values": ("no value differs from the source's by more than --tolerance allows", "alike"),
    "exact": (
        "the bytes are those that quantizing the source gives, or that calibration recorded",
        "weights source exact",
    ),
}
"""The rule of each check, and the words for what it needs before it can run, which `_ran` explains.
Reports list checks in this order.
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

    @property
    def fault(self) -> str:
        """Says how many values are not those that were to be copied; empty if all are."""
        errors = self.errors
        if errors is None or not errors.differing:
            return ""
        return f"{errors.differing:,} of {self.b.elements:,} values are not the source's"

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
    source: str | None,
    options: VerifyOptions,
    structure: Structure,
    measured: Measured,
    *,
    relation: Relation,
    started: float,
) -> VerifyReport:
    """Composes the report of one checkpoint, given the name of its source if there is one.

    `structure` has what is wrong with headers, small tensors and config; the faults of values are
    added to it. `started` is `time.perf_counter()` when the verification began.
    """
    if relation is Relation.NONE:
        _note_differences(structure, measured.copies, 0.0 if options.exact else options.tolerance)
    else:
        _note_faults(structure, measured, options, source)
    parameters = sum(weight.elements for weight in structure.weights.values())
    parameters += sum(tensor.elements for tensor in structure.plain.values())
    order = list(CHECKS)
    findings = tuple(sorted(structure.findings, key=lambda finding: order.index(finding.check)))
    rows = tuple(result.row(options) for result in measured.weights.values())
    tensors = None
    if source is not None:
        tensors = ComparedTensors.sum_up(result.compared() for result in measured.copies.values())
        if relation is not Relation.NONE:  # bits are compared, and no errors measured
            tensors = replace(tensors, largest_relative_error=None)
    identical = None
    if relation is Relation.QUANTIZED and source is not None:
        identical = all(row.errors is not None and row.errors.differing == 0 for row in rows)
        identical &= not any(finding.check == "calibrated" for finding in findings)
    elif tensors is not None:
        identical = tensors.differing == 0
    return VerifyReport(
        path=path,
        source=source,
        checks=_check_results(_ran(source, options, structure, relation), findings),
        findings=findings,
        made=structure.record,
        weights=rows,
        tensors=tensors,
        relation=str(relation),
        sizes=_sizes(structure),
        parameters=parameters,
        identical=identical,
        options=replace(options, token=None, progress=None),
        device=measured.device,
        seconds=time.perf_counter() - started,
    )


def _note_differences(
    structure: Structure, found: Mapping[str, TensorDifference], tolerance: float | None
) -> None:
    """Notes every tensor that differs, the one with the largest error first."""
    for name in sorted(found, key=lambda name: -distance(found[name].relative_error)):
        result = found[name]
        if result.text:
            is_fault = tolerance is not None and not result.relative_error <= tolerance
            structure.note("values", result.b.file, name, result.text, is_fault=is_fault)


def _ran(
    source: str | None,
    options: VerifyOptions,
    structure: Structure,
    relation: Relation,
) -> set[str]:
    """Returns the names of the checks that were made: those for which everything is there."""
    is_made = relation is not Relation.NONE
    weights = structure.weights.values()
    there = {
        "made": is_made,  # it says how it was made
        "weights": relation is Relation.QUANTIZED,
        "source": source is not None,
        "alone": relation is Relation.DECODED and source is None,
        "alike": not is_made,
        "record": structure.record is not None,
        "calibrated": any(weight.format.scales == "calibrated" for weight in weights),
        "exact": options.exact,
    }
    ran = set()
    for name, (_, needs) in CHECKS.items():
        if all(there[need] for need in needs.split()):
            ran.add(name)
    return ran


def _note_faults(
    structure: Structure, measured: Measured, options: VerifyOptions, source: str | None
) -> None:
    """Adds what is wrong with values to the findings."""
    foreign = _what_is_foreign(measured)
    if foreign:
        structure.note("source", "", "", f"{source} is not what this was made from: {foreign}")
        return
    for result in measured.weights.values():
        for check, text in result.faults(options):
            structure.note(check, result.weight.values.file, result.weight.values.name, text)
    for copy in measured.copies.values():
        if copy.fault:
            structure.note("copies", copy.b.file, copy.b.name, copy.fault)
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
    copies = [copy.compared() for copy in measured.copies.values()]
    differing = sum(copy.values_differing for copy in copies)
    values = sum(copy.values for copy in copies)
    if not measured.weights and 2 * differing > values:
        return f"{differing:,} of {values:,} values are others"
    return ""


def _check_results(ran: set[str], findings: Iterable[Finding]) -> dict[str, CheckResult]:
    """Returns the results of the checks that ran, and of any other that found a fault."""
    failed = {finding.check for finding in findings if finding.is_fault}
    results = {}
    for name, (meaning, _) in CHECKS.items():
        if name in ran or name in failed:
            results[name] = CheckResult(meaning, name not in failed)
    return results


def _sizes(structure: Structure) -> dict[str, int]:
    """Returns the bytes of a checkpoint by their use."""
    codes = 0
    scales = 0
    tables = 0
    for weight in structure.weights.values():
        codes += weight.values.nbytes
        for role, part in weight.parts:
            if role in ("absmax", "nested_absmax"):
                scales += part.nbytes
            elif role != "values":
                tables += part.nbytes
    not_packed = sum(tensor.nbytes for tensor in structure.plain.values())
    return {"codes": codes, "scales": scales, "tables": tables, "not_packed": not_packed}


def join_reports(
    path: str,
    source: str | None,
    reports: Mapping[str, VerifyReport],
    around: Sequence[Finding],
    started: float,
) -> VerifyReport:
    """Joins the reports of a diffusers pipeline into one, whose names begin with the submodel.

    The first submodel tells how all were made, and with which options. `around` holds the faults of
    the files beside the submodels.
    """
    first = next(iter(reports.values()))
    sizes = dict.fromkeys(first.sizes, 0)
    findings: list[Finding] = [*around]
    weights: list[TensorRow] = []
    for submodel, report in reports.items():
        for use, size in report.sizes.items():
            sizes[use] += size
        findings.extend(
            replace(finding, file=f"{submodel}/{finding.file}") for finding in report.findings
        )
        weights.extend(row.inside(submodel) for row in report.weights)
    tensors = [report.tensors for report in reports.values() if report.tensors is not None]
    relation = first.relation
    if weights:
        relation = "quantized"
    elif any(report.relation == "decoded" for report in reports.values()):
        relation = "decoded"
    ran = {name for report in reports.values() for name in report.checks}
    return replace(
        first,
        path=path,
        source=source,
        checks=_check_results(ran, findings),
        findings=tuple(findings),
        weights=tuple(weights),
        tensors=ComparedTensors.sum_up(tensors) if tensors else None,
        relation=relation,
        sizes=sizes,
        parameters=sum(report.parameters for report in reports.values()),
        identical=None if source is None else all(one.identical for one in reports.values()),
        seconds=time.perf_counter() - started,
    )
