"""Carries out a run in parts: workers make them, and the last one makes the result whole.

Workers are processes of this host, one for each device, or tasks of a Ray cluster. Each plans for
itself, and makes its part as `--part I/N` does. The driver watches which shards are finished. An
error ends all workers. What Ray loses with a process or a host, Ray tries again.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, cast

from nf4conv import errors
from nf4conv.errors import Nf4convError, PlanError
from nf4conv.options import RunOptions, WritingOptions
from nf4conv.output.workspace import Workspace
from nf4conv.plan.parts import plan_part
from nf4conv.report.advice import tell_what_is_read
from nf4conv.report.results import RunReport, VerificationSummary, used_by
from nf4conv.run.checkpoint import ignore
from nf4conv.run.device.on_driver.driver import bus_id, device_count
from nf4conv.sources.record import read_record
from nf4conv.sources.unfinished import finished_shards
from nf4conv.system.machine import cores_beside, keep_to, usable_cores
from nf4conv.system.signals import (
    ignore_interrupts,
    interrupts_held_back,
    restore_stop_handler,
    stop_handler,
)

Made: TypeAlias = RunReport | Exception
"""The report of a part, or the error that ended it."""

Work: TypeAlias = tuple[Path, Callable[[], Any], Callable[..., RunReport], Path]
"""The first arguments of `make_part`, which are the same for all parts."""

_MOST_CORES: Final = 8  # of a task of Ray's: more gain nothing
_PARTS_PER_TASK: Final = 4  # so that a slower host carries out fewer


def carry_out(
    plan: Any,
    execute: Callable[[Any, Path, WritingOptions], RunReport],
    out: Path,
    options: WritingOptions,
) -> RunReport:
    """Has workers make all parts of a plan, and finishes the checkpoint.

    Args:
        plan: the plan.
        execute: carries out a plan, or the part of one, in one process.
        out: the output folder.
        options: how to use the machine.

    Raises:
        PlanError: the plan cannot be carried out in parts, there are no such devices, or Ray is
            not installed.
        Nf4convError: a worker died, or Ray failed.
    """
    if options.part is not None:
        raise PlanError(
            f"--part {options.part} is for one process: with --device cuda:N, on each GPU a part"
        )
    started = time.perf_counter()
    alone = replace(options, ray=False, device="cpu", overwrite=False, progress=None)
    work = (Path.cwd(), plan.again, execute, out)
    opened: AbstractContextManager[Crew]
    if options.ray:
        asked_by = "--ray"
        opened = open_ray(options, work)
    else:
        asked_by = f"--device {options.device}"
        places = find_places(options.device)
        alone = replace(alone, device=places[0].device)
        if len(places) == 1:
            return execute(plan, out, replace(options, device=places[0].device))
        opened = open_processes(places, work)
    plan_part(plan, replace(alone, part="1/1"), asked_by)  # refuses what has no parts
    tell_what_is_read(plan, options)
    with opened as crew:
        if options.overwrite:
            with Workspace(out, {}, overwrite=True) as emptied:
                emptied.complete({})
        reports = _make_parts(crew, plan, out, options)
    elapsed = time.perf_counter() - started
    # a run into a finished folder computes nothing, and reports what is there; each part has
    # verified its own shards
    if options.verify:
        alone = replace(alone, verify=False, tolerance=None)
    report = execute(plan, out, alone)
    if options.verify:
        verified = VerificationSummary.from_record((read_record(out) or {}).get("verified"))
        report = replace(report, verification=verified)
    return _joined(report, reports, elapsed, time.perf_counter() - started)


def _make_parts(crew: "Crew", plan: Any, out: Path, options: RunOptions) -> list[RunReport]:
    """Has the crew make all parts; raises the first error of a worker."""
    progress = options.progress or ignore
    count = min(crew.parts, plan.totals.shards)
    each = replace(options, ray=False, overwrite=False, progress=None)
    pending = set()
    for number in range(1, count + 1):
        pending.add(crew.submit(replace(each, part=f"{number}/{count}")))
    runs: list[RunReport] = []
    told = 0
    while pending:
        done, pending = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
        for future in done:
            report = future.result()
            if isinstance(report, Exception):
                raise report
            runs.append(report)
        # nothing is recorded any more once the last part has made the result whole
        read = max(_bytes_read(out, options.verify), told)
        progress(read - told)
        told = read
    rest = plan.output.bytes_to_read - told
    if options.verify:
        rest += plan.output.bytes_to_read + sum(
            path.stat().st_size for path in out.glob("*.safetensors")
        )
    progress(rest)
    return runs


def _bytes_read(out: Path, is_verified: bool) -> int:
    """Returns the bytes that have been read for the shards that are finished so far."""
    read = 0
    for shard in finished_shards(out).values():
        read += shard.source_bytes
        if is_verified:  # source and shard are read once more
            read += shard.source_bytes + shard.size
    return read


def _joined(whole: RunReport, runs: list[RunReport], elapsed: float, seconds: float) -> RunReport:
    """Puts the times and the memory of all parts into what came of the whole.

    They were made in the time `elapsed`; all of the run took `seconds`.
    """
    return replace(
        whole,
        already_complete=all(run.already_complete for run in runs),
        device=", ".join(sorted({run.device for run in runs})),
        seconds=seconds,
        shards_resumed=sum(run.shards_resumed for run in runs),
        pipeline_seconds=elapsed,
        host_baseline_bytes=max(run.host_baseline_bytes for run in runs),
        **used_by(runs),
    )


# --- workers ------------------------------------------------------------------------------------


class Crew(NamedTuple):
    """Knows workers: how many parts keep all of them busy, and how one is made to make a part."""

    parts: int
    submit: Callable[[RunOptions], "Future[Made]"]


def make_part(
    folder: Path,
    again: Callable[[], Any],
    execute: Callable[..., RunReport],
    out: Path,
    options: RunOptions,
) -> Made:
    """Makes a part in another process, to which all arguments travel.

    `folder` is where the user's relative paths start; `again` makes the plan anew, and `execute`
    carries it out. Returns the report, or an error that can travel, which Ray does not try again.
    """
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # the driver has a bar of its own
    with suppress(OSError):  # on another host the folder need not be there
        os.chdir(folder)
    try:
        plan = plan_part(again(), options)
        part = replace(plan.part, is_watched=True)
        return execute(replace(plan, part=part), out, replace(options, part=None))
    except Exception as error:  # noqa: BLE001 - the driver raises it again
        return _travelling(error)


def _travelling(error: Exception) -> Exception:
    """Returns an error as one that another process can read: of our kinds, or of Python's."""
    if type(error).__module__ == errors.__name__:
        return error
    for kind in type(error).__mro__:
        if kind.__module__ in (errors.__name__, "builtins"):
            break
    travelling: Exception = kind(str(error))
    return travelling


