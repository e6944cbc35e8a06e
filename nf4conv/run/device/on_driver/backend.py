"""One NVIDIA GPU by way of the CUDA driver, as all threads of a run share it."""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from nf4conv.errors import Nf4convError
from nf4conv.format.dtypes import DTYPE_BITS, TAGS
from nf4conv.format.layout import Format
from nf4conv.plan.jobs import CopyJob, PackJob
from nf4conv.run.device.on_driver import driver
from nf4conv.run.device.on_driver.buffers import Gpu
from nf4conv.run.device.on_driver.device import DriverDevice
from nf4conv.run.device.on_driver.kernels import Kernels, Purpose, load_bundles
from nf4conv.run.pieces import aligned, bytes_of
from nf4conv.run.worker import Worker

DECODED: Final = 2
"""Pieces of an encoded weight that are decoded at a time, as far as a piece holds them."""


class DriverBackend:
    """One GPU with kernels; `returned` bytes at most come back for each that goes there."""

    def __init__(
        self,
        device: driver.Device,
        kernels: Mapping[Purpose, Kernels[bytes]],
        format: Format,
        returned: float,
    ) -> None:
        self._gpu = Gpu(device, kernels)
        self._format = format
        self._returned = returned

    @property
    def name(self) -> str:
        return f"cuda:{self._gpu.device.ordinal}"

    @contextmanager
    def open(self, worker: Worker) -> Iterator[DriverDevice]:
        self._gpu.device.use()
        try:
            device = DriverDevice(self._gpu, self._returned, worker)
            try:
                yield device
            finally:
                device.close()
        except driver.CudaOutOfMemoryError as error:
            raise Nf4convError(
                f"{self.name}: {error}; try fewer --workers, or --device cpu"
            ) from error

    def device_memory(self) -> int:
        return self._gpu.held

    def weight_room(self, job: PackJob) -> int:
        decoded = bytes_of(TAGS[self._format.dtype], job.elements)
        if job.source.encoding is not None:
            decoded //= DECODED
        return aligned(max(job.source_bytes, decoded))

    def weight_kind(self, job: PackJob) -> object:
        return job.source.encoding is None, job.source.dtype

    def copy_elements(self, job: CopyJob, piece: int) -> int:
        bits_returned = math.ceil(DTYPE_BITS[job.dtype] / self._returned)
        bits = max(DTYPE_BITS[job.source.dtype], bits_returned)
        return max(piece * 8 // bits, 64)


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
