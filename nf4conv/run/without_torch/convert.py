"""Tensors that are kept, but decoded or cast, by workers without torch: the values are those of
with_torch/pack.py.

Some tensors, or a piece of one, go up in one copy; a launch decodes each that is encoded, and one
for each step casts them all; the values come down in one copy, or bit by bit where they are larger
than the buffer for that.
"""

import math
from collections.abc import Sequence

from nf4conv.output.writer import ShardWriter
from nf4conv.plan.jobs import CopyJob
from nf4conv.run.loop import Activity
from nf4conv.run.shards import CastError, CopyPart, ShardProgress
from nf4conv.run.without_torch.reading import Reading, bytes_of, load
from nf4conv.run.without_torch.worker import HEAD, CudaWorker
from nf4conv.sources.tensors import DTYPE_BITS


def most_elements(job: CopyJob, piece: int, returned: float) -> int:
    """Of a tensor, those that are taken at a time: a piece of so many bytes, and what is returned
    for it.
    """
    bits = max(DTYPE_BITS[job.source.dtype], math.ceil(DTYPE_BITS[job.dtype] / returned))
    return max(piece * 8 // bits, 64)


def convert(progress: ShardProgress, parts: Sequence[CopyPart], worker: CudaWorker) -> None:
    """Tensors, or parts of them, that go through the same dtypes, and are all encoded or none."""
    write_converted(progress.writer, parts, worker)
    if progress.audit is not None:
        for job, piece in parts:
            progress.audit.check_copy(worker, progress, job, piece)
    progress.done()


def write_converted(writer: ShardWriter, parts: Sequence[CopyPart], worker: CudaWorker) -> None:
    """As `convert`; a CastError if finite values become infinite."""
    job, piece = parts[0]
    is_large = len(parts) == 1 and HEAD + bytes_of(job.dtype, piece.tensor.elements) > len(
        worker.result.view
    )
    (_write_bit_by_bit if is_large else _write_at_once)(writer, parts, worker)
    is_lost = worker.is_flagged()
    if is_lost and len(parts) == 1:
        raise CastError(job.source, job.dtype)
    for part in parts if is_lost else ():  # which of them is it?
        write_converted(writer, (part,), worker)


def _write_at_once(writer: ShardWriter, parts: Sequence[CopyPart], worker: CudaWorker) -> None:
    (job, _), reading = parts[0], Reading(worker)

    def room(size: int) -> int:
        worker.reserve(result=HEAD + size)
        return worker.output.address + HEAD

    addresses, launches = load(reading, [piece.tensor for _, piece in parts], job.steps, room)
    base = worker.output.address
    with worker.timed(Activity.COMPUTE):
        worker.execute(reading.stop, launches, addresses[-1] - base)
    with worker.timed(Activity.WRITE):
        for (job, piece), address in zip(parts, addresses, strict=False):
            start, size = address - base, bytes_of(job.dtype, piece.tensor.elements)
            writer.write(
                job.offset + bytes_of(job.dtype, piece.start),
                worker.result.view[start : start + size],
            )


def _write_bit_by_bit(writer: ShardWriter, parts: Sequence[CopyPart], worker: CudaWorker) -> None:
    """What cannot be cut, and is larger than the buffer that it comes down to."""
    [(job, piece)], reading = parts, Reading(worker)
    [address, _], launches = load(reading, [piece.tensor], job.steps)
    with worker.timed(Activity.COMPUTE):
        worker.execute(reading.stop, launches, HEAD)
    buffer, size = worker.result.view[HEAD:], bytes_of(job.dtype, piece.tensor.elements)
    for at in range(0, size, len(buffer)):
        part = buffer[: size - at]
        with worker.timed(Activity.COMPUTE):
            worker.fetch(HEAD, address + at, len(part))
        with worker.timed(Activity.WRITE):
            writer.write(job.offset + bytes_of(job.dtype, piece.start) + at, part)
