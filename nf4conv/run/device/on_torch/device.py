"""torch as one thread uses it, on the CPU or on a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from nf4conv.errors import Nf4convError, PlanError
from nf4conv.format.layout import Format
from nf4conv.plan.rows import Errors
from nf4conv.run.device.on_torch.buffers import TorchBuffers
from nf4conv.run.device.on_torch.convert import convert
from nf4conv.run.device.on_torch.packing import compress, pack
from nf4conv.run.device.on_torch.reading import read_values
from nf4conv.run.device.on_torch.shared import SharedTensors
from nf4conv.run.device.on_torch.subtract import difference
from nf4conv.run.device.protocol import (
    Converted,
    CopyPart,
    Gathered,
    Packed,
    PairOfPieces,
    Scales,
)
from nf4conv.run.pieces import WeightPiece
from nf4conv.run.worker import Activity, Backend, Worker
from nf4conv.sources.stored_weights import StoredWeight
from nf4conv.sources.tensors import TensorInfo

_OUT_OF_MEMORY: Final = ("not enough memory", "can't allocate memory")


class TorchDevice(TorchBuffers):
    """Does with torch what a device does for a task, see device/protocol.py."""

    def pack(
        self,
        pieces: Sequence[WeightPiece],
        format: Format,
        gathered: Gathered | None,
        stored: Sequence[StoredWeight],
    ) -> Packed:
        return pack(self, pieces, format, gathered, stored)

    def compress(self, gathered: Gathered, elements: int, format: Format) -> Scales:  # noqa: ARG002
        with self.timed(Activity.COMPUTE):
            return compress(self, [gathered.take()], format)

    def convert(self, parts: Sequence[CopyPart]) -> Iterator[Converted]:
        return convert(self, parts)

    def subtract(self, pairs: Sequence[PairOfPieces]) -> list[Errors]:
        differences = []
        for pair in pairs:
            a = read_values(self, pair.a).clone()  # the next read reuses the buffer
            b = read_values(self, pair.b)
            with self.timed(Activity.COMPUTE):
                differences.append(difference(a, b))
        return differences

    def count_unpackable(self, tensor: TensorInfo, limit: float) -> tuple[int, int]:
        """Counts the values of a tensor that cannot be packed.

        Returns:
            How many are NaN or infinite; how many others have a magnitude above the limit.
        """
        values = read_values(self, tensor)
        with self.timed(Activity.COMPUTE):
            finite = torch.isfinite(values)
            not_finite = values.numel() - int(finite.sum())
            too_large = 0
            if limit < torch.finfo(values.dtype).max:
                too_large = int((finite & (values.abs() > limit)).sum())
        return not_finite, too_large


@contextmanager
def opened(device: torch.device, shared: SharedTensors, worker: Worker) -> Iterator[TorchDevice]:
    """Opens torch's device for the calling thread.

    Raises:
        Nf4convError: the device ran out of memory.
    """
    try:
        with torch.inference_mode():
            if device.type == "cpu":
                torch.set_num_threads(1)  # of this thread only: the workers are the parallelism
                yield TorchDevice(device, shared, None, worker)
            else:
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                with torch.cuda.stream(stream):
                    yield TorchDevice(device, shared, stream, worker)
    except (RuntimeError, MemoryError) as error:
        if type(error) is RuntimeError and not _says_out_of_memory(error):
            raise
        message = f"{device}: out of memory; try fewer --workers, or --device cpu"
        raise Nf4convError(message) from error


def _says_out_of_memory(error: RuntimeError) -> bool:
    """Returns True for an error by which torch says that a CPU's memory is full: in words only."""
    return any(words in str(error) for words in _OUT_OF_MEMORY)


def find_device(name: str) -> torch.device:
    """Returns the device that "auto", "cpu", "cuda" or "cuda:N" names.

    Raises:
        PlanError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    prefix, _, index = name.partition(":")
    if prefix != "cuda" or (index and not index.isdecimal()):
        raise PlanError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    number = int(index or 0)
    found = torch.cuda.device_count()
    if number >= found:
        raise PlanError(f"--device {name}: torch finds {found} CUDA devices on this machine")
    return torch.device("cuda", number)


def device_of(worker: Worker, backend: Backend) -> TorchDevice:
    """Returns torch's device of a worker; opens it the first time."""
    device = worker.device(backend)
    assert isinstance(device, TorchDevice)
    return device
