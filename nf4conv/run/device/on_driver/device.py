"""One NVIDIA GPU without torch: as all threads of a run share it, and as one uses it.

A batch of tensors goes up in one copy. Launches decode those that are encoded, and then cast them
all. What comes of it comes down in one copy.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from nf4conv.errors import Nf4convError
from nf4conv.format.dtypes import DTYPE_BITS, TAGS
from nf4conv.format.layout import Format
from nf4conv.plan.jobs import CopyJob, PackJob
from nf4conv.run.device.on_driver import driver, packing
from nf4conv.run.device.on_driver.buffers import HEAD, BatchInput, DriverBuffers, Gpu
from nf4conv.run.device.on_driver.kernels import Purpose, load_bundles
from nf4conv.run.device.on_driver.loading import load
from nf4conv.run.device.protocol import CastError, Converted, CopyPart
from nf4conv.run.pieces import aligned, bytes_of
from nf4conv.run.worker import Activity, Worker

DECODED: Final = 2
"""Pieces of an encoded weight that are decoded at a time, as far as a piece holds them."""


class DriverBackend(Gpu):
    """One GPU with kernels."""

    @property
    def name(self) -> str:
        return f"cuda:{self.device.ordinal}"

    @contextmanager
    def open(self, worker: Worker) -> "Iterator[DriverDevice]":
        self.device.use()
        try:
            device = DriverDevice(self, worker)
            try:
                yield device
            finally:
                device.close()
        except driver.CudaOutOfMemoryError as error:
            raise Nf4convError(
                f"{self.name}: {error}; try fewer --workers, or --device cpu"
            ) from error

    def device_memory(self) -> int:
        return self.held

    def weight_room(self, job: PackJob) -> int:
        decoded = bytes_of(TAGS[self.format.dtype], job.elements)
        if job.source.encoding is not None:
            decoded //= DECODED
        return aligned(max(job.source_bytes, decoded))

    def weight_kind(self, job: PackJob) -> object:
        return job.source.encoding is None, job.source.dtype

    def copy_elements(self, job: CopyJob, piece: int) -> int:
        bits_returned = math.ceil(DTYPE_BITS[job.dtype] / self.returned)
        bits = max(DTYPE_BITS[job.source.dtype], bits_returned)
        return max(piece * 8 // bits, 64)


class DriverDevice(DriverBuffers):
    """Does with kernels what a device does for a task, see device/protocol.py."""

    pack = packing.pack
    compress = packing.compress

    def convert(self, parts: Sequence[CopyPart]) -> Iterator[Converted]:
        """Yields kept tensors, or parts of them, in the dtypes that they are stored in.

        Raises a CastError if finite values become infinite, once all values have been given.
        """
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
        for (job, piece), address in zip(parts, loaded.addresses, strict=False):
            start = address - base
            stop = start + bytes_of(job.dtype, piece.tensor.elements)
            yield Converted(job, bytes_of(job.dtype, piece.start), view[start:stop])
        if not self.is_flagged():
            return
        if len(parts) == 1:
            raise CastError(parts[0].job.source, parts[0].job.dtype)
        for part in parts:  # which of them is it?
            yield from self.convert([part])


def gpu_named(device: str) -> int | None:
    """Returns the number of the GPU that "auto", "cuda" or "cuda:N" names; None without one."""
    name, _, index = device.partition(":")
    if name not in ("auto", "cuda") or not (index or "0").isdecimal():
        return None
    number = int(index or 0)
    return number if number < driver.device_count() else None


def open_gpu(
    number: int, purposes: Collection[Purpose], format: Format, returned: float
) -> DriverBackend | None:
    """Loads the kernels for some purposes to a GPU; None if they cannot be compiled."""
    device = driver.Device(number)
    bundles = load_bundles(device, purposes)
    if bundles is None:
        return None
    return DriverBackend(device, bundles, format, returned)
