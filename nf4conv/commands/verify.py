"""`nf4conv verify`: is a 4-bit checkpoint or diffusers pipeline sound, and does it hold what its
source holds?

read_structure ▸ check_config ▸ pair            headers, small tensors and config: written against the format
Pipeline(scale, weight and copy tasks)          every byte, where there is a source
report                                          every check with its findings, and a figure for every weight
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from nf4conv import __version__
from nf4conv.check.checks import CHECKS
from nf4conv.check.checksums import check_checksums
from nf4conv.check.config_check import check_config, check_exact_config
from nf4conv.check.pairing import Pairs, pair
from nf4conv.check.structure import read_structure
from nf4conv.errors import DiffusersFolderError, PlanError
from nf4conv.options import RunOptions, SourceOptions, VerifyOptions
from nf4conv.report.measured import (
    CopyResult,
    WeightResult,
    weight_faults,
    weight_kinds,
    weight_row,
)
from nf4conv.report.results import VerifyReport
from nf4conv.report.rows import CheckResult, inside
from nf4conv.report.tolerance import check_tolerance
from nf4conv.run.checkpoint import ignore
from nf4conv.run.engines import comparing_engine, prove
from nf4conv.run.loop import cores, make_pipeline
from nf4conv.sources.adapters.merging import open_merged
from nf4conv.sources.diffusers_folder import open_diffusers
from nf4conv.sources.original_names import with_original_names
from nf4conv.sources.record import MAKING, headers_digest, read_record
from nf4conv.sources.source import Source
from nf4conv.sources.stored_weights import Finding, Structure

_STRUCTURAL = (
    "files", "index", "components", "quant state", "layout", "one shard", "code maps", "uniform", "config",
    "skip list", "scales",
)  # fmt: skip
_WITH_SOURCE = ("names", "copies", "codes", "bound", "tolerance")


@dataclass(frozen=True)
class VerificationPlan:
    """A checkpoint whose headers have been looked at."""

    path: Path  # as it was given
    options: VerifyOptions  # what was asked for
    structure: Structure  # the checkpoint, with what is wrong with it so far
    config: Mapping[str, Any]  # the content of its config.json; empty if there is none
    source: Source | None  # what it was made from; None if that was not given
    pairs: Pairs  # what is to be compared; empty without a source

    @property
    def bytes_to_read(self) -> int:
        """Of scales, and with a source of everything."""
        scales = sum(
            weight.nbytes - weight.values.nbytes for weight in self.structure.weights.values()
        )
        weights = sum(weight.nbytes + job.source_bytes for weight, job in self.pairs.weights)
        return (
            scales
            + weights
            + sum(stored.nbytes + source.nbytes for stored, source in self.pairs.copies)
        )


@dataclass(frozen=True)
class DiffusersVerificationPlan:
    """A diffusers pipeline whose headers have been looked at."""

    path: Path  # as it was given
    source: str | Path | None  # what it is compared with, as it was given
    submodels: Mapping[str, VerificationPlan]  # the plan of each, by name

    @property
    def bytes_to_read(self) -> int:
        """Of all submodels."""
        return sum(plan.bytes_to_read for plan in self.submodels.values())


def verify_checkpoint(
    path: str | Path,
    source: str | Path | None = None,
    options: VerifyOptions | None = None,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    where: SourceOptions | None = None,
) -> VerifyReport:
    """Verify a 4-bit checkpoint, of ours or of another tool; a diffusers pipeline, too.

    Args:
        path: a folder or a .safetensors file.
        source: what it was made from: a folder, a file, or "org/name" on the Hugging Face Hub;
            without it only what the checkpoint says about itself is verified.
        options: what to require.
        run: how to use the machine.
        progress: told how many more bytes have been read, from any thread.
        where: revision and the like of a source on the Hub.

    Returns:
        One report; of a diffusers pipeline, names have the submodel in front.

    Raises:
        SourceError: there are no weights, or the source cannot be read. Faults of the checkpoint
            are no errors but findings of the report.
        PlanError: the request makes no sense.
    """
    return execute_verification(plan_verification(path, source, options, where), run, progress)


def plan_verification(
    path: str | Path,
    source: str | Path | None = None,
    options: VerifyOptions | None = None,
    where: SourceOptions | None = None,
) -> VerificationPlan | DiffusersVerificationPlan:
    """Look at the headers of a checkpoint, and find out what is to be compared; torch is not
    imported.

    Arguments and errors as `verify_checkpoint`.
    """
    options = options or VerifyOptions()
    try:
        return _plan_one(path, source, options, where)
    except DiffusersFolderError:
        folder = open_diffusers(path)
    origin = None if source is None else open_diffusers(source, where)
    submodels = {}
    for name in folder.submodels:
        place = None if origin is None else origin.submodels.get(name)
        if origin is not None and place is None:
            raise PlanError(f"{source}: lacks the submodel {name} of {path}")
        submodels[name] = _plan_one(
            folder.folder / name,
            None if origin is None else origin.place,
            options,
            place,
            is_submodel=True,
        )
    if not any(plan.structure.weights for plan in submodels.values()):
        raise PlanError(f"{path}: no submodel of this diffusers pipeline has a weight in 4 bits")
    return DiffusersVerificationPlan(Path(path), source, submodels)


def execute_verification(
    plan: VerificationPlan | DiffusersVerificationPlan,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Carry out a plan; arguments, result and errors as `verify_checkpoint`."""
    started = time.perf_counter()
    run, progress = run or RunOptions(), progress or ignore
    if isinstance(plan, VerificationPlan):
        return _verify_one(plan, run, progress)
    reports = {name: _verify_one(part, run, progress) for name, part in plan.submodels.items()}
    first = next(iter(reports.values()))
    checks: dict[str, CheckResult] = {}
    for report in reports.values():
        for check, found in report.checks.items():
            checks[check] = replace(found, passed=found.passed and checks.get(check, found).passed)
    sizes = {key: sum(report.sizes[key] for report in reports.values()) for key in first.sizes}
    parameters = sum(report.parameters for report in reports.values())
    return replace(
        first,
        path=str(plan.path),
        source=None if plan.source is None else str(plan.source),
        passed=all(report.passed for report in reports.values()),
        checks=checks,
        findings=tuple(
            replace(finding, file=f"{name}/{finding.file}")
            for name, report in reports.items()
            for finding in report.findings
        ),
        weights=tuple(
            inside(name, row) for name, report in reports.items() for row in report.weights
        ),
        kinds=tuple(inside(name, row) for name, report in reports.items() for row in report.kinds),
        sizes=sizes,
        parameters=parameters,
        bits_per_parameter=8 * sum(sizes.values()) / max(parameters, 1),
        identical=None
        if plan.source is None
        else all(report.identical for report in reports.values()),
        seconds=time.perf_counter() - started,
    )


