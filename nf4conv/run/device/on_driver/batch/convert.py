"""Kept tensors decoded and cast on the GPU.

Some tensors, or a piece of one, go up in one copy. A launch decodes each that is encoded, and one
for each step casts them all. The values come down in one copy, or bit by bit where they are larger
than the buffer for them.
"""

from collections.abc import Iterator, Sequence

from nf4conv.run.device.on_driver.batch.buffers import HEAD, DriverBuffers
from nf4conv.run.device.on_driver.batch.input import BatchInput
from nf4conv.run.device.on_driver.batch.loading import load
from nf4conv.run.device.on_driver.batch.sizes import bytes_of
from nf4conv.run.device.protocol import CastError, Converted, CopyPart
from nf4conv.run.worker import Activity


def convert(buffers: DriverBuffers, parts: Sequence[CopyPart]) -> Iterator[Converted]:
    """Yields kept tensors, or parts of them, in the dtypes that they are stored in.

    Raises:
        CastError: finite values become infinite; raised once all values have been given.
    """
    job, piece = parts[0]
    size = HEAD + bytes_of(job.dtype, piece.tensor.elements)
    if len(parts) == 1 and size > len(buffers.result.view):
        yield from _bit_by_bit(buffers, parts[0])
    else:
        yield from _at_once(buffers, parts)
    if not buffers.is_flagged():
        return
    if len(parts) == 1:
        raise CastError(job.source, job.dtype)
    for part in parts:  # which of them is it?
        yield from convert(buffers, [part])


def _at_once(buffers: DriverBuffers, parts: Sequence[CopyPart]) -> Iterator[Converted]:
    batch = BatchInput(buffers)

    def room_for_result(size: int) -> int:
        buffers.reserve(result=HEAD + size)
        return buffers.output.address + HEAD

    tensors = [part.piece.tensor for part in parts]
    loaded = load(batch, tensors, parts[0].job.steps, room_for_result)
    base = buffers.output.address
    with buffers.timed(Activity.COMPUTE):
        buffers.execute(batch.stop, loaded.launches, loaded.addresses[-1] - base)
    for (job, piece), address in zip(parts, loaded.addresses, strict=False):
        start = address - base
        values = buffers.result.view[start : start + bytes_of(job.dtype, piece.tensor.elements)]
        yield Converted(job, bytes_of(job.dtype, piece.start), values)


def _bit_by_bit(buffers: DriverBuffers, part: CopyPart) -> Iterator[Converted]:
    """Converts what cannot be cut, and is larger than the buffer that it comes down to."""
    job, piece = part
    batch = BatchInput(buffers)
    loaded = load(batch, [piece.tensor], job.steps)
    with buffers.timed(Activity.COMPUTE):
        buffers.execute(batch.stop, loaded.launches, HEAD)
    room = buffers.result.view[HEAD:]
    size = bytes_of(job.dtype, piece.tensor.elements)
    for at in range(0, size, len(room)):
        values = room[: size - at]
        with buffers.timed(Activity.COMPUTE):
            buffers.fetch(HEAD, loaded.addresses[0] + at, len(values))
        yield Converted(job, bytes_of(job.dtype, piece.start) + at, values)
