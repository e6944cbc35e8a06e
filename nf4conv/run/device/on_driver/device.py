"""One NVIDIA GPU as one thread uses it, without torch.

A batch of tensors goes up in one copy. Launches decode those that are encoded, and then cast or
subtract them all. What comes of it comes down in one copy.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import fsum
from typing import Final

from nf4conv.plan.rows import Errors
from nf4conv.run.device.on_driver import packing
from nf4conv.run.device.on_driver.buffers import HEAD, BatchInput, DriverBuffers, Launch
from nf4conv.run.device.on_driver.kernels import Purpose
from nf4conv.run.device.on_driver.loading import Places, add_tensor, decode_launch, load
from nf4conv.run.device.protocol import CastError, Converted, CopyPart, PairOfPieces
from nf4conv.run.pieces import aligned, bytes_of, starts
from nf4conv.run.worker import Activity
from nf4conv.sources.tensors import TensorInfo

_SUMS: Final = 32
"""Bytes of a program's sums, see kernels/vectors.py: four float64."""


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

    def subtract(self, pairs: Sequence[PairOfPieces]) -> list[Errors]:
        """Returns how far the values of each pair are apart: pieces that fit into the buffer
        together.
        """
        batch = BatchInput(self)
        tensors = [tensor for pair in pairs for tensor in pair]
        placed = [add_tensor(batch, tensor) for tensor in tensors]
        batch.read()
        with self.timed(Activity.COMPUTE):
            launches, addresses = self._decode(batch, tensors, placed)
            first = pairs[0]
            dtypes = (first.a.dtype, first.b.dtype)
            kernels = self.gpu.kernels[Purpose("subtractor", dtypes)]
            function = kernels.functions["subtract"]
            programs = [-(-pair.a.elements // kernels.numbers["tile"]) for pair in pairs]
            places = [HEAD + _SUMS * place for place in starts(programs)]
            self.reserve(result=places[-1])
            for number, pair in enumerate(pairs):
                count = programs[number]
                a = addresses[2 * number]
                b = addresses[2 * number + 1]
                result = self.output.address + places[number]
                arguments = (a, b, result, pair.a.elements, count)
                launches.append(Launch(function, count, arguments))
            self.execute(batch.stop, launches, places[-1])
        view = self.result.view
        return [_added_up(view[start:stop]) for start, stop in pairwise(places)]

    def _decode(
        self, batch: BatchInput, tensors: Sequence[TensorInfo], placed: Sequence[Places]
    ) -> tuple[list[Launch], list[int]]:
        """Returns the launches that decode, and the address of each tensor's values."""
        offsets = starts(_room(tensor) for tensor in tensors)
        base = self.scratch(offsets[-1])
        launches = []
        addresses = []
        for tensor, places, offset in zip(tensors, placed, offsets, strict=False):
            if tensor.encoding is None:
                addresses.append(batch.address(places.positions["values"]))
            else:
                launches.append(decode_launch(batch, tensor, places, tensor.dtype, base + offset))
                addresses.append(base + offset)
        return launches, addresses


def _size(part: CopyPart) -> int:
    """Returns the bytes of a part in the dtype that it is stored in."""
    return bytes_of(part.job.dtype, part.piece.tensor.elements)


def _start(part: CopyPart) -> int:
    """Returns the bytes of the converted tensor before a part."""
    return bytes_of(part.job.dtype, part.piece.start)


def _room(tensor: TensorInfo) -> int:
    """Returns the bytes of scratch memory that a tensor is decoded to; 0 for one that is not."""
    if tensor.encoding is None:
        return 0
    return aligned(bytes_of(tensor.dtype, tensor.elements))


def _added_up(view: memoryview) -> Errors:
    """Adds up the sums of all programs: four rows, with a column for each program."""
    sums = view.cast("d").tolist()
    programs = len(sums) // 4
    squares = sums[:programs]
    values = sums[programs : 2 * programs]
    largest = sums[2 * programs : 3 * programs]
    differing = sums[3 * programs :]
    return Errors(
        squared_error=fsum(squares),
        squared_weight=fsum(values),
        largest=max(largest),
        differing=round(sum(differing)),
    )