def _plan_one(
    path: str | Path,
    source: str | Path | None,
    options: VerifyOptions,
    where: SourceOptions | None,
    *,
    is_submodel: bool = False,
) -> VerificationPlan:
    """As `plan_verification` for one checkpoint; a diffusers pipeline is a DiffusersFolderError."""
    check_tolerance(options.tolerance)
    if source is None and (options.exact or options.lora or options.tolerance is not None):
        raise PlanError("--exact, --lora and --tolerance compare with the source: give --source")
    structure = read_structure(Path(path))
    config = check_config(structure) if structure.weights or not is_submodel else {}
    if not structure.weights and not structure.findings and not is_submodel:
        structure.note("components", "", "", f"{path}: nothing in it is in 4 bits")
    opened = None if source is None else open_merged(source, where, options.lora)
    if opened is not None and Path(path).is_file():
        opened = with_original_names(opened, among=structure.weights)
    pairs = Pairs() if opened is None else pair(structure, opened)
    if options.exact:
        check_exact_config(structure, config)
    made = None if opened is None else read_record(structure.folder)
    if (
        made is not None
        and opened is not None
        and made["source"].get("headers_sha256") != headers_digest(opened)
    ):
        text = f"it was made from {made['source'].get('id')}, whose tensors are not those of the source given"
        structure.note("names", MAKING, "", text, is_fault=False)
    return VerificationPlan(Path(path), options, structure, config, opened, pairs)


