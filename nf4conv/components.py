"""Every command on a pipeline of diffusers: its components one after the other, and one result of all.

    OUT/.nf4conv            the lock and fingerprint of the whole, and which components are finished
    OUT/<component>         a workspace of its own, see checkpoint/workspace.py
    OUT/model_index.json    last of all: without it diffusers does not take the folder for a pipeline

What is no pipeline goes to the command's own functions as it is.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from nf4conv import __version__
from nf4conv.checkpoint.components import PipelineFolder, is_packed_by_default, open_pipeline
from nf4conv.checkpoint.header import TensorInfo
from nf4conv.checkpoint.source import open_source, read_json
from nf4conv.checkpoint.workspace import CHECKSUMS, WORK_FOLDER, Workspace
from nf4conv.compare import ComparisonPlan, check_options, make_plan, pair_tensors, plan_comparison
from nf4conv.dequantize import (
    DequantizationPlan,
    DequantizeReport,
    execute_dequantization,
    plan_dequantization,
    plan_dequantized_component,
)
from nf4conv.errors import NoPipelineError, PipelineError, PlanError
from nf4conv.inspect import Inspection, inspect_checkpoint
from nf4conv.options import (
    CompareOptions,
    DequantizeOptions,
    PushOptions,
    QuantizeOptions,
    RunOptions,
    SourceOptions,
    VerifyOptions,
)
from nf4conv.output import check_apart, ignore, source_stamps, space_needed
from nf4conv.quantize import (
    QuantizationPlan,
    QuantizeReport,
    execute_component,
    execute_plan,
    open_push,
    plan_component,
    plan_quantization,
    prepared,
    pushed,
)
from nf4conv.results import summarize
from nf4conv.verify import (
    VerificationPlan,
    VerifyReport,
    execute_verification,
    plan_verification,
)

if TYPE_CHECKING:
    from nf4conv.push import Push

PlanT = TypeVar("PlanT", QuantizationPlan, DequantizationPlan)
ReportT = TypeVar("ReportT", QuantizeReport, DequantizeReport)
OptionsT = TypeVar("OptionsT", QuantizeOptions, DequantizeOptions, CompareOptions)

_ADDED: Final = frozenset(("packed", "decoded", "copied", "shards", "parameters", "bytes_in", "bytes_out"))


@dataclass(frozen=True)
class PipelinePlan(Generic[PlanT]):
    """What becomes of a pipeline.

    Attributes:
        folder: the pipeline.
        components: the plan of each component that has weights, by name.
    """

    folder: PipelineFolder
    components: Mapping[str, PlanT]

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all components, names and files with the component in front."""
        return [
            row | {"name": f"{name}/{row['name']}", "file": f"{name}/{row['file']}"}
            for name, plan in self.components.items()
            for row in plan.rows()
        ]

    def totals(self) -> dict[str, Any]:
        """What the rows add up to."""
        parts = [plan.totals() for plan in self.components.values()]
        added = {key: sum(part[key] for part in parts) for key in parts[0] if key in _ADDED}
        if "parameters" in added:
            added["compression"] = added["bytes_in"] / added["bytes_out"]
            added["bits_per_parameter"] = 8 * added["bytes_out"] / max(added["parameters"], 1)
        return added

    @property
    def config(self) -> dict[str, Any]:
        """The config of each component."""
        return {name: plan.config for name, plan in self.components.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of all components."""
        return tuple(f"{name}: {note}" for name, plan in self.components.items() for note in plan.notes)


def plan_quantizing(
    source: str | Path, options: QuantizeOptions | None = None, where: SourceOptions | None = None
) -> "QuantizationPlan | PipelinePlan[QuantizationPlan]":
    """As `plan_quantization`, of a pipeline too.

    Globs and module names may begin with that of a component and a slash: "transformer/*.attn.*"; others apply to all.
    """
    try:
        return plan_quantization(source, options, where)
    except PipelineError:
        folder = open_pipeline(source, where)
    options = options or QuantizeOptions()
    components = {
        name: plan_component(
            folder.place,
            replace(_for_component(name, options), skip_modules=_applying(options.skip_modules, name)),
            place,
            pack=is_packed_by_default(name) and _is_included(name, options),
        )
        for name, place in folder.components.items()
    }
    plan = PipelinePlan(folder, components)
    _check_anything_packed(plan, source)
    return plan


def _check_anything_packed(plan: PipelinePlan[QuantizationPlan], source: str | Path) -> None:
    if not plan.totals()["packed"]:
        raise PlanError(f"{source}: no tensor of this pipeline would be packed; --dry-run shows why each is kept")


def plan_dequantizing(
    source: str | Path, options: DequantizeOptions | None = None, where: SourceOptions | None = None
) -> "DequantizationPlan | PipelinePlan[DequantizationPlan]":
    """As `plan_dequantization`, of a pipeline too; globs as for `plan_quantizing`."""
    try:
        return plan_dequantization(source, options, where)
    except PipelineError:
        folder = open_pipeline(source, where)
    options = options or DequantizeOptions()
    components = {
        name: plan_dequantized_component(
            folder.place, _for_component(name, options), place, decode=_is_included(name, options)
        )
        for name, place in folder.components.items()
    }
    plan = PipelinePlan(folder, components)
    if not plan.totals()["decoded"]:
        raise PlanError(f"{source}: no component of this pipeline has a weight in bitsandbytes' 4 bits to decode")
    return plan


def _for_component(name: str, options: OptionsT) -> OptionsT:
    return replace(options, include=_applying(options.include, name), exclude=_applying(options.exclude, name))


def _applying(patterns: tuple[str, ...], component: str) -> tuple[str, ...]:
    """The patterns that concern a component, without its name; tensors and modules have no slash in theirs."""
    split = (pattern.rpartition("/") for pattern in patterns)
    return tuple(rest for owner, _, rest in split if not owner or fnmatchcase(component, owner))


def _is_included(component: str, options: QuantizeOptions | DequantizeOptions | CompareOptions) -> bool:
    return not options.include or bool(_applying(options.include, component))


def execute_quantizing(
    plan: QuantizationPlan | PipelinePlan[QuantizationPlan],
    out: str | Path,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    push: PushOptions | None = None,
) -> QuantizeReport:
    """As `execute_plan`, of a pipeline too."""
    if isinstance(plan, QuantizationPlan):
        return execute_plan(plan, out, run, progress, push)
    started = time.perf_counter()
    run = run or RunOptions()
    check_apart(plan.folder.folder, Path(out))
    plan = replace(plan, components={name: prepared(part, run) for name, part in plan.components.items()})
    _check_anything_packed(plan, plan.folder.place)
    with open_push(push, run) as repository:

        def execute(
            part: QuantizationPlan, folder: Path, run: RunOptions, progress: Callable[[int], None]
        ) -> QuantizeReport:
            offer = None if repository is None else partial(_offer, repository, folder.name)
            return execute_component(part, folder, run, progress, offer)

        report: QuantizeReport = _execute(plan, Path(out), run, progress or ignore, execute, partial(_card, plan))
        if repository is None:
            return report
        return pushed(report, repository, next(iter(plan.components.values())).plan.format, started)


def _offer(repository: "Push", component: str, name: str, path: Path) -> None:
    repository.offer(f"{component}/{name}", path)


def _card(plan: PipelinePlan[QuantizationPlan], report: QuantizeReport) -> str:
    from nf4conv.card import Figures, pipeline_card  # importing a reader of YAML takes a moment

    class_name = read_json(plan.folder.index).get("_class_name")
    figures = {
        name: Figures(part.totals()["bytes_in"], _bytes_on_disk(Path(report.out), name, part))
        for name, part in plan.components.items()
    }
    return pipeline_card(
        plan.folder.folder,
        class_name if isinstance(class_name, str) and class_name.isidentifier() else "DiffusionPipeline",
        {name: (part.source, part.plan) for name, part in plan.components.items()},
        figures,
        report.verification,
    )


def execute_dequantizing(
    plan: DequantizationPlan | PipelinePlan[DequantizationPlan],
    out: str | Path,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> DequantizeReport:
    """As `execute_dequantization`, of a pipeline too."""
    if isinstance(plan, DequantizationPlan):
        return execute_dequantization(plan, out, run, progress)
    check_apart(plan.folder.folder, Path(out))
    return _execute(plan, Path(out), run or RunOptions(), progress or ignore, execute_dequantization, lambda _: None)


def _execute(
    plan: PipelinePlan[PlanT],
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    execute: Callable[[PlanT, Path, RunOptions, Callable[[int], None]], ReportT],
    card: Callable[[ReportT], str | None],
) -> ReportT:
    started = time.perf_counter()
    reports: list[ReportT] = []
    kept, last = 0, list(plan.components)[-1]
    with Workspace(out, _fingerprint(plan, run), overwrite=run.overwrite, checksum=False) as workspace:
        if run.verify:
            workspace.forget()  # components of an earlier run, which nobody may have looked at
        (out / plan.folder.index.name).unlink(missing_ok=True)  # of a run that ended between its last two steps
        finished = {name for name, part in plan.components.items() if _is_finished(workspace, name, part, run)}
        missing = [(name, part) for name, part in plan.components.items() if name not in finished]
        workspace.check_space(sum(_space_needed(out / name, part) for name, part in missing))
        for name, part in plan.components.items():
            marker = _marker(name, part)
            if name in finished:
                kept += len(part.plan.shards)
                progress(part.totals()["bytes_in"])
                continue
            # without its work folder a component was finished, but not yet noted as such
            again = not (out / name / WORK_FOLDER).is_dir()
            reports.append(execute(part, out / name, replace(run, overwrite=again), progress))
            if name != last:  # which is never skipped, so that a run has something to report
                workspace.record(marker, (out / marker).stat().st_size)
        for file in plan.folder.files:
            workspace.copy(str(file), plan.folder.folder / file)
        report = _joined(plan, out, reports, kept, time.perf_counter() - started)
        readme = card(report)
        if readme is not None:
            workspace.write("README.md", readme.encode())
        workspace.complete({plan.folder.index.name: plan.folder.index.read_bytes()})
    return report


def _marker(name: str, plan: QuantizationPlan | DequantizationPlan) -> str:
    """The file by which a finished component is noted."""
    return f"{name}/{plan.plan.shards[0].name}"


def _is_finished(workspace: Workspace, name: str, plan: QuantizationPlan | DequantizationPlan, run: RunOptions) -> bool:
    has_checksums = (workspace.out / name / CHECKSUMS).is_file()
    return _marker(name, plan) in workspace.finished and has_checksums == run.checksum


def _space_needed(folder: Path, plan: QuantizationPlan | DequantizationPlan) -> int:
    """What a component takes beyond what lies in its folder, which is deleted or kept as a part of it."""
    present = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    return max(space_needed(plan, ()) - present, 0)


def _fingerprint(plan: PipelinePlan[Any], run: RunOptions) -> dict[str, Any]:
    """Each component has its own, which says all; this one is for those that are finished, whose own is gone."""
    return {
        "command": type(next(iter(plan.components.values()))).__name__,
        "version": __version__,
        "--device": run.device,
        "components": {
            name: {"source files": source_stamps(part.source), "config": part.config, "options": asdict(part.options)}
            for name, part in plan.components.items()
        },
    }


def _joined(plan: PipelinePlan[Any], out: Path, reports: list[ReportT], kept: int, seconds: float) -> ReportT:
    """One report of all components; what an earlier run finished is counted, but took no time."""
    first, totals = reports[0], plan.totals()
    after = sum(_bytes_on_disk(out, name, part) for name, part in plan.components.items())
    figures: dict[str, Any] = {
        "out": str(out),
        **{key: totals[key] for key in ("packed", "decoded", "copied", "parameters") if key in totals},
        "bytes_before": totals["bytes_in"],
        "bytes_after": after,
        "seconds": seconds,
        "pipeline_seconds": sum(report.pipeline_seconds for report in reports),
        "seconds_by_activity": _added([report.seconds_by_activity for report in reports]),
        "host_peak_bytes": max(report.host_peak_bytes for report in reports),
        "device_peak_bytes": max(report.device_peak_bytes for report in reports),
        "shards_resumed": kept + sum(report.shards_resumed for report in reports),
        "notes": plan.notes,
    }
    if "parameters" in totals:
        figures["bits_per_parameter"] = 8 * after / max(totals["parameters"], 1)
        figures["verification"] = _verification(plan, reports)
    return replace(first, **figures)


def _bytes_on_disk(out: Path, component: str, plan: QuantizationPlan | DequantizationPlan) -> int:
    return sum((out / component / shard.name).stat().st_size for shard in plan.plan.shards)


def _verification(plan: PipelinePlan[Any], reports: Sequence[Any]) -> dict[str, Any] | None:
    """An audit's summary of all components; without verification none has one, and with it none is skipped."""
    found = [report.verification for report in reports]
    if None in found:
        return None
    rows = [
        _named(name, row, "name", "file")
        for name, summary in zip(plan.components, found, strict=True)
        for row in summary["rows"]
    ]
    return summarize(rows, sum(summary["copies"] for summary in found))


def _added(parts: list[Mapping[str, float]]) -> dict[str, float]:
    return {key: math.fsum(part.get(key, 0.0) for part in parts) for key in parts[0]}


@dataclass(frozen=True)
class PipelineVerification:
    """A pipeline whose headers have been looked at.

    Attributes:
        path: as it was given.
        source: what it is compared with, as it was given.
        components: the plan of each component that has weights, by name.
    """

    path: Path
    source: str | Path | None
    components: Mapping[str, VerificationPlan]

    @property
    def bytes_to_read(self) -> int:
        """Of all components."""
        return sum(plan.bytes_to_read for plan in self.components.values())


def plan_verifying(
    path: str | Path,
    source: str | Path | None = None,
    options: VerifyOptions | None = None,
    where: SourceOptions | None = None,
) -> VerificationPlan | PipelineVerification:
    """As `plan_verification`, of a pipeline too, which is compared with a pipeline."""
    try:
        return plan_verification(path, source, options, where)
    except PipelineError:
        folder = open_pipeline(path)
    origin = None if source is None else open_pipeline(source, where)
    components = {}
    for name in folder.components:
        place = None if origin is None else origin.components.get(name)
        if origin is not None and place is None:
            raise PlanError(f"{source}: lacks the component {name} of {path}")
        components[name] = plan_verification(
            folder.folder / name, None if origin is None else origin.place, options, place, is_component=True
        )
    if not any(plan.structure.weights for plan in components.values()):
        raise PlanError(f"{path}: no component of this pipeline has a weight in 4 bits")
    return PipelineVerification(Path(path), source, components)


def execute_verifying(
    plan: VerificationPlan | PipelineVerification,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """As `execute_verification`; of a pipeline it is one report, in which the component stands before each name."""
    if isinstance(plan, VerificationPlan):
        return execute_verification(plan, run, progress)
    started = time.perf_counter()
    reports = {name: execute_verification(part, run, progress) for name, part in plan.components.items()}
    checks: dict[str, Mapping[str, Any]] = {}
    for report in reports.values():
        for check, found in report.checks.items():
            checks[check] = {**found, "passed": found["passed"] and checks.get(check, found)["passed"]}
    sizes = {key: sum(report.sizes[key] for report in reports.values()) for key in next(iter(reports.values())).sizes}
    parameters = sum(report.parameters for report in reports.values())
    return replace(
        next(iter(reports.values())),
        path=str(plan.path),
        source=None if plan.source is None else str(plan.source),
        passed=all(report.passed for report in reports.values()),
        checks=checks,
        findings=tuple(
            replace(finding, file=f"{name}/{finding.file}")
            for name, report in reports.items()
            for finding in report.findings
        ),
        weights=tuple(_named(name, row, "name", "file") for name, part in reports.items() for row in part.weights),
        kinds=tuple(_named(name, row, "kind") for name, part in reports.items() for row in part.kinds),
        sizes=sizes,
        parameters=parameters,
        bits_per_parameter=8 * sum(sizes.values()) / max(parameters, 1),
        identical=None if plan.source is None else all(report.identical for report in reports.values()),
        seconds=time.perf_counter() - started,
    )


def _named(component: str, row: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """A row with the component before what is named by these keys, and before the stack of layers if there is one."""
    stack = {"stack": f"{component}/{row['stack']}"} if row.get("stack") else {}
    return {**row, **{key: f"{component}/{row[key]}" for key in keys if key != "kind" or not stack}, **stack}


def plan_comparing(
    a: str | Path, b: str | Path, options: CompareOptions | None = None, where: SourceOptions | None = None
) -> ComparisonPlan:
    """As `plan_comparison`, of two pipelines too; the component and a slash stand before each name.

    Raises:
        SourceError: one of them cannot be read.
        PlanError: the request makes no sense, or only one of them is a pipeline.
    """
    options = options or CompareOptions()
    check_options(options)
    try:
        return plan_comparison(a, b, options, where)
    except PipelineError:
        sides = tuple(_open_to_compare(side, where) for side in (a, b))
    tensors: dict[str, tuple[TensorInfo | None, TensorInfo | None]] = {}
    for name in dict.fromkeys((*sides[0].components, *sides[1].components)):
        if not _is_included(name, options):
            continue
        first, second = (
            open_source(side.place, side.components[name]) if name in side.components else None for side in sides
        )
        pairs = pair_tensors(first, second, _for_component(name, options))
        tensors |= {f"{name}/{tensor}": pair for tensor, pair in pairs.items()}
    return make_plan(str(a), str(b), options, tensors)


def _open_to_compare(side: str | Path, where: SourceOptions | None) -> PipelineFolder:
    try:
        return open_pipeline(side, where)
    except NoPipelineError as error:
        raise PlanError(f"a pipeline can only be compared with a pipeline: {error}") from error


def inspect_any(path: str | Path, where: SourceOptions | None = None) -> Inspection:
    """As `inspect_checkpoint`; of a pipeline it is one result, in which the component stands before each name."""
    try:
        return inspect_checkpoint(path, where)
    except PipelineError:
        folder = open_pipeline(path, where)
    parts = {name: inspect_checkpoint(folder.place, place) for name, place in folder.components.items()}
    totals = {
        key: sum(part.totals[key] for part in parts.values()) for key in ("tensors", "packed", "parameters", "bytes")
    }
    return Inspection(
        path=str(path),
        files=tuple(f"{name}/{file}" for name, part in parts.items() for file in part.files),
        config=next((part.config for part in parts.values() if part.config is not None), None),
        model_type=None,
        tensors=tuple(_named(name, row, "name", "file") for name, part in parts.items() for row in part.tensors),
        kinds=tuple(_named(name, row, "kind") for name, part in parts.items() for row in part.kinds),
        totals={**totals, "bits_per_parameter": 8 * totals["bytes"] / max(totals["parameters"], 1)},
    )
