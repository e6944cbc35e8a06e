"""The bounded loop that every command shares: read ▸ codec ▸ write, by a few workers that each do
all three.

A worker takes the next task, reads its bytes into its own buffer, computes on the device, writes
the result to its place, and takes the next. While one waits for the disk another computes and a
third writes, so reading, computing and writing overlap without queues between them, and memory is
bounded by the workers' buffers, not by the model. Positional reads and writes into files whose
layout is planned make the order of the workers irrelevant to the result.

How a worker computes is its engine's business: with_torch/ or without_torch/. No torch here.
"""

import os
import resource
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from nf4conv.errors import PlanError
from nf4conv.options import RunOptions
from nf4conv.output.writer import ShardWriter
from nf4conv.report.tolerance import check_tolerance
from nf4conv.sources.reader import Reader
from nf4conv.sources.tensors import FileRange
from nf4conv.system.background import Background, outlast


class Activity(Enum):
    """What a worker spends its time on; the value is its name in reports."""

    READ = "read"
    COMPUTE = "compute"
    WRITE = "write"


LARGEST_PIECE: Final = 32 * 2**20  # bytes. Larger pieces gain nothing

_CUDA_WORKERS: Final = 8


class Worker:
    """What one thread works with: a reader of the source, host memory to read into, a piece long,
    and where time went.

    `advance` is told how many source bytes have been read.
    """

    def __init__(self, reader: Reader, buffer: memoryview, advance: Callable[[int], None]) -> None:
        self.seconds: defaultdict[Activity, float] = defaultdict(float)
        self.reader = reader
        self._buffer = buffer
        self.advance = advance

    @contextmanager
    def timed(self, activity: Activity) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[activity] += time.perf_counter() - start

    def copy(self, file: Path, start: int, stop: int, shard: ShardWriter, offset: int) -> None:
        """Copy bytes from a file to a shard without a detour over the device; at most a piece."""
        host = self._buffer[: stop - start]
        self.fill(host, [(file, start, stop)], [0])
        with self.timed(Activity.WRITE):
            shard.write(offset, host)

    def fill(self, host: memoryview, ranges: Sequence[FileRange], positions: Sequence[int]) -> None:
        """Read file ranges to their positions in host memory."""
        with self.timed(Activity.READ):
            for (file, start, stop), position in zip(ranges, positions, strict=False):
                self.reader.read_into(file, start, host[position : position + stop - start])
        self.advance(sum(stop - start for _, start, stop in ranges))


W_co = TypeVar("W_co", bound=Worker, covariant=True)
W = TypeVar("W", bound=Worker)

Task = Callable[[W], None]  # a piece of work that no other task depends on


class Engine(Protocol[W_co]):
    """How workers compute."""

    @property
    def device(self) -> str:
        """Such as "cpu" or "cuda:0"."""

    def worker(
        self, reader: Reader, piece: int, advance: Callable[[int], None]
    ) -> AbstractContextManager[W_co]:
        """A worker for the calling thread, which alone uses it, with buffers for `piece` bytes."""

    def device_memory(self) -> int:
        """The most bytes held on the device so far."""


class MemoryUse(NamedTuple):
    """The most memory used so far: resident in this process, and held on the device; bytes."""

    host: int
    device: int


