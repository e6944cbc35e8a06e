"""One NVIDIA GPU as one thread uses it, without torch.

A batch of tensors goes up in one copy. Launches decode those that are encoded, and then cast them
all. What comes of it comes down in one copy.
"""

from collections.abc import Iterator, Sequence

from nf4conv.run.device.on_driver import packing
from nf4conv.run.device.on_driver.buffers import HEAD, BatchInput, DriverBuffers
from nf4conv.run.device.on_driver.loading import load
from nf4conv.run.device.protocol import CastError, Converted, CopyPart
from nf4conv.run.pieces import bytes_of
from nf4conv.run.worker import Activity


class DriverDevice(DriverBuffers):
    """Does with kernels what a device does for a task, see device/protocol.py."""

    pack = packing.pack
    compress = packing.compress

    def convert(self, parts: Sequence[CopyPart]) -> Iterator[Converted]:
        """Yields kept tensors, or parts of them, in the dtypes that they are stored in.

        Raises a CastError if finite values become infinite, once all values have been given.
        """
        first = parts[0]
        is_alone = len(parts) == 1
        needed = HEAD + _size(first)
        if is_alone and needed > len(self.result.view):
            yield from self._bit_by_bit(first)
        else:
            yield from self._at_once(parts)
        if not self.is_flagged():
            return
        if is_alone:
            raise CastError(first.job.source, first.job.dtype)
        for part in parts:  # which of them is it?
            yield from self.convert([part])

    def _at_once(self, parts: Sequence[CopyPart]) -> Iterator[Converted]:
        batch = BatchInput(self)

        def room_for_result(size: int) -> int:
            self.reserve(result=HEAD + size)
            return self.output.address + HEAD

        tensors = [part.piece.tensor for part in parts]
        loaded = load(batch, tensors, parts[0].job.steps, room_for_result)
        base = self.output.address
        end = loaded.addresses[-1] - base
        with self.timed(Activity.COMPUTE):
            self.execute(batch.stop, loaded.launches, end)
        view = self.result.view
        for part, address in zip(parts, loaded.addresses, strict=False):
            start = address - base
            stop = start + _size(part)
            yield Converted(part.job, _start(part), view[start:stop])

    def _bit_by_bit(self, part: CopyPart) -> Iterator[Converted]:
        """Converts what cannot be cut, and is larger than the buffer that it comes down to."""
        batch = BatchInput(self)
        loaded = load(batch, [part.piece.tensor], part.job.steps)
        with self.timed(Activity.COMPUTE):
            self.execute(batch.stop, loaded.launches, HEAD)
        room = self.result.view[HEAD:]
        address = loaded.addresses[0]
        size = _size(part)
        for at in range(0, size, len(room)):
            values = room[: size - at]
            with self.timed(Activity.COMPUTE):
                self.fetch(HEAD, address + at, len(values))
            yield Converted(part.job, _start(part) + at, values)


def _size(part: CopyPart) -> int:
    """Returns the bytes of a part in the dtype that it is stored in."""
    return bytes_of(part.job.dtype, part.piece.tensor.elements)


def _start(part: CopyPart) -> int:
    """Returns the bytes of the converted tensor before a part."""
    return bytes_of(part.job.dtype, part.piece.start)