def _verify_one(
    plan: VerificationPlan, run: RunOptions, progress: Callable[[int], None]
) -> VerifyReport:
    """Carry out the plan of one checkpoint."""
    started = time.perf_counter()
    device, proved, same = prove(plan.pairs, run, progress)
    results = {
        name: proved.get(name) or WeightResult(weight)
        for name, weight in plan.structure.weights.items()
    }
    copies = {stored.name: CopyResult(stored) for stored, _ in plan.pairs.copies}
    left = {name: result for name, result in results.items() if name not in proved}
    if left or not copies.keys() <= same or not device:
        from nf4conv.run.with_torch import check  # importing torch takes seconds

        pipeline = make_pipeline(comparing_engine(run), run, progress)
        device, weights = (
            pipeline.engine.device,
            [pair for pair in plan.pairs.weights if pair[0].name in left],
        )
        unlike = Pairs(copies=[pair for pair in plan.pairs.copies if pair[0].name not in same])
        pipeline.run(
            chain(
                check.scale_tasks(left, pipeline.piece),
                *(
                    check.tasks_of_weight(left[weight.name], job, pipeline.piece)
                    for weight, job in weights
                ),
                check.copy_tasks(unlike, copies, pipeline.piece),
            )
        )
    with_checksums = check_checksums(plan.structure, run.workers or cores())
    for result in results.values():
        for violated, text in weight_faults(result, plan.options):
            plan.structure.note(violated, result.weight.values.file, result.weight.name, text)
    for copy in copies.values():
        if copy.differing:
            text = f"{copy.differing:,} of {copy.tensor.elements:,} values are not the source's"
            plan.structure.note("copies", copy.tensor.file, copy.tensor.name, text)
    structure = plan.structure
    findings = tuple(
        sorted(structure.findings, key=lambda finding: list(CHECKS).index(finding.check))
    )
    rows = tuple(weight_row(result, plan.options) for result in results.values())
    sizes = _sizes(structure)
    parameters = sum(weight.elements for weight in structure.weights.values())
    parameters += sum(tensor.elements for tensor in structure.plain.values())
    identical = (
        None
        if plan.source is None
        else all(result.bytes_differing == 0 for result in results.values())
    )
    return VerifyReport(
        path=str(plan.path),
        source=None if plan.source is None else str(plan.source.folder),
        passed=not any(finding.is_fault for finding in findings),
        checks=_checks(plan, findings, with_checksums),
        findings=findings,
        made=read_record(structure.folder),
        weights=rows,
        kinds=tuple(weight_kinds(rows)),
        sizes=sizes,
        parameters=parameters,
        bits_per_parameter=8 * sum(sizes.values()) / max(parameters, 1),
        identical=identical,
        settings={
            "tolerance": plan.options.tolerance
            if plan.options.tolerance is not None
            else "default",
            "exact": plan.options.exact,
            "scales": structure.scales,
            "device": device,
            "nf4conv": __version__,
            "torch": version("torch"),
        },
        seconds=time.perf_counter() - started,
    )


def _checks(
    plan: VerificationPlan, findings: tuple[Finding, ...], with_checksums: bool
) -> dict[str, CheckResult]:
    ran = {*_STRUCTURAL}
    if with_checksums:
        ran.add("checksums")
    if plan.source is not None:
        ran.update(_WITH_SOURCE)
    if plan.options.exact:
        ran.add("exact")
    failed = {finding.check for finding in findings if finding.is_fault}
    return {
        name: CheckResult(meaning, name not in failed)
        for name, meaning in CHECKS.items()
        if name in ran or name in failed
    }


def _sizes(structure: Structure) -> dict[str, int]:
    sizes = {"codes": 0, "scales": 0, "tables": 0, "not_packed": 0}
    for weight in structure.weights.values():
        sizes["codes"] += weight.values.nbytes
        for suffix, part in weight.components.items():
            sizes["scales" if suffix in ("absmax", "nested_absmax") else "tables"] += part.nbytes
    sizes["not_packed"] = sum(tensor.nbytes for tensor in structure.plain.values())
    return sizes
