"""Tasks of tensors that are kept: bytes are copied from the source to a shard, without a detour
over a device, or decoded and cast.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Final

from nf4conv.format.layout import QUANT_MAPS
from nf4conv.plan.jobs import PackJob
from nf4conv.run.device.protocol import CopyPart, NonFiniteError
from nf4conv.run.worker import Activity, Destination, Worker, Writable
from nf4conv.sources.tensors import TensorInfo

_SCALES: Final = ("absmax", "nested_absmax")
"""Suffixes of the components that may be NaN or infinite."""


def convert(destination: Destination, calls: Sequence[Sequence[CopyPart]], worker: Worker) -> None:
    """Converts tensors, or parts of them, some in each call of the device.

    Raises a CastError if finite values become infinite.
    """
    for parts in calls:
        write_converted(destination, parts, worker)
        for job, piece in parts:
            destination.finish_copy(worker, job, piece)


def write_converted(destination: Writable, parts: Sequence[CopyPart], worker: Worker) -> None:
    """Converts parts that go through the same dtypes, and writes them to their places.

    Raises a CastError if finite values become infinite, once all values are written.
    """
    for job, start, values in worker.device.convert(parts):
        with worker.timed(Activity.WRITE):
            destination.write(job.offset + start, values)


def copy_as_it_is(
    destination: Destination, calls: Sequence[Sequence[CopyPart]], worker: Worker
) -> None:
    """Copies tensors, or parts of them, that are kept as they are."""
    for job, piece in chain.from_iterable(calls):
        part = piece.tensor
        start_in_tensor = part.start - job.source.start
        offset = job.offset + start_in_tensor
        worker.copy(part.file, part.start, part.stop, destination, offset)
        destination.finish_copy(worker, job, piece)


def copy_stored_weight(destination: Destination, job: PackJob, piece: int, worker: Worker) -> None:
    """Copies a weight that the source has in 4 bits as it is to be, in pieces of so many bytes.

    Raises a NonFiniteError if its scales hold NaN or infinity, as some of its values then would.
    """
    stored = job.stored
    assert stored is not None
    finite = _FiniteScales(destination, job)
    # the last component, the JSON blob, has no place yet
    parts = dict(stored.parts)
    for component, offset in zip(job.components, job.offsets, strict=False):
        part = parts.get(component.suffix or "values")
        if part is None:  # the code map, which other tools may have written less precisely
            destination.write(offset, memoryview(QUANT_MAPS[stored.format.quant_type]))
        else:
            is_scale = component.suffix in _SCALES and component.dtype == "F32"
            target = finite if is_scale else destination
            _copy_tensor(target, offset, part, piece, worker)
    assert stored.blob is not None
    destination.finish_weights(worker, [job], {job.name: stored.blob})


class _FiniteScales:
    """Passes float32 scales of a weight on to a destination, and refuses those not finite."""

    def __init__(self, destination: Destination, job: PackJob) -> None:
        self._destination = destination
        self._job = job

    def write(self, offset: int, data: memoryview) -> None:
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