# --- processes of this host ---------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Names a device and the cores that feed it."""

    device: str
    cores: frozenset[int]


def find_places(device: str) -> list[Place]:
    """Returns the devices that are asked for, each with an even share of the cores beside it.

    Args:
        device: "cuda:all"; a list such as "cuda:0,cuda:1"; or "cpu,cpu", which means two
            processes on half of the cores each.

    Raises:
        PlanError: this machine does not have these devices.
    """
    gpus = [f"cuda:{number}" for number in range(device_count())]
    devices = gpus if device == "cuda:all" else device.split(",")
    is_cpu = set(devices) == {"cpu"}
    are_different = len(set(devices)) == len(devices)
    if not is_cpu and (not devices or not are_different or not set(devices) <= set(gpus)):
        raise PlanError(
            f"--device {device}: expected GPUs of this machine, each once: {gpus or 'it has none'}"
        )
    near = [_cores_beside(name) for name in devices]
    places = []
    for index, name in enumerate(devices):
        cores = near[index]
        # devices beside the same cores take every n-th of them
        turn = near[:index].count(cores)
        share = sorted(cores)[turn :: near.count(cores)]
        places.append(Place(name, frozenset(share) or cores))
    return places


def _cores_beside(device: str) -> frozenset[int]:
    """Returns the cores of a GPU's NUMA node that this process may use.

    Where Linux does not tell them, all that the process may use.
    """
    usable = usable_cores()
    number = device.partition(":")[2]
    if not number:  # "cpu"
        return usable
    return usable & cores_beside(bus_id(int(number))) or usable


