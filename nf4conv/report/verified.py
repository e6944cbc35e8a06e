"""Composes the report of a verification from what was measured."""

import math
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
from nf4conv.plan.rows import TensorRow, distance, summed
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
    """Composes the report of one checkpoint.

    Args:
        path: the checkpoint, as it was given.
        source: the folder of the source. None if it was compared with nothing.
        options: what was asked for.
        structure: the checkpoint, with what is wrong with its headers, small tensors and config.
            The faults of its values are added to its findings.
        measured: what was measured of its values.
        relation: how it says that it was made.
        started: `time.perf_counter()` when the verification began.
    """
    tensors: ComparedTensors | None
    if relation is Relation.NONE:
        _note_differences(structure, measured.alike, 0.0 if options.exact else options.tolerance)
        tensors = _sum_of_differences(measured.alike.values())
    else:
        _note_faults(structure, measured, options, source)
        _note_differences(structure, measured.alike, 0.0)
        tensors = None if source is None else _tensors(measured.copies.values())
    findings = _in_order(structure.findings)
    rows = tuple(result.row(options) for result in measured.weights.values())
    sizes = _sizes(structure)
    parameters = _parameters(structure)
    identical = None
    if relation is Relation.QUANTIZED and source is not None:
        identical = all(row.errors is not None and row.errors.differing == 0 for row in rows)
        identical &= not any(finding.check == "calibrated" for finding in findings)
    elif tensors is not None:
        identical = tensors.differing == 0
    is_judged = relation is not Relation.NONE or options.exact or options.tolerance is not None
    passed = is_judged and not any(finding.is_fault for finding in findings)
    ran = _ran(source, options, structure, relation)
    if measured.alike:
        ran.add("values")
    checks = _check_results(ran, findings)
    return VerifyReport(
        path=path,
        source=source,
        passed=passed,
        checks=checks,
        findings=findings,
        made=structure.record,
        weights=rows,
        kinds=summed(rows),
        tensors=tensors,
        relation=str(relation),
        sizes=sizes,
        parameters=parameters,
        bits_per_parameter=_bits_per_parameter(sizes, parameters),
        identical=identical,
        options=replace(options, token=None, progress=None),
        device=measured.device,
        seconds=time.perf_counter() - started,
    )


def _tensors(copies: Iterable[CopyResult]) -> ComparedTensors:
    """Sums up what was measured of tensors that are not packed."""
    total = ComparedTensors(0, 0, 0, 0, 0.0)
    for copy in copies:
        total += ComparedTensors(
            compared=1,
            differing=1 if copy.differing else 0,
            values=copy.tensor.elements,
            values_differing=copy.differing,
            largest_difference=copy.largest_difference,
        )
    return total


def _sum_of_differences(found: Iterable[TensorDifference]) -> ComparedTensors:
    """Sums up how far tensors are from those of a source from which they may not have been made."""
    total = ComparedTensors(0, 0, 0, 0, 0.0, 0.0)
    for result in found:
        errors = result.errors
        one = ComparedTensors(1, 0, result.a.elements, 0, 0.0, 0.0)
        if errors is not None and errors.differing:
            one = replace(
                one,
                differing=1,
                values_differing=errors.differing,
                largest_difference=errors.largest,
                largest_relative_error=errors.relative_error,
            )
        elif errors is None and result.is_identical is False:  # complex numbers
            one = replace(one, differing=1, largest_relative_error=math.inf)
        total += one
    return total


def _note_differences(
    structure: Structure, found: Mapping[str, TensorDifference], tolerance: float | None
) -> None:
    """Notes every tensor that differs, the one with the largest error first."""
    differences = {}
    for name, result in found.items():
        errors = result.errors
        if errors is not None and errors.differing:
            error = errors.relative_error
            text = (
                f"{errors.differing:,} of {result.a.elements:,} values differ, relative error "
                f"{error:.4g}, largest difference {errors.largest:.4g}"
            )
            differences[name] = (error, text)
        elif errors is None and result.is_identical is False:
            differences[name] = (math.inf, "the bytes differ")
    for name in sorted(differences, key=lambda name: -distance(differences[name][0])):
        error, text = differences[name]
        is_fault = tolerance is not None and not error <= tolerance
        structure.note("values", found[name].b.file, name, text, is_fault=is_fault)


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
        if copy.differing:
            text = f"{copy.differing:,} of {copy.tensor.elements:,} values are not the source's"
            structure.note("copies", copy.tensor.file, copy.tensor.name, text)
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


def _bits_per_parameter(sizes: Mapping[str, int], parameters: int) -> float:
    return 8 * sum(sizes.values()) / max(parameters, 1)


def _join_checks(
    reports: Iterable[VerifyReport], around: Iterable[Finding]
) -> dict[str, CheckResult]:
    """Joins the checks of all submodels and of the files beside them; one fault fails a check."""
    checks: dict[str, CheckResult] = {}
    for report in reports:
        for name, check in report.checks.items():
            passed = check.passed and (name not in checks or checks[name].passed)
            checks[name] = CheckResult(check.meaning, passed)
    for finding in around:
        if finding.is_fault:
            checks[finding.check] = CheckResult(CHECKS[finding.check], False)
    return checks


def join_reports(
    path: str,
    source: str | None,
    reports: Mapping[str, VerifyReport],
    around: Sequence[Finding],
    started: float,
) -> VerifyReport:
    """Joins the reports of a diffusers pipeline.

    Args:
        path: the pipeline, as it was given.
        source: the pipeline that it was compared with, as it was given. None if there was none.
        reports: the report of each submodel, by its name. There is at least one.
        around: what is wrong with the files beside the submodels.
        started: `time.perf_counter()` when the verification began.

    Returns:
        One report, whose names begin with the submodel and a slash. What was made how, and with
        which options, is told for the first submodel.
    """
    first = next(iter(reports.values()))
    sizes = dict.fromkeys(first.sizes, 0)
    findings: list[Finding] = [*around]
    weights: list[TensorRow] = []
    parameters = 0
    tensors: ComparedTensors | None = None
    for submodel, report in reports.items():
        for use, size in report.sizes.items():
            sizes[use] += size
        findings.extend(
            replace(finding, file=f"{submodel}/{finding.file}") for finding in report.findings
        )
        weights.extend(row.inside(submodel) for row in report.weights)
        parameters += report.parameters
        if report.tensors is not None:
            tensors = report.tensors if tensors is None else tensors + report.tensors
    checks = _join_checks(reports.values(), around)
    identical = None
    if source is not None:
        identical = all(report.identical for report in reports.values())
    relations = [report.relation for report in reports.values()]
    has_weights = any(report.weights for report in reports.values())
    relation = first.relation
    if has_weights or "decoded" in relations:
        relation = "quantized" if has_weights else "decoded"
    return replace(
        first,
        path=path,
        source=source,
        passed=all(check.passed for check in checks.values()) and first.is_judged,
        checks=checks,
        findings=tuple(findings),
        weights=tuple(weights),
        kinds=summed(weights),
        tensors=tensors,
        relation=relation,
        sizes=sizes,
        parameters=parameters,
        bits_per_parameter=_bits_per_parameter(sizes, parameters),
        identical=identical,
        seconds=time.perf_counter() - started,
    )
