"""A shard that is being written, and what its tasks tell it."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nf4conv.format.layout import Format
from nf4conv.output.writer import ShardWriter
from nf4conv.plan.jobs import CopyJob, Entry, PackJob, Shard, component_name
from nf4conv.report.measured import WeightResult
from nf4conv.run.loop import Task
from nf4conv.run.worker import Worker, Writable
from nf4conv.sources.cutting import Piece
from nf4conv.sources.reader import Reader

if TYPE_CHECKING:  # importing huggingface_hub takes a while
    from nf4conv.sources.remote.stream import ShardStream


class Destination(Writable, Protocol):
    """Takes what the tasks of a shard make: a file that is written, or a proof that compares."""

    @property
    def format(self) -> Format:
        """The format that weights are packed in."""

    @property
    def measured(self) -> Mapping[str, WeightResult] | None:
        """The weights whose errors are measured, by name; None if that is not asked."""

    def finish_weights(
        self, worker: Worker, jobs: Sequence[PackJob], blobs: Mapping[str, bytes]
    ) -> None:
        """Takes the JSON blobs of weights, by name, whose other components have been written."""

    def finish_copy(self, worker: Worker, job: CopyJob, piece: Piece) -> None:
        """Takes note that a kept tensor, or a piece of it, has been written."""

    def count_task(self) -> None:
        """Takes note that a task is done, after all that it has written is finished."""


class Audit(Protocol):
    """Looks at what has been written to a shard, see audit.py."""

    def check_weights(
        self,
        worker: Worker,
        progress: "ShardProgress",
        jobs: Sequence[PackJob],
        blobs: Mapping[str, bytes],
    ) -> None:
        """Looks at weights, all of which but their JSON blobs is in the shard's file."""

    def check_copy(
        self, worker: Worker, progress: "ShardProgress", job: CopyJob, piece: Piece
    ) -> None:
        """Looks at a kept tensor, or a piece of it."""


@dataclass(eq=False)
class ShardProgress:
    """A shard being written: its file, the JSON blobs so far, and how many tasks are left.

    Attributes:
        shard: what is to be in the file.
        format: how weights are packed.
        writer: the file.
        finished: called with the size of the file once it is complete.
        audit: what looks at everything that has been written; None for nothing.
        reader: by which the audit reads the file.
    """

    shard: Shard
    format: Format
    writer: ShardWriter
    finished: Callable[[int], None]
    audit: Audit | None = None
    reader: Reader | None = None
    _blobs: dict[str, bytes] = field(default_factory=dict)
    _left: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def measured(self) -> None:
        return None

    def expect(self, tasks: int) -> None:
        """Sets how many tasks fill this shard."""
        self._left = tasks

    def write(self, offset: int, data: memoryview) -> None:
        self.writer.write(offset, data)

    def finish_weights(
        self, worker: Worker, jobs: Sequence[PackJob], blobs: Mapping[str, bytes]
    ) -> None:
        if self.audit is not None:
            self.audit.check_weights(worker, self, jobs, blobs)
        with self._lock:
            self._blobs.update(blobs)

    def finish_copy(self, worker: Worker, job: CopyJob, piece: Piece) -> None:
        if self.audit is not None:
            self.audit.check_copy(worker, self, job, piece)

    def count_task(self) -> None:
        """Counts a task as done; the last one completes the file."""
        with self._lock:
            self._left -= 1
            is_complete = self._left == 0
        if is_complete:
            self._complete()

    def _complete(self) -> None:
        entries = list(self.shard.entries())
        tail = bytearray()
        for job in self.shard.jobs:
            if isinstance(job, PackJob):
                blob = self._blobs[job.name]
                name = component_name(job, job.components[-1])
                start = self.shard.fixed_size + len(tail)
                entries.append(Entry(name, "U8", (len(blob),), start, start + len(blob)))
                tail += blob
        if self.reader is not None:
            # the audit has left it open, and Windows gives no open file another name
            self.reader.forget(self.writer.place(0)[0])
        self.finished(self.writer.finish(entries, bytes(tail)))


@dataclass(frozen=True)
class ShardTask:
    """A task of a shard."""

    file: Path  # the source file that most of what it reads is in
    run: Task

    def __call__(self, worker: Worker) -> None:
        self.run(worker)


def streamed(shards: Iterable[Sequence[ShardTask]], stream: "ShardStream") -> Iterator[Task]:
    """Yields the tasks of one shard after the other, those of each by source file.

    Shards, too, come in the files' order. Each task waits for its file, and the last one of a file
    lets it go.
    """
    for tasks in shards:
        for task in sorted(tasks, key=lambda task: stream.order[task.file]):
            stream.expect(task.file)
            yield partial(_run_streamed, task, stream)
    stream.expect(None)


def _run_streamed(task: ShardTask, stream: "ShardStream", worker: Worker) -> None:
    """Runs a task whose source file may have to be fetched first."""
    stream.wait_for(task.file)
    try:
        task(worker)
    finally:
        stream.done(task.file)