@contextmanager
def open_processes(places: list[Place], work: Work) -> Iterator[Crew]:
    """Opens a crew of a process for each place; they end with this process, however it ends."""
    context = get_context("spawn")
    turns = cycle(places)
    processes: list[SpawnProcess] = []

    def submit(options: RunOptions) -> "Future[Made]":
        place = next(turns)
        mine = (*work, replace(options, device=place.device))
        answer, theirs = context.Pipe()
        # not a daemon, which could start no process to compile kernels
        process = context.Process(target=_serve, args=(theirs, place.cores, *mine))
        # it has no answer of its own to an interrupt before it runs `_serve`
        with interrupts_held_back():
            process.start()
        processes.append(process)
        theirs.close()
        return threads.submit(_receive, answer)

    with ThreadPoolExecutor(len(places)) as threads:
        try:
            yield Crew(len(places), submit)
        finally:
            for process in processes:
                process.kill()


def _receive(answer: Connection) -> Made:
    """Waits for the report of a process, or its error."""
    try:
        return cast("Made", answer.recv())
    except (EOFError, OSError):
        return Nf4convError(
            "a worker process was killed, perhaps for want of memory; the same command resumes"
        )


def _serve(driver: Connection, cores: frozenset[int], *work: Any) -> None:
    """Makes a part in a process of its own, which ends with the driver."""
    # an interrupt from a terminal reaches all processes; the driver answers it
    ignore_interrupts()
    keep_to(cores)  # before there are threads, and memory of theirs
    threading.Thread(target=_end_with, args=(driver,), daemon=True).start()
    driver.send(make_part(*work))


def _end_with(driver: Connection) -> None:
    """Ends this process as soon as the driver sends anything, or is gone."""
    os._exit(int(driver.poll(None)))


# --- tasks of a Ray cluster ---------------------------------------------------------------------


@contextmanager
def open_ray(run: RunOptions, work: Work) -> Iterator[Crew]:
    """Opens the cluster that RAY_ADDRESS names, or else one on this machine.

    The cluster on this machine ends with this process. Each task takes one GPU, or up to eight
    cores where there is none.

    Raises:
        PlanError: Ray is not installed, or no host of the cluster has such a device.
        Nf4convError: Ray failed.
    """
    try:
        import ray
    except ImportError as error:
        raise PlanError("--ray needs one more package: pip install 'nf4conv[ray]'") from error
    stopping = stop_handler()
    with redirect_stdout(sys.stderr):  # what Ray has to say is no result
        try:
            ray.init(log_to_driver=False, configure_logging=False)
            with suppress(ValueError):  # this is not the main thread
                restore_stop_handler(stopping)  # Ray's own answer is a page of its stack
            hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            yield _crew_of(ray, hosts, run, work)
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise Nf4convError(f"Ray: {str(error).strip().splitlines()[0]}") from error
        finally:
            ray.shutdown()


def _crew_of(ray: Any, hosts: list[dict[str, float]], run: RunOptions, work: Work) -> Crew:
    """Chooses what each task takes, given the resources of all hosts."""
    has_gpus = any("GPU" in host for host in hosts)
    device = "cuda" if has_gpus and run.device != "cpu" else "cpu"
    kind = "GPU" if device == "cuda" else "CPU"
    hosts = [host for host in hosts if host.get(kind, 0) >= 1]
    if not hosts or run.device not in ("auto", device):
        raise PlanError(f"--ray --device {run.device}: no host of the cluster has such a device")
    cores = _MOST_CORES
    for host in hosts:
        cores = min(cores, int(host.get("CPU", 0) // host.get("GPU", 1)))
    cores = max(1, cores)
    fitting = sum(int(host[kind] // (cores if device == "cpu" else 1)) for host in hosts)
    task = ray.remote(num_cpus=cores, num_gpus=int(device == "cuda"))(make_part)

    def submit(options: RunOptions) -> "Future[Made]":
        mine = replace(options, device=device, workers=run.workers or cores)
        future: Future[Made] = task.remote(*work, mine).future()
        return future

    return Crew(_PARTS_PER_TASK * fitting, submit)
