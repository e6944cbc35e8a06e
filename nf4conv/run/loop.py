"""Runs the bounded loop that every command shares: read ▸ codec ▸ write.

A few workers each do all three.

A worker takes the next task, reads its bytes into its own buffer, computes on the device, writes
the result to its place, and takes the next. While one waits for the disk another computes and a
third writes, so reading, computing and writing overlap without queues between them, and memory is
bounded by the workers' buffers, not by the model. Positional reads and writes into files whose
layout is planned make the order of the workers irrelevant to the result.

A task computes on the device of its worker (worker.py, device/). No torch here.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from nf4conv.format.units import size
from nf4conv.options import MachineOptions
from nf4conv.run.worker import Activity, Backend, Worker
from nf4conv.sources.reader import Reader
from nf4conv.system.background import Background, outlast
from nf4conv.system.machine import usable_cores

_log: Final = logging.getLogger(__name__)

LARGEST_PIECE: Final = 32 * 2**20  # bytes. Larger pieces gain nothing

_CUDA_WORKERS: Final = 8

Task: TypeAlias = Callable[[Worker], None]
"""A piece of work that no other task depends on."""


@dataclass(eq=False)
class Pipeline:
    """Runs tasks with bounded memory.

    Every worker opens the backend before its first task, and reads into its buffers; without one,
    it reads into plain memory.
    """

    backend: Backend | None  # what tasks compute on
    workers: int  # threads
    buffer_size: int  # bytes of host buffers for reading, all workers together
    advance: Callable[[int], None]  # told how many source bytes have been read, from any thread
    elapsed: float = 0.0  # seconds from the first task to the end of the last
    # where the time of all workers went
    seconds: defaultdict[Activity, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def piece(self) -> int:
        """Bytes that a worker reads at a time."""
        return piece_size(self.buffer_size, self.workers)

    def run(self, tasks: Iterable[Task], reader: Reader | None = None) -> None:
        """Runs all tasks, which are taken one by one, in their order.

        The first error stops the others and is raised. An interrupt stops the workers after the
        piece in hand. However the call ends, no worker is left. The caller closes the reader, which
        local files do not need.
        """
        with nullcontext(reader) if reader is not None else Reader() as opened:
            self._run(tasks, opened)

    def _run(self, tasks: Iterable[Task], reader: Reader) -> None:
        """Does all tasks; raises what one of them raises, when all threads have stopped."""
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

    def _work(self, crew: "_Crew", reader: Reader) -> None:
        """Runs tasks in this thread until none is left."""
        try:
            worker = Worker(reader, self.piece, self.advance)
            with ExitStack() as opened:
                if self.backend is None:
                    worker.buffer = memoryview(bytearray(self.piece))
                else:
                    worker.device = opened.enter_context(self.backend.open(worker))
                for task in crew:
                    task(worker)
            with crew.lock:
                for activity, seconds in worker.seconds.items():
                    self.seconds[activity] += seconds
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            crew.stop(error)


class _Crew:
    """Holds what the workers share: the tasks still to do and the first error."""

    def __init__(self, tasks: Iterable[Task], reader: Reader) -> None:
        self._reader = reader
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.started = 0.0
        self._tasks = iter(tasks)
        self._stopped = False

    def __iter__(self) -> Iterator[Task]:
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
    backend: Backend | None, run: MachineOptions, advance: Callable[[int], None]
) -> Pipeline:
    """Makes a pipeline with as many workers and as much memory as the user asked for."""
    workers = run.workers
    if workers == 0:
        workers = len(usable_cores())
        if backend is None or backend.name != "cpu":  # a few keep a GPU busy, or the disk
            workers = min(workers, _CUDA_WORKERS)
    pipeline = Pipeline(backend, workers, run.buffer_size, advance)
    _log.info("%d threads, each with a buffer of %s", workers, size(pipeline.piece))
    return pipeline


def piece_size(buffer_size: int, workers: int) -> int:
    """Returns how many bytes a worker reads at a time.

    A multiple of 64 KiB, so that pieces end at block boundaries.
    """
    piece = min(buffer_size // workers, LARGEST_PIECE)
    return max(piece - piece % 2**16, 2**16)
