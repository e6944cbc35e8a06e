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
    first = parts[0]
    is_alone = len(parts) == 1
    needed = HEAD + _size(first)
    if is_alone and needed > len(buffers.result.view):
        yield from _bit_by_bit(buffers, first)
    else:
        yield from _at_once(buffers, parts)
    if not buffers.is_flagged():
        return
    if is_alone:
        raise CastError(first.job.source, first.job.dtype)
    for part in parts:  # which of them is it?
        yield from convert(buffers, [part])


def _at_once(buffers: DriverBuffers, parts: Sequence[CopyPart]) -> Iterator[Converted]:
    batch = BatchInput(buffers)

    def room_for_result(size: int) -> int:
        buffers.reserve(result=HEAD + size)
        return buffers.output.address + HEAD

    tensors = [part.piece.tensor for part in parts]
    steps = parts[0].job.steps
    loaded = load(batch, tensors, steps, room_for_result)
    base = buffers.output.address
    addresses = loaded.addresses
    end = addresses[-1] - base
    with buffers.timed(Activity.COMPUTE):
        buffers.execute(batch.stop, loaded.launches, end)
    view = buffers.result.view
    for part, address in zip(parts, addresses, strict=False):
        start = address - base
        stop = start + _size(part)
        values = view[start:stop]
        yield Converted(part.job, _start(part), values)


def _size(part: CopyPart) -> int:
    """Returns the bytes of a part in the dtype that it is stored in."""
    dtype = part.job.dtype
    elements = part.piece.tensor.elements
    return bytes_of(dtype, elements)


def _start(part: CopyPart) -> int:
    """Returns the bytes of the converted tensor before a part."""
    dtype = part.job.dtype
    return bytes_of(dtype, part.piece.start)


def _bit_by_bit(buffers: DriverBuffers, part: CopyPart) -> Iterator[Converted]:
    """Converts what cannot be cut, and is larger than the buffer that it comes down to."""
    batch = BatchInput(buffers)
    tensor = part.piece.tensor
    loaded = load(batch, [tensor], part.job.steps)
    with buffers.timed(Activity.COMPUTE):
        buffers.execute(batch.stop, loaded.launches, HEAD)
    room = buffers.result.view[HEAD:]
    size = _size(part)
    first = _start(part)
    address = loaded.addresses[0]
    for at in range(0, size, len(room)):
        values = room[: size - at]
        with buffers.timed(Activity.COMPUTE):
            buffers.fetch(HEAD, address + at, len(values))
        yield Converted(part.job, first + at, values)
