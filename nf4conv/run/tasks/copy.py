"""Tasks that copy bytes from the source to a shard, without a detour over a device."""

from collections.abc import Sequence
from typing import Final

from nf4conv.format.layout import QUANT_MAPS
from nf4conv.plan.jobs import PackJob
from nf4conv.run.device.protocol import CopyPart, NonFiniteError
from nf4conv.run.shards import Destination
from nf4conv.run.worker import Worker, Writable
from nf4conv.sources.tensors import TensorInfo

_SCALES: Final = ("absmax", "nested_absmax")
"""Suffixes of the components that may be NaN or infinite."""


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
    """Copies a weight that the source has in 4 bits as it is to be, in pieces of so many bytes.

    Raises:
        NonFiniteError: its scales hold NaN or infinity, as some of its values then would.
    """
    stored = job.stored
    assert stored is not None
    finite = _FiniteScales(destination, job)
    # the last component, the JSON blob, has no place yet
    parts = dict(stored.parts)
    for component, offset in zip(job.components, job.offsets, strict=False):
        part = parts.get(component.suffix or "values")
        if part is None:  # the code map, which other tools may have written less precisely
            destination.write(offset, memoryview(QUANT_MAPS[stored.quant_type]))
        else:
            is_scale = component.suffix in _SCALES and component.dtype == "F32"
            target = finite if is_scale else destination
            _copy_tensor(target, offset, part, piece, worker)
    assert stored.blob is not None
    destination.finish_weights(worker, [job], {job.name: stored.blob})
    destination.count_task()


class _FiniteScales:
    """Passes float32 scales on to a destination, and refuses those that are not finite."""

    def __init__(self, destination: Destination, job: PackJob) -> None:
        self._destination = destination
        self._job = job

    def write(self, offset: int, data: memoryview) -> None:
        """Writes scales to their place.

        Raises:
            NonFiniteError: some are NaN or infinite.
        """
        from nf4conv.codec.finite import are_finite  # importing numpy takes a moment

        if not are_finite(data):
            raise NonFiniteError(self._job)
        self._destination.write(offset, data)


def _copy_tensor(
    destination: Writable, offset: int, tensor: TensorInfo, piece: int, worker: Worker
) -> None:
    """Copies a tensor to an offset, in pieces of so many bytes."""
    for start in range(tensor.start, tensor.stop, piece):
        stop = min(start + piece, tensor.stop)
        place = offset + start - tensor.start
        worker.copy(tensor.file, start, stop, destination, place)
