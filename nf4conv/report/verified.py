"""Composes the report of a verification from what was measured."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nf4conv.check.checks import (
    CHECKS,
    OF_FILES,
    OF_WEIGHTS,
    OF_WEIGHTS_WITH_SOURCE,
    WITH_SOURCE,
)
from nf4conv.check.relation import Relation
from nf4conv.check.structure import Finding, Structure
from nf4conv.options import VerifyOptions
from nf4conv.plan.rows import TensorRow, distance
from nf4conv.report.measured import CopyResult, TensorDifference, WeightResult
from nf4conv.report.results import CheckResult, ComparedTensors, VerifyReport
from nf4conv.report.tolerance import FOREIGN_ERROR


@dataclass(frozen=True)
class Measured:
    """Everything that was measured of the values of a checkpoint.

    Attributes:
        device: the device that measured it.
        weights: what was measured of each packed weight, by its name.
        copies: what was measured of each tensor that is not packed, by its name. Empty without a
            source.
        not_finite: how many values of a tensor that is compared with nothing are NaN or infinite,
            by its name.
        alike: how far each tensor is from that of a source from which nothing says how it was made.
    """

    device: str
    weights: Mapping[str, WeightResult]
    copies: Mapping[str, CopyResult]
    not_finite: Mapping[str, int] = field(default_factory=dict)
    alike: Mapping[str, TensorDifference] = field(default_factory=dict)


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
    compared: list[ComparedTensors]
    if relation is Relation.NONE:
        _note_differences(structure, measured.alike, 0.0 if options.exact else options.tolerance)
        compared = [result.compared() for result in measured.alike.values()]
    else:
        _note_faults(structure, measured, options, source)
        _note_differences(structure, measured.alike, 0.0)
        compared = [copy.compared() for copy in measured.copies.values()]
    findings = _in_order(structure.findings)
    rows = tuple(result.row(options) for result in measured.weights.values())
    tensors = None if source is None else ComparedTensors.sum_up(compared)
    identical = None
    if relation is Relation.QUANTIZED and source is not None:
        identical = all(row.errors is not None and row.errors.differing == 0 for row in rows)
        identical &= not any(finding.check == "calibrated" for finding in findings)
    elif tensors is not None:
        identical = tensors.differing == 0
    ran = _ran(source, options, structure, relation)
    if measured.alike:
        ran.add("values")
    return VerifyReport(
        path=path,
        source=source,
        checks=_check_results(ran, findings),
        findings=findings,
        made=structure.record,
        weights=rows,
        tensors=tensors,
        relation=str(relation),
        sizes=_sizes(structure),
        parameters=_parameters(structure),
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
    source: str | None, options: VerifyOptions, structure: Structure, relation: Relation
) -> set[str]:
    """Returns the names of the checks that were made."""
    if relation is Relation.NONE:
        return {"files", "index", "source", "names", "values"}
    ran = set(OF_FILES)
    if structure.record is not None:
        ran.add("record")
    if source is not None:
        ran.update(WITH_SOURCE)
    if relation is Relation.DECODED:
        if source is None:
            ran.add("finite")
        return ran
    ran.update(OF_WEIGHTS)
    if source is not None:
        ran.update(OF_WEIGHTS_WITH_SOURCE)
        if any(weight.format.scales == "calibrated" for weight in structure.weights.values()):
            ran.add("calibrated")
        if options.exact:
            ran.add("exact")
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
            structure.note("copies", copy.tensor.file, copy.tensor.name, copy.fault)
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
    copies = measured.copies.values()
    differing = sum(copy.differing for copy in copies)
    values = sum(copy.tensor.elements for copy in copies)
    if not measured.weights and 2 * differing > values:
        return f"{differing:,} of {values:,} values are others"
    return ""


def _in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sorts findings by their checks, as CHECKS lists them."""
    order = {check: number for number, check in enumerate(CHECKS)}
    return tuple(sorted(findings, key=lambda finding: order[finding.check]))


def _check_results(ran: set[str], findings: Iterable[Finding]) -> dict[str, CheckResult]:
    """Returns the results of the checks that ran, and of any other that found a fault."""
    failed = {finding.check for finding in findings if finding.is_fault}
    results = {}
    for name, meaning in CHECKS.items():
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


def _parameters(structure: Structure) -> int:
    packed = sum(weight.elements for weight in structure.weights.values())
    return packed + sum(tensor.elements for tensor in structure.plain.values())


def join_reports(
    path: str,
    source: str | None,
    reports: Mapping[str, VerifyReport],
    around: Sequence[Finding],
    started: float,
) -> VerifyReport:
    """Joins the reports of a diffusers pipeline into one, whose names begin with the submodel.

    What was made how, and with which options, is told for the first submodel. `around` is what is
    wrong with the files beside them.
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
