"""A run spread over workers that carry out its parts: processes of this host, one a GPU, or tasks
of a Ray cluster.

Each plans for itself; the driver watches which shards are finished, and finishes. An error ends all
of them; what Ray loses with a process or a host it tries again.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

from nf4conv import errors
from nf4conv.commands.finish import finish_checkpoint
from nf4conv.commands.parts import plan_part
from nf4conv.errors import Nf4convError, OutputError, PlanError
from nf4conv.options import RunOptions
from nf4conv.output.shared_folder import SharedFolder
from nf4conv.output.workspace import Workspace
from nf4conv.report.results import RunReport
from nf4conv.run.without_torch.driver import bus_id, device_count
from nf4conv.sources.unfinished import PARTS, finished_shards

ReportT = TypeVar("ReportT", bound=RunReport)
Place = tuple[str, frozenset[int]]  # a device, and the cores that feed it
Crew = tuple[
    Callable[..., "Future[Any]"], int, RunOptions
]  # has `_part` called; for how many parts; how they run


def is_spread(run: RunOptions) -> bool:
    """Whether a run is for workers."""
    return run.ray or run.device == "cuda:all" or "," in run.device


def carry_out(
    plan: Any,
    execute: Callable[..., ReportT],
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
) -> ReportT:
    """Carry out a plan in parts by the `execute` of its command, and finish; a report as of a
    single run.

    Errors are those of parts, a PlanError if there are no such devices or no Ray, and an
    Nf4convError if a worker dies.
    """
    if run.part is not None:
        raise PlanError(
            f"--part {run.part} is for one process: with --device cuda:N, on each GPU a part"
        )
    started, shards, reports = time.perf_counter(), plan.totals().shards, list[ReportT]()
    places = [("cpu", frozenset[int]())] if run.ray else find_places(run.device)
    if min(len(places), shards) == 1 and not run.ray:
        return execute(plan, out, replace(run, device=places[0][0]), progress)
    alone = replace(run, ray=False, device=places[0][0], overwrite=False)
    asked_by = "--ray" if run.ray else f"--device {run.device}"
    plan_part(
        plan, replace(alone, part="1/1"), asked_by
    )  # which says if this plan cannot be carried out in parts
    with _ray_tasks(run) if run.ray else _processes(places, alone) as (submit, count, each):
        if run.overwrite:
            with Workspace(out, {}, overwrite=True, checksum=False) as emptied:
                emptied.complete({})
        count = min(count, shards)
        with suppress(OutputError):  # unless nothing has begun there that could be resumed
            count = SharedFolder(out).read_plan()[PARTS]
        parts = (
            replace(each, part=f"{number}/{count}", overwrite=False)
            for number in range(1, count + 1)
        )
        pending, told = {submit(Path.cwd(), plan.again, execute, out, part) for part in parts}, 0
        while pending:
            done, pending = wait(pending, 1, FIRST_COMPLETED)
            for report in (future.result() for future in done):
                if isinstance(report, Exception):
                    raise report
                reports.append(report)
            known = finished_shards(out).values()
            read = sum(
                shard.source_bytes + run.verify * (shard.source_bytes + shard.size)
                for shard in known
            )
            progress(read - told)
            told = read
    elapsed = time.perf_counter() - started
    spent = [pair for report in reports for pair in report.seconds_by_activity.items()]
    most = {name: max(getattr(report, name) for report in reports) for name in _OF_A_PROCESS}
    finish_checkpoint(out, reread=False)
    return replace(
        execute(plan, out, alone),  # which says what is there now
        already_complete=all(report.already_complete for report in reports),
        device=", ".join(sorted({report.device for report in reports})),
        seconds=time.perf_counter() - started,
        seconds_by_activity={
            name: sum(seconds for other, seconds in spent if other == name) for name, _ in spent
        },
        shards_resumed=sum(report.shards_resumed for report in reports),
        **most | ({"pipeline_seconds": elapsed} if run.ray else {}),
    )


_OF_A_PROCESS: Final = (
    "pipeline_seconds",
    "host_baseline_bytes",
    "host_peak_bytes",
    "device_peak_bytes",
)
_planned = lru_cache(maxsize=1)(
    lambda make, *request: make(*request)
)  # a process of Ray's gets several parts


def _part(
    folder: Path, again: "partial[Any]", execute: Callable[..., Any], out: Path, run: RunOptions
) -> Any:
    """Carry out a part: its report, or an error of a kind that can travel, which nobody is to try
    again.
    """
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # the driver has a bar of its own
    with suppress(OSError):  # on another host it need not be there
        os.chdir(folder)
    try:
        return execute(_planned(again.func, *again.args), out, run)
    except Exception as error:  # noqa: BLE001 - raised again by the driver
        kind = next(
            kind for kind in type(error).__mro__ if kind.__module__ in (errors.__name__, "builtins")
        )
        return kind(str(error))


def find_places(device: str) -> list[Place]:
    """The GPUs that are asked for, each with an even share of the cores beside it; a PlanError if
    they are not there.

    "cpu,cpu" is two processes on half of the cores each.
    """
    gpus = [f"cuda:{number}" for number in range(device_count())]
    devices = gpus if device == "cuda:all" else device.split(",")
    if {*devices} != {"cpu"} and (not devices or len({*devices} & {*gpus}) < len(devices)):
        raise PlanError(
            f"--device {device}: expected GPUs of this machine, each once: {gpus or 'it has none'}"
        )
    near = [_cores_beside(name) for name in devices]
    shares = (
        sorted(cores)[near[:index].count(cores) :: near.count(cores)]
        for index, cores in enumerate(near)
    )
    return [
        (name, frozenset(share) or cores)
        for name, share, cores in zip(devices, shares, near, strict=True)
    ]


def _cores_beside(device: str) -> frozenset[int]:
    """The cores of a GPU's NUMA node that this process may use; all that it may use where those are
    not known.
    """
    usable = frozenset(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # as of "cpu"
        file = Path("/sys/bus/pci/devices", bus_id(int(device.partition(":")[2])), "local_cpulist")
        ranges = [part.partition("-") for part in file.read_text().strip().split(",")]
        beside = {
            core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)
        }
        return usable & beside or usable
    return usable


@contextmanager
def _processes(places: list[Place], run: RunOptions) -> Iterator[Crew]:
    """A process for each part, as many at a time as there are places. They end with this one,
    however it ends.
    """
    context, places_in_turn, crew = get_context("spawn"), cycle(places), list[Any]()

    def call(*work: Any) -> Any:
        (device, cores), (answer, theirs) = next(places_in_turn), context.Pipe()
        arguments = (theirs, cores, *work[:-1], replace(work[-1], device=device))
        crew.append(
            context.Process(target=_serve, args=arguments)
        )  # a daemon could start none that compile kernels
        crew[-1].start()
        theirs.close()
        try:
            return answer.recv()
        except (EOFError, OSError):
            return Nf4convError(
                "a worker process was killed, perhaps for want of memory; the same command resumes"
            )

    with ThreadPoolExecutor(len(places)) as threads:
        try:
            yield partial(threads.submit, call), len(places), run
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in crew:
                process.kill()


def _serve(driver: Connection, cores: frozenset[int], *work: Any) -> None:
    """Carry out a part in a process of its own, which ends with the driver."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # from a terminal it reaches all processes; the driver answers it
    os.sched_setaffinity(0, cores)  # before there are threads, and memory of theirs
    threading.Thread(target=lambda: os._exit(driver.poll(None)), daemon=True).start()
    driver.send(_part(*work))


