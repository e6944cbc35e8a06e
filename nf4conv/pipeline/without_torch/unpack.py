"""Packed weights unpacked by workers without torch: the values are those of with_torch/pack.py.

The codes and scales of some weights, or of a piece of one, go up in one copy; a launch decodes each weight; the values
come down in one copy.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from nf4conv.checkpoint.encoded_pieces import packed_pieces
from nf4conv.checkpoint.header import DTYPE_BITS, TensorInfo
from nf4conv.checkpoint.plan import CopyJob, Plan
from nf4conv.pipeline.loop import Activity, batches
from nf4conv.pipeline.shards import LARGEST_BATCH, ShardProgress, ShardTask, fill
from nf4conv.pipeline.without_torch.bundle import Action, Purpose
from nf4conv.pipeline.without_torch.reading import (
    Reading,
    add_tensor,
    bring,
    bytes_of,
    purposes_of_tensor,
    room_of,
    starts,
)
from nf4conv.pipeline.without_torch.worker import CudaWorker

RETURNED: Final = 1.0  # bytes that come back from the device for each that goes there


def purposes_of(plan: Plan) -> frozenset[Purpose] | None:
    """What kernels a plan needs; None if it needs more than is here: transposed weights, other encodings."""
    found: set[Purpose] = set()
    for job in plan.jobs:
        needed = purposes_of_tensor(job.source, job.dtype) if isinstance(job, CopyJob) else None
        if needed is None or any(purpose.action is not Action.UNPACK for purpose in needed):
            return None
        found |= needed
    return frozenset(found)


def shard_tasks(progress: ShardProgress, piece: int) -> list[ShardTask[CudaWorker]]:
    """Everything that is to be done for a shard, in pieces of so many bytes of values."""

    def room(span: Span) -> int:
        return max(span.nbytes, room_of(span.tensor))

    groups = batches(_spans(progress, piece), room, piece, lambda span: span.job.source.file, LARGEST_BATCH)
    return fill(
        progress, [ShardTask(spans[0].job.source.file, partial(_unpack, progress, spans)) for spans in groups], piece
    )


class Span(NamedTuple):
    """A run of a weight that is stored decoded: its packed form, and how many elements are before it."""

    job: CopyJob
    tensor: TensorInfo
    start: int

    @property
    def nbytes(self) -> int:
        return bytes_of(self.job.dtype, self.tensor.elements)

    @property
    def offset(self) -> int:
        """Of its values in the shard's data."""
        return self.job.offset + bytes_of(self.job.dtype, self.start)


def _spans(progress: ShardProgress, piece: int) -> Iterator[Span]:
    for job in progress.shard.jobs:
        if isinstance(job, CopyJob) and job.source.encoding is not None:
            for part in packed_pieces(job.source, piece * 8 // DTYPE_BITS[job.dtype]):
                yield Span(job, *part)


def _unpack(progress: ShardProgress, spans: tuple[Span, ...], worker: CudaWorker) -> None:
    """Weights that fit into a worker's buffer together, or a piece of one."""
    reading = Reading(worker)
    positions = [add_tensor(reading, span.tensor) for span in spans]
    reading.read()
    places = starts(span.nbytes for span in spans)
    with worker.timed(Activity.COMPUTE):
        worker.reserve(result=places[-1])
        targets = [worker.output.address + place for place in places]
        launches = [
            bring(reading, span.tensor, position, span.job.dtype, target)
            for span, position, target in zip(spans, positions, targets, strict=False)
        ]
        worker.execute(reading.stop, launches, places[-1])
    with worker.timed(Activity.WRITE):
        for offset, start, stop in _runs(spans, places):
            progress.writer.write(offset, worker.result.view[start:stop])
    progress.done()


def _runs(spans: Sequence[Span], places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(offset in the shard, start, stop) of values that are neighbours in the output too."""
    offset, first = spans[0].offset, 0
    for span, start in zip(spans, places, strict=False):
        if span.offset - offset != start - first:
            yield offset, first, start
            offset, first = span.offset, start
    yield offset, first, places[-1]
