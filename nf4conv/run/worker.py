"""Follows one thread of a run: what it reads with, where its time goes, what it computes on, and
what takes the bytes that it makes.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from pathlib import Path
from typing import Protocol

from nf4conv.format.layout import Format
from nf4conv.plan.jobs import CopyJob, PackJob
from nf4conv.report.measured import WeightResult
from nf4conv.run.device.protocol import Device
from nf4conv.sources.cutting import Piece
from nf4conv.sources.reader import Reader
from nf4conv.sources.tensors import FileRange


class Activity(Enum):
    """Names what a worker spends its time on, as reports do."""

    READ = "read"
    COMPUTE = "compute"
    WRITE = "write"


class Writable(Protocol):
    """Takes the bytes that a worker has made: a shard's file, or what compares them."""

    def write(self, offset: int, data: memoryview) -> None:
        """Takes bytes for a place, which is counted from the first byte of the shard's data."""


class Destination(Writable, Protocol):
    """Takes what the tasks of a shard make: a file that is written, or a proof that compares."""

    @property
    def format(self) -> Format:
        """The format that weights are packed in."""

    @property
    def measured(self) -> Mapping[str, WeightResult] | None:
        """The weights whose errors are measured, by name; None if that is not asked."""

    def finish_weights(
        self, worker: "Worker", jobs: Sequence[PackJob], blobs: Mapping[str, bytes]
    ) -> None:
        """Takes the JSON blobs of weights, by name, whose other components have been written."""

    def finish_copy(self, worker: "Worker", job: CopyJob, piece: Piece) -> None:
        """Takes note that a kept tensor, or a piece of it, has been written."""


class Backend(Protocol):
    """A device as all workers of a run share it; each of them opens it before its first task."""

    @property
    def name(self) -> str:
        """The device as reports name it, such as "cpu" or "cuda:0"."""

    def open(self, worker: "Worker") -> AbstractContextManager[Device]:
        """Opens the device for the calling thread, whose worker gets its buffer."""

    def device_memory(self) -> int:
        """Returns the most bytes that were held on the device so far."""

    def weight_room(self, job: PackJob) -> int:
        """Returns how many bytes of a piece a weight takes while it is packed."""

    def weight_kind(self, job: PackJob) -> object:
        """Returns what weights have in common that can be packed in one call."""

    def copy_elements(self, job: CopyJob, piece: int) -> int:
        """Returns how many elements of a decoded or cast tensor fit into `piece` bytes."""


class Worker:
    """Holds what one thread works with.

    It reads `piece` bytes at a time, into a buffer that is as long or longer, and tells `advance`
    how many bytes of the source it has read. A pipeline that computes gives it a device.
    """

    device: Device

    def __init__(self, reader: Reader, piece: int, advance: Callable[[int], None]) -> None:
        self.reader = reader
        self.piece = piece
        self.advance = advance
        self.buffer = memoryview(b"")
        self.seconds: defaultdict[Activity, float] = defaultdict(float)

    @contextmanager
    def timed(self, activity: Activity) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[activity] += time.perf_counter() - start

    def copy(self, file: Path, start: int, stop: int, destination: Writable, offset: int) -> None:
        """Copies at most a piece from a file to a destination, without a detour over the device."""
        host = self.buffer[: stop - start]
        self.fill(host, [(file, start, stop)], [0])
        with self.timed(Activity.WRITE):
            destination.write(offset, host)

    def fill(self, host: memoryview, ranges: Sequence[FileRange], positions: Sequence[int]) -> None:
        """Reads file ranges to their positions in host memory."""
        with self.timed(Activity.READ):
            for (file, start, stop), position in zip(ranges, positions, strict=True):
                self.reader.read_into(file, start, host[position : position + stop - start])
        self.advance(sum(stop - start for _, start, stop in ranges))
