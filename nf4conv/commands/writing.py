"""What quantize and dequantize share: dry runs, what is told of a run, and diffusers pipelines.

The submodels of a pipeline are written one after the other:

OUT/.nf4conv            lock and fingerprint of the whole, and which submodels are finished
OUT/<submodel>          a workspace of its own, see output/workspace.py
OUT/model_index.json    last of all: without it diffusers does not take the folder for a pipeline
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from nf4conv.check.config_check import check_config
from nf4conv.check.structure import structure_of
from nf4conv.declaring import deciding
from nf4conv.errors import PlanError
from nf4conv.format.layout import has_components
from nf4conv.options import DequantizeOptions, QuantizeOptions, RunOptions, SourceOptions
from nf4conv.output.workspace import Workspace, tidy
from nf4conv.plan.diffusers import DiffusersPlan, PlanT
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.plan.rows import summed
from nf4conv.plan.writing import WritingPlan
from nf4conv.report.advice import unusual
from nf4conv.report.loading import gpu_bytes
from nf4conv.report.results import DequantizeReport, PlanReport, QuantizeReport, RunReport
from nf4conv.report.text.progress_bar import Step, begin
from nf4conv.run.checkpoint import ignore
from nf4conv.sources.diffusers import DiffusersFolder
from nf4conv.sources.opening import open_stored
from nf4conv.sources.reader import read_small, reading_speed
from nf4conv.sources.record import read_record
from nf4conv.sources.source import Source, source_changes, source_stamps
from nf4conv.sources.unfinished import is_unfinished
from nf4conv.system.files import space_taken
from nf4conv.system.folders import remove
from nf4conv.system.machine import uncollected
from nf4conv.version import __version__

OptionsT = TypeVar("OptionsT", QuantizeOptions, DequantizeOptions)
ReportT = TypeVar("ReportT", QuantizeReport, DequantizeReport)


@uncollected()
def describe(plan: WritingPlan | DiffusersPlan[Any]) -> PlanReport:
    """Describes what carrying out a plan would do, and what is unusual in it."""
    rows = plan.rows()
    totals = plan.totals()
    plans: Sequence[WritingPlan]
    if isinstance(plan, DiffusersPlan):
        plans = list(plan.submodels.values())
        source = str(plan.folder.place)
    else:
        plans = [plan]
        source = str(plan.source)
    first = plans[0]
    is_packing = isinstance(first, QuantizationPlan)
    # modules that the user wants to be treated otherwise are not unusual
    treated = []
    for row in rows:
        if "the user" not in row.reason:
            is_packed = row.action in ("pack", "stay")
            treated.append((row.name, "packed" if is_packed else f"kept ({row.reason})"))
    return PlanReport(
        command=first.command,
        source=source,
        totals=totals,
        kinds=summed(rows),
        tensors=tuple(rows),
        config=plan.config,
        gpu_bytes=gpu_bytes(totals.bytes_after) if is_packing else None,
        reading_seconds=_reading_seconds(plans),
        notes=(*plan.notes, *unusual(treated)),
    )


def _reading_seconds(plans: Sequence[WritingPlan]) -> float | None:
    """Estimates how long the source is read, by how fast some of it is read now."""
    speed = reading_speed([file for plan in plans for file in plan.source.files])
    if speed is None:
        return None
    return sum(plan.output.bytes_to_read for plan in plans) / speed


def tell_what_is_read(
    plan: WritingPlan | DiffusersPlan[Any], options: QuantizeOptions | DequantizeOptions
) -> None:
    """Tells who watches a run its notes, and the steps that read bytes."""
    if options.progress is None:
        return
    totals = plan.totals()
    work = totals.bytes_before
    if isinstance(options, DequantizeOptions):
        begin(options.progress, [Step("decoding", work)], plan.notes)
        return
    verb = "quantizing"
    if options.verify:
        work += totals.bytes_before + totals.bytes_after
        verb = "quantizing and verifying"
    last = "finishing"
    if options.push_to_hub is not None:
        last = f"uploading to {options.push_to_hub}"
    steps = []
    calibration = plan.calibration if isinstance(plan, QuantizationPlan) else None
    if calibration is not None:
        read = calibration.bytes_to_read
        steps.append(Step("calibrating", read, "calibrating"))
        work -= calibration.bytes_spared
    begin(options.progress, [*steps, Step(verb, work, last)], plan.notes)


# --- diffusers pipelines ------------------------------------------------------------------------


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
    if not has_components(tensor.name for tensor in stored.tensors):
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
    options: OptionsT,
    write: Callable[[PlanT, Path, OptionsT], ReportT],
    join: Callable[[RunReport, Sequence[ReportT]], ReportT],
    card: Callable[[ReportT], str] | None = None,
) -> ReportT:
    """Carries out the plans of all submodels.

    Args:
        plan: the plan of the pipeline.
        out: the output folder.
        options: how to use the machine, and whom to tell the number of source bytes that are read.
        write: carries out the plan of one submodel.
        join: returns the report of the whole, given what came of all runs, and their reports.
        card: returns the README.md of the pipeline, given its report; None if it gets none.
    """
    if not options.overwrite and _is_complete(plan, out):
        reports = [write(part, out / name, options) for name, part in plan.submodels.items()]
        tidy(out)
        return join(_joined(plan, out, reports, 0), reports)
    stamps = {name: source_changes(part.source) for name, part in plan.submodels.items()}
    opened = Workspace(out, _fingerprint(plan, options), stamps, overwrite=options.overwrite)
    with opened as workspace:
        if options.verify:
            workspace.forget()  # submodels of an earlier run, which nobody may have looked at
        for name in plan.submodels:
            workspace.require_name(name)
        index = plan.folder.index
        # it is there if an earlier run ended between its last two steps
        remove(out, index.name)
        reports, kept = _write_missing(plan, workspace, options, write)
        for file in plan.folder.files:
            workspace.copy(str(file), plan.folder.folder / file)
        report = join(_joined(plan, out, reports, kept, workspace.left_out), reports)
        if card is not None:
            workspace.write("README.md", card(report).encode(errors="backslashreplace"))
        workspace.complete({index.name: read_small(index)})
    return report


def _write_missing(
    plan: DiffusersPlan[PlanT],
    workspace: Workspace,
    options: OptionsT,
    write: Callable[[PlanT, Path, OptionsT], ReportT],
) -> tuple[list[ReportT], int]:
    """Writes the submodels that are not finished.

    Returns their reports, and the number of shards of the others.
    """
    out = workspace.out
    progress = options.progress or ignore
    missing = {}
    kept = 0
    for name, part in plan.submodels.items():
        if _files(name, part) <= workspace.finished.keys():
            kept += len(part.output.shards)
            progress(part.output.bytes_to_read)
        else:
            missing[name] = part
    workspace.check_space(sum(_space_needed(out / name, part) for name, part in missing.items()))
    reports: list[ReportT] = []
    last = list(plan.submodels)[-1]
    for name, part in missing.items():
        # what is there but not begun was finished and not yet noted, or is to be overwritten
        again = replace(options, overwrite=not is_unfinished(out / name))
        reports.append(write(part, out / name, again))
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


def _space_needed(folder: Path, plan: WritingPlan) -> int:
    """Returns the bytes that a submodel takes beyond what lies in its folder.

    What lies there is deleted, or kept as a part of the result.
    """
    present = sum(space_taken(path) for path in folder.rglob("*") if path.is_file())
    return max(plan.space_needed(()) - present, 0)


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
    reports: Sequence[QuantizeReport | DequantizeReport],
    kept: int,
    left_out: Sequence[str] = (),
) -> RunReport:
    """Joins what came of the submodels that were written.

    `kept` is the number of shards of the others; `left_out` are lines about files that are not
    copied.
    """
    runs = [report.run for report in reports]
    totals = plan.totals()
    return replace(
        runs[0],
        out=str(out),
        already_complete=all(run.already_complete for run in runs),
        copied=totals.copied,
        bytes_before=totals.bytes_before,
        bytes_after=sum(bytes_on_disk(out, name, part) for name, part in plan.submodels.items()),
        pipeline_seconds=sum(run.pipeline_seconds for run in runs),
        seconds_by_activity=sum_of_seconds(runs),
        host_peak_bytes=max(run.host_peak_bytes for run in runs),
        device_peak_bytes=max(run.device_peak_bytes for run in runs),
        shards_resumed=kept + sum(run.shards_resumed for run in runs),
        notes=(*plan.notes, *left_out),
    )


def sum_of_seconds(runs: Sequence[RunReport]) -> dict[str, float]:
    """Returns the seconds that all runs have spent, by activity."""
    seconds: dict[str, float] = {}
    for run in runs:
        for activity, spent in run.seconds_by_activity.items():
            seconds[activity] = seconds.get(activity, 0.0) + spent
    return seconds


def bytes_on_disk(out: Path, submodel: str, plan: WritingPlan) -> int:
    """Returns the bytes of a submodel's weight files."""
    return sum((out / submodel / shard.name).stat().st_size for shard in plan.output.shards)
