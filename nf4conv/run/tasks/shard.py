"""Divides the work of a shard into tasks: what is taken together, and what piece by piece."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from nf4conv.format.codebook import NESTED_BLOCKSIZE
from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.format.layout import block_count
from nf4conv.plan.jobs import CopyJob, Job, PackJob
from nf4conv.run.device.protocol import CopyPart, Gathered
from nf4conv.run.loop import Task
from nf4conv.run.pieces import (
    LARGEST_BATCH,
    batches,
    interleave,
    weight_pieces,
)
from nf4conv.run.tasks.keep import convert, copy_as_it_is, copy_stored_weight
from nf4conv.run.tasks.pack import pack_batch, pack_pieces
from nf4conv.run.worker import Backend, Destination
from nf4conv.sources.cutting import pieces_of, share_parts


class ShardTask(NamedTuple):
    """A task of a shard."""

    file: Path  # the source file that most of what it reads is in
    run: Task


def shard_tasks(
    destination: Destination, jobs: Sequence[Job], backend: Backend, piece: int
) -> list[ShardTask]:
    """Divides the work of a shard into tasks, given the bytes that a worker reads at a time.

    The jobs are in the order in which they are placed in the shard. Weights that are packed come in
    turn with tensors that are kept.
    """
    groups = [
        _packing_tasks(destination, jobs, backend, piece),
        _kept_tasks(destination, jobs, backend, piece, is_changed=False),
        _kept_tasks(destination, jobs, backend, piece, is_changed=True),
        _stored_tasks(destination, jobs, piece),
    ]
    return list(interleave(groups, len(groups)))


def _packing_tasks(
    destination: Destination, jobs: Sequence[Job], backend: Backend, piece: int
) -> list[ShardTask]:
    """Returns tasks of weights: of neighbours that fit a piece, or of a piece of a large weight.

    A batch is of one source file, too.
    """
    tasks: list[ShardTask] = []
    for neighbours in _runs_to_pack(jobs):
        of_run = batches(
            neighbours,
            backend.weight_room,
            piece,
            lambda job: (job.source.file, backend.weight_kind(job)),
            LARGEST_BATCH,
        )
        for batch in of_run:
            tasks += _tasks_of_batch(destination, batch, backend, piece)
    return tasks


def _runs_to_pack(jobs: Sequence[Job]) -> Iterator[list[PackJob]]:
    """Yields runs of weights that are packed, and are neighbours in the shard.

    The components of weights stand there in the order of the jobs, so a weight that is copied from
    a 4-bit source divides the weights around it; a tensor that is not packed does not.
    """
    weights = (job for job in jobs if isinstance(job, PackJob))
    for is_packed, run in groupby(weights, key=lambda job: job.stored is None):
        if is_packed:
            yield list(run)


def _tasks_of_batch(
    destination: Destination, jobs: tuple[PackJob, ...], backend: Backend, piece: int
) -> list[ShardTask]:
    """Returns the task of some weights, or those of the pieces of a single large one."""
    job = jobs[0]
    blocksize = destination.format.blocksize
    unit = blocksize
    if destination.measured is not None:  # errors are those of stored scales, which come in groups
        unit = blocksize * NESTED_BLOCKSIZE
    most = job.elements * piece // max(backend.weight_room(job), 1)
    pieces = weight_pieces(job, piece, most, unit)
    if len(pieces) == 1:
        run = partial(pack_batch, destination, jobs)
        return [ShardTask(job.source.file, run)]
    gathered = Gathered(block_count(job.elements, blocksize), len(pieces))
    first = pieces[0].tensor
    if first is not None and share_parts(first):
        run = partial(pack_pieces, destination, pieces, gathered)
        return [ShardTask(job.source.file, run)]
    tasks = []
    for one in pieces:
        run = partial(pack_pieces, destination, [one], gathered)
        tasks.append(ShardTask(job.source.file, run))
    return tasks


def _kept_tasks(
    destination: Destination, jobs: Sequence[Job], backend: Backend, piece: int, *, is_changed: bool
) -> list[ShardTask]:
    """Returns the tasks of kept tensors: of those that are decoded or cast, or of the others.

    All parts of a task are of one file, and if they are changed, of the same dtypes, and encoded or
    not. Pieces that are decoded from the same bytes are one task, in a call each.
    """

    def most(job: CopyJob) -> int:
        if is_changed:
            return backend.copy_elements(job, piece)
        return piece * 8 // DTYPE_BITS[job.dtype]

    def room(part: CopyPart) -> int:
        return part.piece.tensor.elements * piece // most(part.job)

    def kind(part: CopyPart) -> object:
        source = part.job.source
        return source.file, is_changed and (part.job.steps, source.encoding is None)

    parts: list[CopyPart] = []
    calls: list[list[Sequence[CopyPart]]] = []  # of each task
    for job in jobs:
        if isinstance(job, CopyJob) and job.is_changed == is_changed:
            of_job = [CopyPart(job, one) for one in pieces_of(job.source, most(job))]
            if len(of_job) > 1 and share_parts(of_job[0].piece.tensor):
                calls.append([[part] for part in of_job])
            else:
                parts += of_job
    calls += [[batch] for batch in batches(parts, room, piece, kind, LARGEST_BATCH)]
    run = convert if is_changed else copy_as_it_is
    return [ShardTask(one[0][0].job.source.file, partial(run, destination, one)) for one in calls]


def _stored_tasks(destination: Destination, jobs: Sequence[Job], piece: int) -> list[ShardTask]:
    """Returns the tasks of weights that the source has in 4 bits as they are to be."""
    tasks = []
    for job in jobs:
        if isinstance(job, PackJob) and job.stored is not None:
            run = partial(copy_stored_weight, destination, job, piece)
            tasks.append(ShardTask(job.source.file, run))
    return tasks
