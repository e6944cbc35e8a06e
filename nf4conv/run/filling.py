"""Fills an opened folder: writes all shards, then the files that make it a checkpoint.

    space ▸ shard tasks ▸ auxiliary files ▸ index ▸ card, nf4conv.json ▸ config.json

config.json is last: it makes the folder a checkpoint.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from nf4conv.errors import VerificationError
from nf4conv.format import units
from nf4conv.format.layout import Format
from nf4conv.options import RunOptions
from nf4conv.output.folder import OutputFolder
from nf4conv.output.shared_folder import SharedFolder
from nf4conv.output.workspace import Workspace
from nf4conv.output.writer import ShardWriter
from nf4conv.plan.fingerprint import require_unchanged
from nf4conv.plan.jobs import CopyJob, Entry, PackJob, Shard, component_name, source_files
from nf4conv.plan.writing import WritingPlan
from nf4conv.report.results import VerificationSummary
from nf4conv.run.loop import Pipeline, Task
from nf4conv.run.pieces import interleave
from nf4conv.run.tasks.shard import ShardTask, shard_tasks
from nf4conv.run.worker import Backend, Worker
from nf4conv.sources.cutting import Piece
from nf4conv.sources.reader import Reader, read_chunks
from nf4conv.system.files import let_go
from nf4conv.system.machine import total_memory

if TYPE_CHECKING:
    from nf4conv.run.audit import AuditOfWritten
    from nf4conv.sources.remote.stream import ShardStream

_log: Final = logging.getLogger(__name__)

Card: TypeAlias = Callable[[int, VerificationSummary | None], str | None]
"""Writes the result's README.md, given the bytes of its weight files and what verification found;
None for a result without one."""

_SHARDS_AT_A_TIME: Final = 8
"""Measured on Linux: writes to one file do not overlap (2.5 GB/s from 8 threads, tmpfs or disk).
Writes to several files do (8.5 GB/s to 4, 17 GB/s to 8). With more, an interrupted run would have
more to do again."""


@dataclass(eq=False)
class _ShardProgress:
    """A shard being written: its file, the JSON blobs so far, and how many tasks are left."""

    shard: Shard
    format: Format
    writer: ShardWriter
    audit: "AuditOfWritten | None"  # looks at everything that has been written
    reader: Reader  # by which the audit reads the file
    finish: Callable[["_ShardProgress", int], None]  # takes the size of the file that is complete
    left: int = 0  # tasks
    _blobs: dict[str, bytes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def measured(self) -> None:
        return None

    def write(self, offset: int, data: memoryview) -> None:
        self.writer.write(offset, data)

    def finish_weights(
        self, worker: Worker, jobs: Sequence[PackJob], blobs: Mapping[str, bytes]
    ) -> None:
        if self.audit is not None:
            self.audit.check_weights(worker, jobs, blobs)
        with self._lock:
            self._blobs.update(blobs)

    def finish_copy(self, worker: Worker, job: CopyJob, piece: Piece) -> None:
        if self.audit is not None:
            self.audit.check_copy(worker, job, piece)

    def run(self, task: Task, worker: Worker) -> None:
        """Runs a task of the shard; the last one that is done completes the file."""
        task(worker)
        with self._lock:
            self.left -= 1
            is_complete = self.left == 0
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
        if self.audit is not None:
            # the audit has left it open, and Windows gives no open file another name
            self.reader.forget(self.writer.place(0)[0])
        self.finish(self, self.writer.finish(entries, bytes(tail)))


@dataclass(eq=False)
class Filling:
    """Fills an opened folder."""

    plan: WritingPlan
    folder: Workspace | SharedFolder
    backend: Backend
    pipeline: Pipeline
    announce: Callable[[str, Path], None]
    run: RunOptions

    def write_shards(self) -> None:
        """Writes all shards that are not finished yet."""
        self.folder.check_space(self.plan.space_needed(self.folder.finished))
        with _open_reader(self.plan, self.folder) as reader, ExitStack() as writers:
            self.pipeline.run(self._tasks(writers, reader), reader)
        self.folder.remove_downloads()

    def write_last_files(self, card: Card, verification: VerificationSummary | None) -> None:
        """Copies the auxiliary files and writes those that make the folder a checkpoint."""
        plan, folder = self.plan, self.folder
        require_unchanged(plan.source, "while it was read; start anew with --overwrite")
        made = plan.source.made
        for name in plan.source.auxiliary:
            if made is None:
                chunks = read_chunks(plan.source.folder / name)
            else:
                chunks = iter(made[str(name)]())
            folder.write(str(name), chunks)
        folder.finish(
            stem=plan.source.stem,
            card=card(folder.size, verification),
            record=plan.record,
            config=plan.config_bytes,
            verified=None if verification is None else asdict(verification),
        )

    def _tasks(self, writers: ExitStack, reader: Reader) -> Iterator[Task]:
        """Returns all tasks, of a few shards in turn.

        One file takes the writes of one thread at a time.
        """
        self._count_finished()
        shards = self._shard_tasks(writers, reader)
        if not self.plan.source.absent:
            return (task.run for task in interleave(shards, _SHARDS_AT_A_TIME))
        return _streamed(shards, cast("ShardStream", reader))

    def _count_finished(self) -> None:
        """Tells of the shards that an earlier run has finished."""
        for shard in self.plan.output.shards:
            if shard.name in self.folder.finished:
                self.pipeline.advance(shard.source_bytes)
                self.announce(shard.name, self.folder.out / shard.name)

    def _shard_tasks(self, writers: ExitStack, reader: Reader) -> Iterator[Sequence[ShardTask]]:
        finished = set(self.folder.finished)
        for shard in self.plan.output.shards:
            if shard.name not in finished:
                yield self._tasks_of(shard, writers, reader)

    def _tasks_of(self, shard: Shard, writers: ExitStack, reader: Reader) -> Sequence[ShardTask]:
        writer = self.folder.open_shard(shard.name, shard.header_size, shard.fixed_size)
        writers.callback(writer.close)
        format = self.plan.output.format
        audit = None
        if self.run.verify:
            from nf4conv.run.audit import AuditOfWritten  # few runs need to import it

            audit = AuditOfWritten(self.backend, self.run.tolerance, format, writer)
        progress = _ShardProgress(shard, format, writer, audit, reader, self._finish_shard)
        tasks = shard_tasks(progress, shard.jobs, self.backend, self.pipeline.piece)
        progress.left = len(tasks)
        return [ShardTask(task.file, partial(progress.run, task.run)) for task in tasks]

    def _finish_shard(self, progress: _ShardProgress, size: int) -> None:
        """Records a shard of this many bytes, whose file is complete."""
        shard = progress.shard
        verified = None
        if progress.audit is not None:
            self._require_faultless(progress.audit)
            verified = asdict(progress.audit.summary())
        if isinstance(self.folder, SharedFolder):  # a later part cannot tell what has changed
            files = source_files([shard])
            require_unchanged(self.plan.source, "while it was read; start anew without OUT", files)
        digest = progress.writer.digest
        self.folder.record(shard.name, size, digest, shard.source_bytes, verified)
        done, shards = len(self.folder.finished), len(self.plan.output.shards)
        _log.info("shard %d of %d written: %s, %s", done, shards, shard.name, units.size(size))
        path = self.folder.out / shard.name
        self.announce(shard.name, path)
        if self.plan.output.largest_size > total_memory() // 4:
            let_go(path)  # whoever reads it next would not find all of it in memory anyway

    def _require_faultless(self, audit: "AuditOfWritten") -> None:
        faults = list(audit.faults())
        if not faults:
            return
        more = f" (and {len(faults) - 1:,} more)" if len(faults) > 1 else ""
        message = f"{self.folder.out}: verification failed: {faults[0]}{more}"
        raise VerificationError(message, path=self.folder.out)


def _open_reader(plan: WritingPlan, folder: OutputFolder) -> Reader:
    """Opens a reader of the source.

    One that streams fetches whole files for the unfinished shards. Of a file that other parts need
    too, each part fetches only its own tensors.
    """
    fetched = plan.source.fetched
    if fetched is None or not fetched.absent:
        return Reader()
    from nf4conv.sources.remote.stream import ShardStream  # importing huggingface_hub takes a while

    folder.remove_downloads()  # left by a run that was killed
    mine = {shard.name for shard in plan.output.shards}
    unfinished = [shard for shard in plan.output.shards if shard.name not in folder.finished]
    others = [shard for shard in plan.whole.shards if shard.name not in mine]
    needed = source_files(unfinished) - source_files(others)
    return ShardStream(
        fetched,
        order={file: number for number, file in enumerate(plan.source.files)},
        needed=needed & fetched.absent.keys(),
        folder=folder.downloads,
    )


def _streamed(shards: Iterable[Sequence[ShardTask]], stream: "ShardStream") -> Iterator[Task]:
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
        task.run(worker)
    finally:
        stream.done(task.file)