@contextmanager
def _ray_tasks(run: RunOptions) -> Iterator[Crew]:
    """Tasks of the cluster that RAY_ADDRESS names, or else of one on this machine, which ends with
    this process.

    A task takes a GPU, or else up to eight cores; four for each that fits in let a slower host
    carry out fewer.
    """
    try:
        import ray
    except ImportError as error:
        raise PlanError("--ray needs one more package: pip install 'nf4conv[ray]'") from error
    stopping = signal.getsignal(signal.SIGTERM)
    with redirect_stdout(sys.stderr):  # what Ray has to say is no result
        try:
            ray.init(log_to_driver=False, configure_logging=False)
            with suppress(ValueError):  # in another thread than the first
                signal.signal(signal.SIGTERM, stopping)  # Ray's answer to it is a page of its stack
            hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            device = (
                "cuda" if run.device != "cpu" and any("GPU" in host for host in hosts) else "cpu"
            )
            kind = {"cuda": "GPU", "cpu": "CPU"}[device]
            hosts = [host for host in hosts if host.get(kind, 0) >= 1]
            if not hosts or run.device not in ("auto", device):
                raise PlanError(
                    f"--ray --device {run.device}: no host of the cluster has such a device"
                )
            cores = max(
                1, min(8, *(int(host.get("CPU", 0) // host.get("GPU", 1)) for host in hosts))
            )
            fitting = sum(int(host[kind] // (cores if device == "cpu" else 1)) for host in hosts)
            task = ray.remote(num_cpus=cores, num_gpus=int(device == "cuda"))(_part)
            each = replace(run, ray=False, device=device, workers=run.workers or cores)
            yield lambda *work: task.remote(*work).future(), 4 * fitting, each
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise Nf4convError(f"Ray: {str(error).strip().splitlines()[0]}") from error
        finally:
            ray.shutdown()
