"""read ▸ codec ▸ write, by a few workers that each do all three: the bounded loop that every command shares.

A worker takes the next task, reads its bytes into its own buffer, computes on the device, writes the result to its
place, and takes the next. While one waits for the disk another computes and a third writes, so reading, computing and
writing overlap without queues between them, and memory is bounded by the workers' buffers, not by the model. Positional
reads and writes into files whose layout is planned make the order of the workers irrelevant to the result.

On CUDA each worker has a pinned buffer in each direction and a stream of its own; on the CPU the buffer is where the
computation happens, and each worker computes on one thread.
"""

import os
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import torch

from nf4conv.checkpoint.reader import Reader
from nf4conv.checkpoint.writer import ShardWriter
from nf4conv.errors import Nf4convError, PlanError
from nf4conv.options import RunOptions

LARGEST_PIECE = 32 * 2**20
"""Bytes. Larger pieces gain nothing: the cost per piece is already below 1 % (benchmarks/results)."""


_CUDA_WORKERS: Final = 8
_MAXRSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024


class Task(Protocol):
    """A piece of work that no other task depends on."""

    def run(self, worker: "Worker") -> None: ...


class Worker:
    """What one thread works with: buffers, a stream, and where its time went.

    Attributes:
        device: where tensors are computed.
        seconds: time spent by activity: "read", "encode", "write".
    """

    def __init__(self, device: torch.device, reader: Reader, piece: int, advance: Callable[[int], None]) -> None:
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._reader = reader
        self._advance = advance
        self._cuda = device.type == "cuda"
        self._input = torch.empty(piece, dtype=torch.uint8, pin_memory=self._cuda)
        self._output = torch.empty(piece if self._cuda else 0, dtype=torch.uint8, pin_memory=self._cuda)
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]

    def on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    @contextmanager
    def timed(self, activity: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[activity] += time.perf_counter() - start

    def read(self, ranges: Sequence[tuple[Path, int, int]]) -> list[torch.Tensor]:
        """The bytes of some file ranges, on the device.

        Args:
            ranges: (file, start, stop) of each.

        Returns:
            One uint8 tensor for each range, aligned to 64 bytes; on the CPU they are the worker's own buffer and live
            until the next call. Ranges larger than the buffer (`aligned` and summed) get one of their own.
        """
        positions = list(accumulate((aligned(stop - start) for _, start, stop in ranges), initial=0))
        host = self._input[: positions[-1]]
        if positions[-1] > self._input.numel():
            host = torch.empty(positions[-1], dtype=torch.uint8)
        self._fill(host, ranges, positions)
        buffer = host.to(self.device, non_blocking=True)
        return [
            buffer[position : position + stop - start]
            for (_, start, stop), position in zip(ranges, positions, strict=False)
        ]

    def copy(self, file: Path, start: int, stop: int, shard: ShardWriter, offset: int) -> None:
        """Copy bytes from a file to a shard without a detour over the device; at most a piece."""
        host = self._input[: stop - start]
        self._fill(host, [(file, start, stop)], [0])
        with self.timed("write"):
            shard.write(offset, host.numpy().data)

    def _fill(self, host: torch.Tensor, ranges: Sequence[tuple[Path, int, int]], positions: Sequence[int]) -> None:
        with self.timed("read"):
            view = host.numpy().data
            for (file, start, stop), position in zip(ranges, positions, strict=False):
                self._reader.read_into(file, start, view[position : position + stop - start])
        self._advance(sum(stop - start for _, start, stop in ranges))

    def write(self, writes: Sequence[tuple[ShardWriter, int, torch.Tensor]]) -> None:
        """Write tensors to their places.

        Args:
            writes: (shard, offset in its data, contiguous tensor of any dtype on the device or the CPU).
        """
        with self.timed("encode"):
            staged = [
                (shard, offset, host) for (shard, offset, _), host in zip(writes, self._fetch(writes), strict=True)
            ]
        with self.timed("write"):
            for shard, offset, host in staged:
                shard.write(offset, host.numpy().data)

    def _fetch(self, writes: Sequence[tuple[ShardWriter, int, torch.Tensor]]) -> list[torch.Tensor]:
        """The tensors' bytes on the host; waits for the device."""
        fetched = []
        position = 0
        for _, _, tensor in writes:
            raw = tensor.reshape(-1).view(torch.uint8)
            if raw.device.type == "cuda":
                fits = position + raw.numel() <= self._output.numel()
                room = self._output[position : position + raw.numel()] if fits else torch.empty_like(raw, device="cpu")
                position += raw.numel() if fits else 0
                raw = room.copy_(raw, non_blocking=True)
            fetched.append(raw)
        if self._stream is not None:
            self._stream.synchronize()
        return fetched


class Pipeline:
    """Runs tasks on a device with bounded memory.

    Args:
        device: where to compute.
        workers: threads.
        buffer_size: bytes of host input buffers, all workers together.
        advance: told how many source bytes have been read, from any thread.

    Attributes:
        piece: bytes that a worker reads at a time.
        elapsed: wall-clock seconds spent running tasks.
        seconds: time spent by activity, summed over the workers.
    """

    def __init__(self, device: torch.device, *, workers: int, buffer_size: int, advance: Callable[[int], None]) -> None:
        self.device = device
        self.piece = piece_size(buffer_size, workers)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.elapsed = 0.0
        self.workers = workers
        self.advance = advance

    def run(self, tasks: Iterable[Task]) -> None:
        """Run all tasks; the first error stops the others and is raised.

        An interrupt stops the workers after the piece in hand.
        """
        started = time.perf_counter()
        crew = _Crew(tasks)
        with Reader() as reader:
            threads = [
                threading.Thread(target=self._work, args=(crew, reader), name=f"nf4conv-{number}", daemon=True)
                for number in range(self.workers)
            ]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    while thread.is_alive():
                        thread.join(0.2)  # with a timeout, so that signals are handled meanwhile
            except BaseException:
                crew.stop(None)
                for thread in threads:
                    thread.join()
                raise
        if crew.error is not None:
            raise crew.error
        self.elapsed += time.perf_counter() - started

    def memory(self) -> "MemoryUse":
        """The most memory used so far: of this process on the host, and of torch on the device."""
        cuda = self.device.type == "cuda"
        return MemoryUse(
            host=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT,
            device=torch.cuda.max_memory_reserved(self.device) if cuda else 0,
        )

    def _work(self, crew: "_Crew", reader: Reader) -> None:
        try:
            if self.device.type == "cpu":
                torch.set_num_threads(1)  # of this thread only: the workers are the parallelism
            worker = Worker(self.device, reader, self.piece, self.advance)
            with worker.on_stream(), torch.inference_mode():
                for task in crew:
                    task.run(worker)
            with crew.lock:
                for activity, seconds in worker.seconds.items():
                    self.seconds[activity] += seconds
        except torch.OutOfMemoryError as error:
            crew.stop(Nf4convError(f"{self.device}: out of memory; try a smaller --buffer-size or --device cpu"), error)
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            crew.stop(error)


def open_pipeline(run: RunOptions, advance: Callable[[int], None]) -> Pipeline:
    """A pipeline as the user asked for it.

    Raises:
        PlanError: the device does not exist, or the numbers make no sense.
    """
    device = _device(run.device)
    if run.workers < 0 or run.buffer_size <= 0:
        raise PlanError("--workers and --buffer-size must be positive")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = run.workers or (min(cores, _CUDA_WORKERS) if device.type == "cuda" else cores)
    return Pipeline(device, workers=workers, buffer_size=run.buffer_size, advance=advance)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    prefix, _, index = name.partition(":")
    if prefix != "cuda" or (index and not index.isdecimal()):
        raise PlanError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    found = torch.cuda.device_count()
    if int(index or 0) >= found:
        raise PlanError(f"--device {name}: torch finds {found} CUDA devices on this machine")
    return torch.device("cuda", int(index or 0))


class MemoryUse(NamedTuple):
    """Bytes."""

    host: int
    device: int


class _Crew:
    """What the workers share: the tasks still to do and the first error."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self._tasks = iter(tasks)
        self._stopped = False

    def __iter__(self) -> Iterator[Task]:
        while True:
            with self.lock:
                if self._stopped:
                    return
                task = next(self._tasks, None)
            if task is None:
                return
            yield task

    def stop(self, error: BaseException | None, cause: BaseException | None = None) -> None:
        with self.lock:
            self._stopped = True
            if self.error is None and error is not None:
                error.__cause__ = cause if cause is not None else error.__cause__
                self.error = error


def aligned(nbytes: int) -> int:
    """The room that a range of this many bytes takes in a worker's buffer."""
    return nbytes + -nbytes % 64


def piece_size(buffer_size: int, workers: int) -> int:
    """Bytes that a worker reads at a time: a multiple of 64 KiB, so that pieces end at block boundaries."""
    piece = min(buffer_size // workers, LARGEST_PIECE)
    return max(piece - piece % 2**16, 2**16)
