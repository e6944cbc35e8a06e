"""Writes the submodels of a diffusers pipeline one after the other, and one result of all.

OUT/.nf4conv            lock and fingerprint of the whole, and which submodels are finished
OUT/<submodel>          a workspace of its own, see output/workspace.py
OUT/model_index.json    last of all: without it diffusers does not take the folder for a pipeline
"""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nf4conv.check.config_check import check_config
from nf4conv.check.structure import structure_of
from nf4conv.declaring import deciding
from nf4conv.errors import PlanError
from nf4conv.format.layout import split_component
from nf4conv.options import RunOptions, SourceOptions
from nf4conv.output.workspace import Workspace, tidy
from nf4conv.plan.diffusers import DiffusersPlan, PlanT
from nf4conv.plan.writing import WritingPlan
from nf4conv.report.results import DequantizeReport, QuantizeReport
from nf4conv.run.filling import space_needed
from nf4conv.sources.diffusers import DiffusersFolder
from nf4conv.sources.opening import open_stored
from nf4conv.sources.reader import read_small
from nf4conv.sources.record import read_record
from nf4conv.sources.source import Source, source_changes, source_stamps
from nf4conv.sources.unfinished import is_unfinished
from nf4conv.system.files import space_taken
from nf4conv.system.removal import remove
from nf4conv.version import __version__

if TYPE_CHECKING:
    pass
ReportT = TypeVar("ReportT", QuantizeReport, DequantizeReport)


def open_unchanged(folder: DiffusersFolder, name: str, where: SourceOptions) -> Source:
    """Opens a submodel whose tensors stay as they are.

    Args:
        folder: the pipeline.
        name: the submodel.
        where: what to take of the pipeline, and how to reach the Hub.

    Raises:
        SourceError: the submodel cannot be read.
        PlanError: it has weights in 4 bits in which `verify` finds a fault. They would keep it.
    """
    stored = open_stored(folder.place, where)
    if not any(split_component(tensor.name)[1] for tensor in stored.tensors):
        return stored
    structure = structure_of(stored)
    check_config(structure)
    for finding in structure.findings:
        if finding.is_fault:
            decode = f"nf4conv dequantize {shlex.quote(folder.place)} DECODED --include '{name}/*'"
            message = (
                f"{folder.place}: {name}/{finding.line()}; this submodel would stay as it is; "
                f"decode it first: {decode}"
            )
            raise PlanError(message, path=folder.folder / name, tensor=finding.tensor or None)
    return stored


def write_submodels(
    plan: DiffusersPlan[PlanT],
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    write: Callable[[PlanT, Path, RunOptions, Callable[[int], None]], ReportT],
    join: Callable[[ReportT, Sequence[ReportT]], ReportT],
    card: Callable[[ReportT], str | None],
) -> ReportT:
    """Carries out the plans of all submodels.

    Args:
        plan: the plan of the pipeline.
        out: the output folder.
        run: how to use the machine.
        progress: is called with the number of source bytes that have been read since the last
            call, from any thread.
        write: carries out the plan of one submodel.
        join: completes the joined report with what only this command reports, given the joined
            report and those of all submodels.
        card: returns the README.md of the pipeline, given its report; None if it gets none.
    """
    if not run.overwrite and _is_complete(plan, out):
        reports = [write(part, out / name, run, progress) for name, part in plan.submodels.items()]
        tidy(out)
        return join(_joined(plan, out, reports, 0), reports)
    stamps = {name: source_changes(part.source) for name, part in plan.submodels.items()}
    opened = Workspace(out, _fingerprint(plan, run), stamps, overwrite=run.overwrite)
    with opened as workspace:
        if run.verify:
            workspace.forget()  # submodels of an earlier run, which nobody may have looked at
        for name in plan.submodels:
            workspace.require_name(name)
        index = plan.folder.index
        # it is there if an earlier run ended between its last two steps
        remove(out, index.name)
        reports, kept = _write_missing(plan, workspace, run, progress, write)
        for file in plan.folder.files:
            workspace.copy(str(file), plan.folder.folder / file)
        report = join(_joined(plan, out, reports, kept, workspace.left_out), reports)
        readme = card(report)
        if readme is not None:
            workspace.write("README.md", readme.encode(errors="backslashreplace"))
        workspace.complete({index.name: read_small(index)})
    return report


