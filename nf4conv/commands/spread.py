"""A run spread over workers that carry out its parts: processes of this host, one a GPU.

Each plans for itself; the driver watches which shards are finished, and finishes. An error ends all of them.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

from nf4conv import errors
from nf4conv.checkpoint.workspace import Workspace, finished_shards
from nf4conv.commands.finish import finish_checkpoint
from nf4conv.commands.parts import plan_part
from nf4conv.errors import Nf4convError, PlanError
from nf4conv.options import RunOptions
from nf4conv.pipeline.without_torch.driver import bus_id, device_count
from nf4conv.report.results import RunReport

ReportT = TypeVar("ReportT", bound=RunReport)
Place = tuple[str, frozenset[int]]  # a device, and the cores that feed it


def is_spread(run: RunOptions) -> bool:
    """Whether a run is for workers."""
    return run.device == "cuda:all" or "," in run.device


def carry_out(
    plan: Any, execute: Callable[..., ReportT], out: Path, run: RunOptions, progress: Callable[[int], None]
) -> ReportT:
    """Carry out a plan in parts by the `execute` of its command, and finish; a report as of a single run.

    Errors are those of parts, a PlanError if there are no such devices, and an Nf4convError if a worker dies.
    """
    if run.part is not None:
        raise PlanError(f"--part {run.part} is for one process: with --device cuda:N, on each GPU a part")
    started, places, reports = time.perf_counter(), find_places(run.device), list[ReportT]()
    count = min(len(places), plan.totals().shards)
    if count == 1:
        return execute(plan, out, replace(run, device=places[0][0]), progress)
    alone = replace(run, device=places[0][0], overwrite=False)
    plan_part(plan, replace(alone, part="1/1"))  # which says if this plan cannot be carried out in parts
    with _processes(places) as submit:
        if run.overwrite:
            with Workspace(out, {}, overwrite=True, checksum=False) as emptied:
                emptied.complete({})
        parts = (replace(alone, part=f"{number}/{count}") for number in range(1, count + 1))
        pending, told = {submit(plan.again, execute, out, part) for part in parts}, 0
        while pending:
            done, pending = wait(pending, 1, FIRST_COMPLETED)
            for report in (future.result() for future in done):
                if isinstance(report, Exception):
                    raise report
                reports.append(report)
            known = finished_shards(out).values()
            read = sum(shard.source_bytes + run.verify * (shard.source_bytes + shard.size) for shard in known)
            progress(read - told)
            told = read
    spent = [pair for report in reports for pair in report.seconds_by_activity.items()]
    finish_checkpoint(out, reread=False)
    return replace(
        execute(plan, out, alone),  # which says what is there now
        already_complete=all(report.already_complete for report in reports),
        device=", ".join(sorted({report.device for report in reports})),
        seconds=time.perf_counter() - started,
        seconds_by_activity={name: sum(seconds for other, seconds in spent if other == name) for name, _ in spent},
        shards_resumed=sum(report.shards_resumed for report in reports),
        **{name: max(getattr(report, name) for report in reports) for name in _OF_A_PROCESS},
    )


_OF_A_PROCESS: Final = ("pipeline_seconds", "host_baseline_bytes", "host_peak_bytes", "device_peak_bytes")


def _part(again: Callable[[], Any], execute: Callable[..., Any], out: Path, run: RunOptions) -> Any:
    """Carry out a part: its report, or an error of a kind that can travel."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # the driver has a bar of its own
    try:
        return execute(again(), out, run)
    except Exception as error:  # noqa: BLE001 - raised again by the driver
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ in (errors.__name__, "builtins"))
        return kind(str(error))


def find_places(device: str) -> list[Place]:
    """The GPUs that are asked for, each with an even share of the cores beside it; a PlanError if they are not there.

    "cpu,cpu" is two processes on half of the cores each.
    """
    gpus = [f"cuda:{number}" for number in range(device_count())]
    devices = gpus if device == "cuda:all" else device.split(",")
    if {*devices} != {"cpu"} and (not devices or len({*devices} & {*gpus}) < len(devices)):
        raise PlanError(f"--device {device}: expected GPUs of this machine, each once: {gpus or 'it has none'}")
    near = [_cores_beside(name) for name in devices]
    shares = (sorted(cores)[near[:index].count(cores) :: near.count(cores)] for index, cores in enumerate(near))
    return [(name, frozenset(share) or cores) for name, share, cores in zip(devices, shares, near, strict=True)]


def _cores_beside(device: str) -> frozenset[int]:
    """The cores of a GPU's NUMA node that this process may use; all that it may use where those are not known."""
    usable = frozenset(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # as of "cpu"
        file = Path("/sys/bus/pci/devices", bus_id(int(device.partition(":")[2])), "local_cpulist")
        ranges = [part.partition("-") for part in file.read_text().strip().split(",")]
        beside = {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
        return usable & beside or usable
    return usable


@contextmanager
def _processes(places: list[Place]) -> Iterator[Callable[..., "Future[Any]"]]:
    """A process for each part, as many at a time as there are places. They end with this one, however it ends."""
    context, places_in_turn, crew = get_context("spawn"), cycle(places), list[Any]()

    def call(*work: Any) -> Any:
        (device, cores), (answer, theirs) = next(places_in_turn), context.Pipe()
        arguments = (theirs, cores, *work[:-1], replace(work[-1], device=device))
        crew.append(context.Process(target=_serve, args=arguments, daemon=True))
        crew[-1].start()
        theirs.close()
        try:
            return answer.recv()
        except (EOFError, OSError):
            return Nf4convError("a worker process was killed, perhaps for want of memory; the same command resumes")

    with ThreadPoolExecutor(len(places)) as threads:
        try:
            yield partial(threads.submit, call)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in crew:
                process.kill()


def _serve(driver: Connection, cores: frozenset[int], *work: Any) -> None:
    """Carry out a part in a process of its own, which ends with the driver."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal it reaches all processes; the driver answers it
    os.sched_setaffinity(0, cores)  # before there are threads, and memory of theirs
    threading.Thread(target=lambda: os._exit(driver.poll(None)), daemon=True).start()
    driver.send(_part(*work))
