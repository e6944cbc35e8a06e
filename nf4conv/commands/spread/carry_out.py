"""Carries out a run in parts: workers make them, and the last one makes the result whole.

Each worker plans for itself. The driver watches which shards are finished. An error ends all
workers. What Ray loses with a process or a host, Ray tries again.
"""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from nf4conv.commands.spread.part import Crew, PartWork
from nf4conv.commands.spread.places import find_places
from nf4conv.commands.spread.processes import open_processes
from nf4conv.commands.spread.ray_tasks import open_ray
from nf4conv.errors import PlanError
from nf4conv.options import RunOptions
from nf4conv.output.workspace import Workspace
from nf4conv.plan.parts import plan_part
from nf4conv.report.results import DequantizeReport, QuantizeReport, VerificationSummary
from nf4conv.sources.record import read_record
from nf4conv.sources.unfinished import finished_shards

ReportT = TypeVar("ReportT", QuantizeReport, DequantizeReport)


def carry_out(
    plan: Any,
    execute: Callable[..., ReportT],
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
) -> ReportT:
    """Has workers make all parts of a plan, and finishes the checkpoint.

    Args:
        plan: what `plan_quantization` or `plan_dequantization` returned.
        execute: carries out a plan of that command.
        out: the output folder.
        run: how to use the machine.
        progress: is called with the number of source bytes that have been read since the last
            call.

    Returns:
        A report of the whole run.

    Raises:
        PlanError: the plan cannot be carried out in parts, there are no such devices, or Ray is
            not installed.
        Nf4convError: a worker died, or Ray failed.
    """
    if run.part is not None:
        raise PlanError(
            f"--part {run.part} is for one process: with --device cuda:N, on each GPU a part"
        )
    started = time.perf_counter()
    shards = plan.totals().shards
    alone = replace(run, ray=False, device="cpu", overwrite=False)
    opened: AbstractContextManager[Crew]
    if run.ray:
        asked_by = "--ray"
        opened = open_ray(run)
    else:
        asked_by = f"--device {run.device}"
        places = find_places(run.device)
        alone = replace(alone, device=places[0].device)
        if len(places) == 1 or shards == 1:
            return execute(plan, out, replace(alone, overwrite=run.overwrite), progress)
        opened = open_processes(places, alone)
    plan_part(plan, replace(alone, part="1/1"), asked_by)  # refuses what has no parts
    with opened as crew:
        if run.overwrite:
            _empty(out)
        reports = _make_parts(crew, plan, execute, out, shards, progress)
    elapsed = time.perf_counter() - started
    # a run into a finished folder computes nothing, and reports what is there; each part has
    # verified its own shards
    report = execute(plan, out, replace(alone, verify=False, tolerance=None))
    if run.verify and type(report) is QuantizeReport:
        verified = VerificationSummary.from_record((read_record(out) or {}).get("verified"))
        report = replace(report, verification=verified)
    joined = _joined(report, reports, time.perf_counter() - started)
    if run.ray:
        return replace(joined, run=replace(joined.run, pipeline_seconds=elapsed))
    return joined


def _empty(out: Path) -> None:
    """Deletes what is in the output folder."""
    with Workspace(out, {}, overwrite=True) as emptied:
        emptied.complete({})


def _make_parts(
    crew: Crew,
    plan: Any,
    execute: Callable[..., ReportT],
    out: Path,
    shards: int,
    progress: Callable[[int], None],
) -> list[ReportT]:
    """Has the crew make all parts; raises the first error of a worker."""
    count = min(crew.parts, shards)
    pending = set()
    for number in range(1, count + 1):
        run = replace(crew.run, part=f"{number}/{count}", overwrite=False)
        again, request = plan.again.func, plan.again.args
        work = PartWork(Path.cwd(), again, request, execute, out, run)
        pending.add(crew.submit(work))
    reports: list[ReportT] = []
    told = 0
    while pending:
        done, pending = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
        for future in done:
            report = future.result()
            if isinstance(report, Exception):
                raise report
            reports.append(cast("ReportT", report))
        # nothing is recorded any more once the last part has made the result whole
        read = max(_bytes_read(out, crew.run.verify), told)
        progress(read - told)
        told = read
    rest = plan.output.bytes_to_read - told
    if crew.run.verify:
        rest += plan.output.bytes_to_read + sum(
            path.stat().st_size for path in out.glob("*.safetensors")
        )
    progress(rest)
    return reports


def _bytes_read(out: Path, is_verified: bool) -> int:
    """Returns the bytes that have been read for the shards that are finished so far."""
    read = 0
    for shard in finished_shards(out).values():
        read += shard.source_bytes
        if is_verified:  # source and shard are read once more
            read += shard.source_bytes + shard.size
    return read


def _joined(report: ReportT, parts: list[ReportT], seconds: float) -> ReportT:
    """Puts the times and the memory of all parts into the report of the whole."""
    runs = [part.run for part in parts]
    seconds_by_activity: dict[str, float] = {}
    for run in runs:
        for name, spent in run.seconds_by_activity.items():
            seconds_by_activity[name] = seconds_by_activity.get(name, 0) + spent
    joined = replace(
        report.run,
        already_complete=all(run.already_complete for run in runs),
        device=", ".join(sorted({run.device for run in runs})),
        seconds=seconds,
        seconds_by_activity=seconds_by_activity,
        shards_resumed=sum(run.shards_resumed for run in runs),
        # parts run side by side, so one process stands for all
        pipeline_seconds=max(run.pipeline_seconds for run in runs),
        host_baseline_bytes=max(run.host_baseline_bytes for run in runs),
        host_peak_bytes=max(run.host_peak_bytes for run in runs),
        device_peak_bytes=max(run.device_peak_bytes for run in runs),
    )
    return replace(report, run=joined)