def _write_missing(
    plan: DiffusersPlan[PlanT],
    workspace: Workspace,
    run: RunOptions,
    progress: Callable[[int], None],
    write: Callable[[PlanT, Path, RunOptions, Callable[[int], None]], ReportT],
) -> tuple[list[ReportT], int]:
    """Writes the submodels that are not finished.

    Returns:
        Their reports, and the number of shards of the others.
    """
    out = workspace.out
    finished = set()
    for name, part in plan.submodels.items():
        if _is_finished(workspace, name, part):
            finished.add(name)
    needed = 0
    for name, part in plan.submodels.items():
        if name not in finished:
            needed += _space_needed(out / name, part)
    workspace.check_space(needed)
    reports: list[ReportT] = []
    kept = 0
    last = list(plan.submodels)[-1]
    for name, part in plan.submodels.items():
        if name in finished:
            kept += len(part.output.shards)
            progress(part.output.bytes_to_read)
            continue
        # what is there but not begun was finished and not yet noted, or is to be overwritten
        again = replace(run, overwrite=not is_unfinished(out / name))
        reports.append(write(part, out / name, again, progress))
        if name != last:  # the last one is never skipped, so that a run has something to report
            for shard in _files(name, part):
                workspace.record(shard, (out / shard).stat().st_size)
    return reports, kept


def _is_complete(plan: DiffusersPlan[Any], out: Path) -> bool:
    """Returns True if an earlier run came to its end; each submodel then has its own record."""
    index = out / plan.folder.index.name
    if is_unfinished(out) or not index.is_file():
        return False
    if read_small(index) != read_small(plan.folder.index):
        return False
    return all(read_record(out / name) is not None for name in plan.submodels)


def _files(name: str, plan: WritingPlan) -> set[str]:
    """Returns the files by which a finished submodel is noted."""
    return {f"{name}/{shard.name}" for shard in plan.output.shards}


def _is_finished(workspace: Workspace, name: str, plan: WritingPlan) -> bool:
    """Returns True if an earlier run has finished a submodel."""
    return _files(name, plan) <= workspace.finished.keys()


def _space_needed(folder: Path, plan: WritingPlan) -> int:
    """Returns the bytes that a submodel takes beyond what lies in its folder.

    What lies there is deleted, or kept as a part of the result.
    """
    present = sum(space_taken(path) for path in folder.rglob("*") if path.is_file())
    return max(space_needed(plan, ()) - present, 0)


def _fingerprint(plan: DiffusersPlan[Any], run: RunOptions) -> dict[str, Any]:
    """Returns what a run must have in common with the one that it resumes.

    Each submodel's workspace has a complete fingerprint. This one is for finished submodels, whose
    own is gone.
    """
    submodels = {}
    for name, part in plan.submodels.items():
        submodels[name] = {
            "source files": source_stamps(part.source),
            "config": part.config,
            "options": deciding(part.options),
        }
    return {
        "command": type(next(iter(plan.submodels.values()))).__name__,
        "version": __version__,
        "--device": run.device,
        "submodels": submodels,
    }


def _joined(
    plan: DiffusersPlan[Any],
    out: Path,
    reports: Sequence[ReportT],
    kept: int,
    left_out: Sequence[str] = (),
) -> ReportT:
    """Joins the reports of submodels.

    Args:
        plan: the plan of the pipeline.
        out: the output folder.
        reports: the reports of the submodels that have been written.
        kept: the number of shards of the others, which an earlier run has finished.
        left_out: lines about files that are not copied.
    """
    runs = [report.run for report in reports]
    totals = plan.totals()
    seconds_by_activity = {}
    for activity in runs[0].seconds_by_activity:
        spent = [run.seconds_by_activity.get(activity, 0.0) for run in runs]
        seconds_by_activity[activity] = math.fsum(spent)
    bytes_after = 0
    for name, part in plan.submodels.items():
        bytes_after += bytes_on_disk(out, name, part)
    joined = replace(
        runs[0],
        out=str(out),
        already_complete=all(run.already_complete for run in runs),
        copied=totals.copied,
        bytes_before=totals.bytes_before,
        bytes_after=bytes_after,
        pipeline_seconds=sum(run.pipeline_seconds for run in runs),
        seconds_by_activity=seconds_by_activity,
        host_peak_bytes=max(run.host_peak_bytes for run in runs),
        device_peak_bytes=max(run.device_peak_bytes for run in runs),
        shards_resumed=kept + sum(run.shards_resumed for run in runs),
        notes=(*plan.notes, *left_out),
    )
    return replace(reports[0], run=joined)


def bytes_on_disk(out: Path, submodel: str, plan: WritingPlan) -> int:
    """Returns the bytes of a submodel's weight files."""
    return sum((out / submodel / shard.name).stat().st_size for shard in plan.output.shards)
