"""Describes plans, tells what a run reads, and writes pipelines, for quantize and dequantize.

The submodels of a pipeline are written one after the other:

OUT/.nf4conv            lock of the whole
OUT/<submodel>          a checkpoint of its own: a rerun finds by its record that it is there
OUT/model_index.json    last of all: without it diffusers does not take the folder for a pipeline
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from nf4conv.options import DequantizeOptions, QuantizeOptions
from nf4conv.output.workspace import Workspace, tidy
from nf4conv.plan.diffusers import DiffusersPlan, PlanT
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.plan.rows import summed
from nf4conv.plan.writing import WritingPlan
from nf4conv.report.results import PlanReport, RunReport, VerificationSummary
from nf4conv.report.text.progress_bar import Step, begin
from nf4conv.sources.reader import read_small, reading_speed
from nf4conv.sources.unfinished import is_unfinished
from nf4conv.system.folders import remove
from nf4conv.system.machine import uncollected

OptionsT = TypeVar("OptionsT", QuantizeOptions, DequantizeOptions)


@uncollected()
def describe(plan: WritingPlan | DiffusersPlan[Any]) -> PlanReport:
    """Describes what carrying out a plan would do."""
    rows = plan.rows()
    totals = plan.totals()
    first: WritingPlan
    if isinstance(plan, DiffusersPlan):
        first = next(iter(plan.submodels.values()))
        source = str(plan.folder.place)
    else:
        first = plan
        source = str(plan.source)
    return PlanReport(
        command=first.command,
        source=source,
        totals=totals,
        kinds=summed(rows),
        tensors=tuple(rows),
        config=plan.config,
        reading_seconds=_reading_seconds(plan, totals.bytes_before),
        notes=tuple(plan.notes),
    )


def _reading_seconds(plan: WritingPlan | DiffusersPlan[Any], nbytes: int) -> float | None:
    """Estimates how long the source is read, by how fast some of it is read now."""
    plans = plan.submodels.values() if isinstance(plan, DiffusersPlan) else [plan]
    speed = reading_speed([file for one in plans for file in one.source.files])
    return None if speed is None else nbytes / speed


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


def write_submodels(
    plan: DiffusersPlan[PlanT],
    out: Path,
    options: OptionsT,
    write: Callable[[PlanT, Path, OptionsT], RunReport],
    card: Callable[[RunReport], str | None] | None = None,
) -> RunReport:
    """Carries out the plans of all submodels.

    Args:
        plan: the plan of the pipeline.
        out: the output folder.
        options: how to use the machine, and whom to tell the number of source bytes that are read.
        write: carries out the plan of one submodel; it recognises one that is there already.
        card: returns the README.md of the pipeline, given its report; None if it gets none.
    """
    index = plan.folder.index
    if (out / index.name).is_file() and not is_unfinished(out) and not options.overwrite:
        reports = [write(part, out / name, options) for name, part in plan.submodels.items()]
        tidy(out)
        return _joined(plan, out, reports)
    begun = {"command": type(options).__name__, "--device": options.device}
    with Workspace(out, begun, overwrite=options.overwrite) as workspace:
        for name in plan.submodels:
            workspace.require_name(name)
        missing = [part for name, part in plan.submodels.items() if not (out / name).exists()]
        workspace.check_space(sum(part.space_needed(()) for part in missing))
        # it is there if an earlier run ended between its last two steps
        remove(out, index.name)
        reports = []
        for name, part in plan.submodels.items():
            # one that an earlier run has finished may not be verified
            again = options.verify and not is_unfinished(out / name)
            reports.append(write(part, out / name, replace(options, overwrite=again)))
        for file in plan.folder.files:
            workspace.copy(str(file), plan.folder.folder / file)
        report = _joined(plan, out, reports)
        text = None if card is None else card(report)
        if text is not None:
            workspace.write("README.md", text.encode(errors="backslashreplace"))
        workspace.complete({index.name: read_small(index)})
    return report


def _joined(plan: DiffusersPlan[Any], out: Path, runs: Sequence[RunReport]) -> RunReport:
    """Joins what came of all submodels."""
    shards_resumed = 0
    for run, part in zip(runs, plan.submodels.values(), strict=True):
        shards_resumed += len(part.output.shards) if run.already_complete else run.shards_resumed
    size = sum(run.totals.bytes_after for run in runs)
    return replace(
        next((run for run in runs if not run.already_complete), runs[0]),
        out=str(out),
        totals=replace(plan.totals(), bytes_after=size),
        pipeline_seconds=sum(run.pipeline_seconds for run in runs),
        seconds_by_activity=sum_of_seconds(runs),
        host_peak_bytes=max(run.host_peak_bytes for run in runs),
        device_peak_bytes=max(run.device_peak_bytes for run in runs),
        shards_resumed=shards_resumed,
        notes=plan.notes,
        verification=_verification(runs),
    )


def _verification(runs: Sequence[RunReport]) -> VerificationSummary | None:
    """Sums up all submodels; None if this run has not verified them."""
    parts = []
    for run in runs:
        if run.verification is None or run.already_complete:
            return None
        parts.append(run.verification)
    return VerificationSummary.sum_up(parts)


def sum_of_seconds(runs: Sequence[RunReport]) -> dict[str, float]:
    """Returns the seconds that all runs have spent, by activity."""
    seconds: dict[str, float] = {}
    for run in runs:
        for activity, spent in run.seconds_by_activity.items():
            seconds[activity] = seconds.get(activity, 0.0) + spent
    return seconds
