"""A diffusers pipeline: its submodels one after the other, and one result of all.

OUT/.nf4conv            the lock and fingerprint of the whole, and which submodels are finished
OUT/<submodel>          a workspace of its own, see output/workspace.py
OUT/model_index.json    last of all: without it diffusers does not take the folder for a pipeline
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Generic, TypeVar

from nf4conv import __version__
from nf4conv.commands.output import WritingPlan, space_needed
from nf4conv.options import CompareOptions, DequantizeOptions, QuantizeOptions, RunOptions
from nf4conv.output.workspace import CHECKSUMS, Workspace, tidy
from nf4conv.report.loading import Loading, advice, diffusers_loading, gpu_bytes
from nf4conv.report.results import DequantizeReport, QuantizeReport
from nf4conv.report.rows import PlanRow, VerificationSummary, add_totals, inside
from nf4conv.sources.diffusers_folder import DiffusersFolder
from nf4conv.sources.record import read_record
from nf4conv.sources.source import read_json, source_changes, source_stamps
from nf4conv.sources.unfinished import is_unfinished

PlanT = TypeVar("PlanT", bound=WritingPlan)
ReportT = TypeVar("ReportT", QuantizeReport, DequantizeReport)
OptionsT = TypeVar("OptionsT", QuantizeOptions, DequantizeOptions, CompareOptions)


@dataclass(frozen=True)
class DiffusersPlan(Generic[PlanT]):
    """What becomes of a diffusers pipeline."""

    folder: DiffusersFolder  # the pipeline
    submodels: Mapping[str, PlanT]  # the plan of each, by name
    front: Mapping[str, Any] = field(default_factory=dict)  # what its card says at its top
    complaints: tuple[str, ...] = ()  # what the user should know of what belongs to no submodel

    def rows(self) -> list[PlanRow]:
        """The rows of all submodels, names and files with the submodel in front."""
        return [inside(name, row) for name, plan in self.submodels.items() for row in plan.rows()]

    def totals(self) -> Any:
        """What the rows add up to, as the totals of a submodel."""
        plans: Iterable[Any] = self.submodels.values()
        return add_totals([plan.totals() for plan in plans])

    @property
    def config(self) -> dict[str, Any]:
        """The config of each submodel."""
        return {name: plan.config for name, plan in self.submodels.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of all submodels, and of the whole."""
        strays: list[str] = [
            name for name in self.folder.strays if name.partition("/")[0] not in self.submodels
        ]
        return (
            *(f"{name}: {note}" for name, plan in self.submodels.items() for note in plan.notes),
            *(
                f"{name}: a link that leads out of {self.folder.folder}; it is not copied"
                for name in strays
            ),
            *self.complaints,
        )

    @property
    def class_name(self) -> str:
        """Of the diffusers pipeline."""
        found = read_json(self.folder.index).get("_class_name")
        return found if isinstance(found, str) and found.isidentifier() else "DiffusionPipeline"

    @property
    def loading(self) -> Loading:
        """How the result is loaded."""
        dtypes = (
            plan.output.format.dtype for plan in self.submodels.values() if plan.changes_weights()
        )
        return diffusers_loading(self.class_name, next(dtypes, "bfloat16"))


def for_submodel(name: str, options: OptionsT) -> OptionsT:
    """The options that concern a submodel: globs may begin with its name and a slash, others apply
    to all.
    """
    return replace(
        options, include=applying(options.include, name), exclude=applying(options.exclude, name)
    )


def applying(patterns: tuple[str, ...], submodel: str) -> tuple[str, ...]:
    """The patterns that concern a submodel, without its name; tensors and modules have no slash in
    theirs.
    """
    split = (pattern.rpartition("/") for pattern in patterns)
    return tuple(rest for owner, _, rest in split if not owner or fnmatchcase(submodel, owner))


def is_included(
    submodel: str, options: QuantizeOptions | DequantizeOptions | CompareOptions
) -> bool:
    return not options.include or bool(applying(options.include, submodel))


def write_submodels(
    plan: DiffusersPlan[PlanT],
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    write: Callable[[PlanT, Path, RunOptions, Callable[[int], None]], ReportT],
    card: Callable[[ReportT], str | None],
) -> ReportT:
    """Carry out the plans of all submodels by `write`; one report of all, of which `card` makes a
    README.md or none.
    """
    reports: list[ReportT] = []
    if not run.overwrite and _is_complete(plan, out):
        reports = [write(part, out / name, run, progress) for name, part in plan.submodels.items()]
        tidy(out)
        return _joined(plan, out, reports, 0)
    kept, last = 0, list(plan.submodels)[-1]
    stamps = {name: source_changes(part.source) for name, part in plan.submodels.items()}
    with Workspace(
        out, _fingerprint(plan, run), stamps, overwrite=run.overwrite, checksum=False
    ) as workspace:
        if run.verify:
            workspace.forget()  # submodels of an earlier run, which nobody may have looked at
        (out / plan.folder.index.name).unlink(
            missing_ok=True
        )  # of a run that ended between its last two steps
        finished = {
            name
            for name, part in plan.submodels.items()
            if _is_finished(workspace, name, part, run)
        }
        missing = [(name, part) for name, part in plan.submodels.items() if name not in finished]
        workspace.check_space(sum(_space_needed(out / name, part) for name, part in missing))
        for name, part in plan.submodels.items():
            if name in finished:
                kept += len(part.output.shards)
                progress(sum(job.source_bytes for job in part.output.jobs))
                continue
            # what is there but not begun was finished and not yet noted as such, or is to be
            # overwritten
            again = replace(run, overwrite=not is_unfinished(out / name))
            reports.append(write(part, out / name, again, progress))
            if name != last:  # which is never skipped, so that a run has something to report
                for shard in _files(name, part):
                    workspace.record(shard, (out / shard).stat().st_size)
        for file in plan.folder.files:
            workspace.copy(str(file), plan.folder.folder / file)
        report = _joined(plan, out, reports, kept)
        readme = card(report)
        if readme is not None:
            workspace.write("README.md", readme.encode(errors="backslashreplace"))
        workspace.complete({plan.folder.index.name: plan.folder.index.read_bytes()})
    return report


