"""A shard divided into tasks, and what those tasks share: its file, the JSON blobs so far, how many
tasks are left.

How a weight is packed differs by engine (with_torch/pack.py, without_torch/pack.py); what is taken
together and what piece by piece does not.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nf4conv.errors import SourceError
from nf4conv.format.codebook import NESTED_BLOCKSIZE
from nf4conv.format.layout import DTYPE_NAMES, Format, block_count, quant_state_json
from nf4conv.output.writer import ShardWriter
from nf4conv.plan.jobs import CopyJob, Entry, PackJob, Shard, component_name
from nf4conv.report.measured import WeightResult
from nf4conv.run.loop import Task, W, Worker, batches, interleave
from nf4conv.sources.encodings.pieces import (
    Piece,
    can_cut_rows,
    encoded_pieces,
    is_stack_of_matrices,
    matrix_of,
    packed_pieces,
    plain_pieces,
    rows_of,
)
from nf4conv.sources.tensors import DTYPE_BITS, TensorInfo, packed_in_order

if TYPE_CHECKING:  # importing huggingface_hub takes a while
    from nf4conv.sources.remote.stream import ShardStream

LARGEST_BATCH = 4096


class NonFiniteError(SourceError):
    """A weight that was to be packed holds NaN or infinity, or values so large that its scales
    become infinite.
    """

    def __init__(self, job: PackJob) -> None:
        super().__init__(f"{job.source.file}: {job.source.name}: holds NaN or infinity")
        self.job = job


class CastError(SourceError):
    """A tensor holds values that are infinite in the dtype that it would be cast to."""

    def __init__(self, tensor: TensorInfo, tag: str) -> None:
        super().__init__(
            f"{tensor.file}: {tensor.name}: has values too large for {DTYPE_NAMES.get(tag, tag)}, "
            f"to which it would be "
            "cast; give another --dtype"
        )


@dataclass(eq=False)
class ShardProgress:
    """A shard being written: its file, the JSON blobs gathered so far, and how many of its tasks
    are left.
    """

    shard: Shard  # its plan
    format: Format  # how weights are packed
    writer: ShardWriter  # its file
    finished: Callable[[int], None]  # called with the size of the file once it is complete
    audit: Any = (
        None  # what is to look at everything that has been written, see audit.py; None for nothing
    )
    results: Mapping[str, WeightResult] | None = (
        None  # by weight, where errors are kept if they are to be measured
    )
    _blobs: dict[str, bytes] = field(default_factory=dict)
    _left: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def expect(self, tasks: int) -> None:
        """Set how many tasks fill this shard."""
        self._left = tasks

    def packed(self, worker: Any, jobs: Sequence[PackJob], blobs: dict[str, bytes]) -> None:
        """Count a task as done whose weights are complete, but for the JSON blobs; an audit looks
        at them first.
        """
        if self.audit is not None:
            self.audit.check_weights(worker, self, jobs, blobs)
        self.done(blobs)

    def done(self, blobs: dict[str, bytes] | None = None) -> None:
        """Count a task as done; the last one completes the file."""
        with self._lock:
            self._blobs |= blobs or {}
            self._left -= 1
            complete = self._left == 0
        if complete:
            self._finish()

    def _finish(self) -> None:
        entries = list(self.shard.entries())
        tail = bytearray()
        for job in self.shard.jobs:
            if isinstance(job, PackJob):
                blob = self._blobs[job.name]
                start = self.shard.fixed_size + len(tail)
                name = component_name(job, job.components[-1])
                entries.append(Entry(name, "U8", (len(blob),), start, start + len(blob)))
                tail += blob
        self.finished(self.writer.finish(entries, bytes(tail)))


@dataclass(frozen=True)
class ShardTask(Generic[W]):
    """A task of a shard, whose progress it tells when it is done."""

    file: Path  # the source file that most of what it reads is in
    run: Task[W]

    def __call__(self, worker: W) -> None:
        self.run(worker)


M = TypeVar("M")


class Gathered(Generic[M]):
    """The absmax of a weight of so many blocks that several workers pack in so many pieces, in
    memory of the device.
    """

    def __init__(self, blocks: int, pieces: int) -> None:
        self.blocks = blocks
        self._left = pieces
        self._memory: M | None = None
        self._lock = threading.Lock()

    def memory(self, allocate: Callable[[int], M]) -> M:
        """Where all pieces write their share; `allocate` is asked once, for so many blocks."""
        with self._lock:
            if self._memory is None:
                self._memory = allocate(self.blocks)
            return self._memory

    def done(self) -> M | None:
        """Count a piece as packed; the last one gets the memory."""
        with self._lock:
            self._left -= 1
            if self._left:
                return None
            # tasks live as long as their shard does: kept here, memory would grow with what has
            # been packed
            whole, self._memory = self._memory, None
            return whole


def fill(
    progress: ShardProgress,
    weights: Sequence[ShardTask[Any]],
    piece: int,
    most: Callable[[CopyJob], int],
    convert: "Callable[[ShardProgress, tuple[CopyPart, ...], Any], None]",
) -> list[ShardTask[Any]]:
    """All tasks of a shard: those of its weights, in turn with those of the tensors that are kept.

    Args:
        progress: the shard, which learns how many they are.
        weights: tasks of the weights.
        piece: bytes that a worker reads at a time.
        most: of a tensor that is decoded or cast, the elements that are taken at a time.
        convert: carries out the task of such tensors, which go through the same dtypes, and are all
            encoded or none.
    """

    def at_a_time(job: CopyJob) -> int:
        return most(job) if job.is_changed else piece * 8 // DTYPE_BITS[job.dtype]

    def share(part: CopyPart) -> int:
        return part[1].tensor.elements * piece // at_a_time(part[0])

    def kind(part: CopyPart) -> object:
        return part[0].source.file, part[0].steps, part[0].source.encoding is None

    groups: list[Sequence[ShardTask[Any]]] = [weights]
    for make, is_changed in ((_copy_raw, False), (convert, True)):
        kept = [
            job
            for job in progress.shard.jobs
            if isinstance(job, CopyJob) and job.is_changed is is_changed
        ]
        parts = ((job, part) for job in kept for part in pieces_of(job.source, at_a_time(job)))
        tasks = batches(parts, share, piece, kind, LARGEST_BATCH)
        groups.append(
            [ShardTask(some[0][0].source.file, partial(make, progress, some)) for some in tasks]
        )
    stored = (
        job for job in progress.shard.jobs if isinstance(job, PackJob) and job.stored is not None
    )
    groups.append(
        [ShardTask(job.source.file, partial(_copy_stored, progress, job, piece)) for job in stored]
    )
    progress.expect(sum(map(len, groups)))
    return list(interleave(groups, len(groups)))


def pieces_of(source: TensorInfo, most: int) -> Iterable[Piece]:
    """A tensor in pieces of at most so many elements, if it can be cut so."""
    if source.encoding is None:
        return plain_pieces(source, most // 64 * 64)
    if packed_in_order(source) is not None:
        return packed_pieces(source, most)
    return encoded_pieces(source, most)


def json_blobs(
    format: Format, jobs: Sequence[PackJob], offsets: Sequence[float | None]
) -> dict[str, bytes]:
    """The JSON blobs of packed weights, by name; `offsets` are nested_offsets, None without double
    quantization.

    A NonFiniteError if the scales of a weight are so large that their mean is not finite.
    """
    blobs = {}
    for job, offset in zip(jobs, offsets, strict=True):
        if offset is not None and not math.isfinite(offset):
            raise NonFiniteError(job)
        blobs[job.name] = quant_state_json(format, job.matrix.shape, offset)
    return blobs


def weight_tasks(
    progress: ShardProgress,
    piece: int,
    room: Callable[[PackJob], int],
    kind: Callable[[PackJob], object],
    of_piece: Callable[..., None],
    of_batch: Callable[..., None],
) -> list[ShardTask[Any]]:
    """The tasks of a shard's weights: of neighbours of a kind that fit a piece, or of each piece of
    a large one.

    They are of one file, too. `room` says how much of a piece, which has so many bytes, a weight
    takes.
    """
    tasks: list[ShardTask[Any]] = []
    weights = (job for job in progress.shard.jobs if isinstance(job, PackJob) and not job.stored)
    blocksize = progress.format.blocksize
    unit = (
        blocksize if progress.results is None else blocksize * NESTED_BLOCKSIZE
    )  # errors are those of stored scales
    for jobs in batches(
        weights, room, piece, lambda job: (job.source.file, kind(job)), LARGEST_BATCH
    ):
        job, most = jobs[0], jobs[0].elements * piece // max(room(jobs[0]), 1)
        parts = weight_pieces(job, piece, most, unit)
        if len(parts) > 1:
            absmax: Gathered[Any] = Gathered(block_count(job.elements, blocksize), len(parts))
            tasks += [
                ShardTask(job.source.file, partial(of_piece, progress, job, part, absmax))
                for part in parts
            ]
        else:
            tasks.append(ShardTask(job.source.file, partial(of_batch, progress, jobs)))
    return tasks


def weight_pieces(job: PackJob, piece: int, most: int, unit: int) -> list[Piece]:
    """A weight in pieces of so many bytes, or elements once decoded, that begin at multiples of a
    unit of elements.

    A single one, or none, if it is taken whole: a weight that is cut out of its source can be taken
    piece by piece only if it is encoded by rows.
    """
    if job.is_cut_out:
        return matrix_pieces(job, most, unit)
    begin, end = job.source_range
    run = job.source._replace(shape=(job.elements,), start=begin, stop=end)
    elements = piece * 8 // DTYPE_BITS[run.dtype]
    return plain_pieces(run, max(elements - elements % unit, unit))


CopyPart = tuple[CopyJob, Piece]


def _copy_raw(progress: ShardProgress, parts: tuple[CopyPart, ...], worker: Worker) -> None:
    """Tensors, or parts of them, that are kept as they are."""
    for job, piece in parts:
        worker.copy(
            *piece.tensor.file_range,
            progress.writer,
            job.offset + piece.tensor.start - job.source.start,
        )
        if progress.audit is not None:
            progress.audit.check_copy(worker, progress, job, piece)
    progress.done()


def _copy_stored(progress: ShardProgress, job: PackJob, piece: int, worker: Worker) -> None:
    """A weight that the source has in 4 bits as it is to be, in pieces of so many bytes."""
    stored, writer = job.stored, progress.writer
    assert stored is not None
    for offset, part in zip(job.offsets, stored.parts, strict=True):
        if isinstance(part, bytes):
            writer.write(offset, memoryview(part))
            continue
        for start in range(part.start, part.stop, piece):
            stop = min(start + piece, part.stop)
            worker.copy(part.file, start, stop, writer, offset + start - part.start)
    progress.packed(worker, [job], {job.name: stored.blob})


def _run_streamed(task: ShardTask[Any], stream: "ShardStream", worker: Worker) -> None:
    """Run a task whose source file may have to be fetched first."""
    stream.wait_for(task.file)
    try:
        task(worker)
    finally:
        stream.done(task.file)


def streamed(
    shards: Iterable[Sequence[ShardTask[Any]]], stream: "ShardStream"
) -> Iterator[Task[Any]]:
    """The tasks of one shard after the other, those of each by source file; shards, too, come in
    the files' order.

    Each task waits for its file, and the last one of a file lets it go.
    """
    for tasks in shards:
        for task in sorted(tasks, key=lambda task: stream.order[task.file]):
            stream.expect(task.file)
            yield partial(_run_streamed, task, stream)
    stream.expect(None)


def matrix_pieces(job: PackJob, most: int, unit: int) -> list[Piece]:
    """A job's weight, which is encoded, in pieces that can be decoded one by one; arguments as
    `encoded_pieces`.

    There is a single one, or none, of a weight that must be read as a whole matrix.
    """
    matrix, source = job.matrix, job.source
    if source.encoding is None or matrix.transpose or matrix.columns is not None:
        return []
    is_whole = matrix.expert is None and matrix.rows is None
    if is_whole and packed_in_order(source) is not None:
        return packed_pieces(source, most, unit)
    if matrix.expert is not None:
        if not is_stack_of_matrices(source):
            return []
        source = matrix_of(source, matrix.expert)
    if matrix.rows is not None:
        if not can_cut_rows(source, matrix.rows[0]):
            return []
        source = rows_of(source, *matrix.rows)
    return [*encoded_pieces(source, most, unit)]
