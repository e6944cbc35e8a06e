"""Tasks that copy bytes from the source to a shard, without a detour over a device."""

from collections.abc import Sequence

from nf4conv.plan.jobs import PackJob
from nf4conv.run.device.protocol import CopyPart
from nf4conv.run.shards import Destination
from nf4conv.run.worker import Worker
from nf4conv.sources.tensors import TensorInfo


def copy_as_it_is(destination: Destination, parts: Sequence[CopyPart], worker: Worker) -> None:
    """Copies tensors, or parts of them, that are kept as they are."""
    for job, piece in parts:
        part = piece.tensor
        start_in_tensor = part.start - job.source.start
        offset = job.offset + start_in_tensor
        worker.copy(part.file, part.start, part.stop, destination, offset)
        destination.finish_copy(worker, job, piece)
    destination.count_task()


def copy_stored_weight(destination: Destination, job: PackJob, piece: int, worker: Worker) -> None:
    """Copies a weight that the source has in 4 bits as it is to be, in pieces of so many bytes."""
    stored = job.stored
    assert stored is not None
    for offset, part in zip(job.offsets, stored.parts, strict=True):
        if isinstance(part, bytes):
            destination.write(offset, memoryview(part))
        else:
            _copy_tensor(destination, offset, part, piece, worker)
    destination.finish_weights(worker, [job], {job.name: stored.blob})
    destination.count_task()


def _copy_tensor(
    destination: Destination, offset: int, tensor: TensorInfo, piece: int, worker: Worker
) -> None:
    """Copies a tensor to an offset, in pieces of so many bytes."""
    for start in range(tensor.start, tensor.stop, piece):
        stop = min(start + piece, tensor.stop)
        place = offset + start - tensor.start
        worker.copy(tensor.file, start, stop, destination, place)