def _is_complete(plan: DiffusersPlan[Any], out: Path) -> bool:
    """Whether an earlier run came to its end; of what it made, each submodel has a record of its
    own.
    """
    index = out / plan.folder.index.name
    return (
        not is_unfinished(out)
        and index.is_file()
        and index.read_bytes() == plan.folder.index.read_bytes()
        and all(read_record(out / name) is not None for name in plan.submodels)
    )


def _files(name: str, plan: WritingPlan) -> set[str]:
    """The files by which a finished submodel is noted."""
    return {f"{name}/{shard.name}" for shard in plan.output.shards}


def _is_finished(workspace: Workspace, name: str, plan: WritingPlan, run: RunOptions) -> bool:
    has_checksums = (workspace.out / name / CHECKSUMS).is_file()
    return _files(name, plan) <= workspace.finished.keys() and has_checksums == run.checksum


def _space_needed(folder: Path, plan: WritingPlan) -> int:
    """What a submodel takes beyond what lies in its folder, which is deleted or kept as a part of
    it.
    """
    present = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    return max(space_needed(plan, ()) - present, 0)


def _fingerprint(plan: DiffusersPlan[Any], run: RunOptions) -> dict[str, Any]:
    """Each submodel has its own, which says all; this one is for those that are finished, whose own
    is gone.
    """
    return {
        "command": type(next(iter(plan.submodels.values()))).__name__,
        "version": __version__,
        "--device": run.device,
        "submodels": {
            name: {
                "source files": source_stamps(part.source),
                "config": part.config,
                "options": asdict(part.options),
            }
            for name, part in plan.submodels.items()
        },
    }


def _joined(plan: DiffusersPlan[Any], out: Path, reports: list[ReportT], kept: int) -> ReportT:
    """One report of all submodels; what an earlier run finished is counted, but took no time."""
    first, totals = reports[0], plan.totals()
    after = sum(bytes_on_disk(out, name, part) for name, part in plan.submodels.items())
    figures: dict[str, Any] = {
        "out": str(out),
        "already_complete": all(report.already_complete for report in reports),
        "copied": totals.copied,
        "bytes_before": totals.bytes_before,
        "bytes_after": after,
        "pipeline_seconds": sum(report.pipeline_seconds for report in reports),
        "seconds_by_activity": {
            activity: math.fsum(report.seconds_by_activity.get(activity, 0.0) for report in reports)
            for activity in first.seconds_by_activity
        },
        "host_peak_bytes": max(report.host_peak_bytes for report in reports),
        "device_peak_bytes": max(report.device_peak_bytes for report in reports),
        "shards_resumed": kept + sum(report.shards_resumed for report in reports),
        "notes": plan.notes,
    }
    if isinstance(first, DequantizeReport):
        figures["decoded"] = totals.decoded
    else:
        figures |= {
            "packed": totals.packed,
            "parameters": totals.parameters,
            "bits_per_parameter": 8 * after / max(totals.parameters, 1),
            "gpu_bytes": gpu_bytes(after),
            "loading": plan.loading.call(str(out)),
            "advice": advice(plan.rows()),
            "verification": _verification(plan, reports),
        }
    return replace(first, **figures)


def bytes_on_disk(out: Path, submodel: str, plan: WritingPlan) -> int:
    return sum((out / submodel / shard.name).stat().st_size for shard in plan.output.shards)


def _verification(plan: DiffusersPlan[Any], reports: Sequence[Any]) -> VerificationSummary | None:
    """An audit's summary of all submodels; without verification none has one, and with it none is
    skipped.
    """
    found = [report.verification for report in reports]
    if None in found:
        return None
    rows = [
        inside(name, row)
        for name, part in zip(plan.submodels, found, strict=True)
        for row in part.weights
    ]
    # of an earlier run, whose figures are all that is left; they do not tell the median of all
    # weights
    if not rows:
        largest = max(part.largest_relative_error for part in found)
        packed, copied, differing = (
            sum(getattr(part, name) for part in found)
            for name in ("packed", "copied", "bytes_differing")
        )
        return VerificationSummary(packed, copied, largest, math.nan, differing)
    return VerificationSummary.of(rows, sum(part.copied for part in found))