@dataclass(eq=False)
class Pipeline(Generic[W]):
    """Runs tasks on an engine with bounded memory."""

    engine: Engine[W]  # how to compute
    workers: int  # threads
    buffer_size: int  # bytes of host buffers for reading, all workers together
    advance: Callable[[int], None]  # told how many source bytes have been read, from any thread
    elapsed: float = (
        0.0  # wall-clock seconds from the first task to the end of the last, workers being ready
    )
    seconds: defaultdict[Activity, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # of all workers

    @property
    def piece(self) -> int:
        """Bytes that a worker reads at a time."""
        return piece_size(self.buffer_size, self.workers)

    def run(self, tasks: Iterable[Task[W]], reader: Reader | None = None) -> None:
        """Run all tasks; the first error stops the others and is raised.

        They are taken one by one, in their order. The caller closes the reader; None reads local
        files. An interrupt stops the workers after the piece in hand. However the call ends, no
        worker is left.
        """
        with nullcontext(reader) if reader is not None else Reader() as reader:
            crew = _Crew(tasks, reader)
            threads = [
                Background(partial(self._work, crew, reader), f"nf4conv-{n}")
                for n in range(self.workers)
            ]
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.wait()
            except BaseException:
                outlast(threads, partial(crew.stop, None))
                raise
        if crew.error is not None:
            raise crew.error
        self.elapsed += time.perf_counter() - crew.started

    def memory(self) -> MemoryUse:
        return MemoryUse(_peak_resident(), self.engine.device_memory())

    def _work(self, crew: "_Crew[W]", reader: Reader) -> None:
        try:
            with self.engine.worker(reader, self.piece, self.advance) as worker:
                for task in crew:
                    task(worker)
            with crew.lock:
                for activity, seconds in worker.seconds.items():
                    self.seconds[activity] += seconds
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            crew.stop(error)


class _Crew(Generic[W]):
    """What the workers share: the tasks still to do and the first error."""

    def __init__(self, tasks: Iterable[Task[W]], reader: Reader) -> None:
        self._reader = reader
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.started = 0.0
        self._tasks = iter(tasks)
        self._stopped = False

    def __iter__(self) -> Iterator[Task[W]]:
        while True:
            with self.lock:
                if self._stopped:
                    return
                self.started = self.started or time.perf_counter()
                task = next(self._tasks, None)
            if task is None:
                return
            yield task

    def stop(self, error: BaseException | None) -> None:
        with self.lock:
            self._stopped = True
            if self.error is None:
                self.error = error
        self._reader.interrupt()


def make_pipeline(
    engine: Engine[W], run: RunOptions, advance: Callable[[int], None]
) -> Pipeline[W]:
    """A pipeline with as many workers and as much memory as the user asked for; a PlanError if that
    makes no sense.
    """
    if run.workers < 0 or run.buffer_size <= 0:
        raise PlanError("--workers and --buffer-size must be positive")
    check_tolerance(run.tolerance)
    workers = run.workers or (cores() if engine.device == "cpu" else min(cores(), _CUDA_WORKERS))
    return Pipeline(engine, workers=workers, buffer_size=run.buffer_size, advance=advance)


def cores() -> int:
    """Of the CPU, those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


T = TypeVar("T")


def interleave(groups: Iterable[Iterable[T]], width: int) -> Iterator[T]:
    """Items of `width` groups in turn; when one is exhausted the next group takes its place."""
    waiting = iter(groups)
    active = deque(iter(group) for group in islice(waiting, width))
    while active:
        group = active.popleft()
        for item in group:
            yield item
            active.append(group)
            break
        else:
            active.extend(iter(group) for group in islice(waiting, 1))


def batches(
    items: Iterable[T],
    size: Callable[[T], int],
    room: int,
    kind: Callable[[T], object],
    most: int | None = None,
) -> Iterator[tuple[T, ...]]:
    """Neighbours that are taken together: at most so many items of one kind whose sizes add up to
    no more than a room.

    An item that is larger comes alone.
    """
    batch: list[T] = []
    left = room
    for item in items:
        needed = size(item)
        if batch and (needed > left or len(batch) == most or kind(item) != kind(batch[0])):
            yield tuple(batch)
            batch, left = [], room
        batch.append(item)
        left -= needed
    if batch:
        yield tuple(batch)


def aligned(nbytes: int) -> int:
    """The room that a range of this many bytes takes in a worker's buffer."""
    return nbytes + -nbytes % 64


def piece_size(buffer_size: int, workers: int) -> int:
    """Bytes that a worker reads at a time: a multiple of 64 KiB, so that pieces end at block
    boundaries.
    """
    piece = min(buffer_size // workers, LARGEST_PIECE)
    return max(piece - piece % 2**16, 2**16)


def _peak_resident() -> int:
    # getrusage would do, but on Linux its figure includes what the parent held when it started this
    # process
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
