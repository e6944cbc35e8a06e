"""torch as one thread uses it, on the CPU or on a GPU."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from nf4conv.errors import Nf4convError, PlanError, SourceError
from nf4conv.plan.jobs import CopyJob
from nf4conv.plan.rows import Errors
from nf4conv.run.device.on_torch import packing
from nf4conv.run.device.on_torch.buffers import SharedTensors, TorchBuffers
from nf4conv.run.device.on_torch.reading import TORCH_DTYPES, exactly_decoded, read_values
from nf4conv.run.device.protocol import CastError, Converted, CopyPart
from nf4conv.run.worker import Activity, Backend, Worker
from nf4conv.sources.arranged import Merged
from nf4conv.sources.tensors import TensorInfo

_OUT_OF_MEMORY: Final = ("not enough memory", "can't allocate memory")

_CHUNK: Final = 2**18
"""Values that are compared at a time. In float64 they take a few times their memory in a file."""

_WIDE: Final = (torch.int64, torch.uint64)
"""Integers, not all of which float64 holds."""


class TorchDevice(TorchBuffers):
    """Does with torch what a device does for a task, see device/protocol.py."""

    pack = packing.pack
    compress = packing.compress

    def convert(self, parts: Sequence[CopyPart]) -> Iterator[Converted]:
        """Yields kept tensors, or parts of them, in the dtypes that they are stored in.

        Once all values have been given, raises a CastError if finite values become infinite, or NaN
        where an adapter changes them.
        """
        error: SourceError | None = None
        for job, piece in parts:
            values = read_values(self, piece.tensor)
            with self.timed(Activity.COMPUTE):
                cast = values.to(TORCH_DTYPES[job.dtype])
                if error is None:
                    error = self._error_of(job, piece.tensor, values, cast)
                [fetched] = self.fetch([cast])
            yield Converted(job, piece.start * cast.element_size(), fetched)
        if error is not None:
            raise error

    def _error_of(
        self, job: CopyJob, tensor: TensorInfo, values: torch.Tensor, cast: torch.Tensor
    ) -> SourceError | None:
        """Returns what is wrong with the values of a tensor, or of a part of it, if anything is."""
        is_merged = isinstance(tensor.encoding, Merged)
        if not is_merged and len(job.steps) == 1:
            return None
        # a sum is NaN or infinite if any term is; finite terms may overflow, and are looked at too
        if math.isfinite(cast.sum(dtype=torch.float32).item()):
            return None
        # what is infinite or NaN in the source may stay so
        if is_merged:
            before = read_values(self, tensor.unmerged)
        elif tensor.encoding is None:
            before = values
        else:
            before = read_values(self, exactly_decoded(tensor))
        if not bool((torch.isfinite(before) & ~torch.isfinite(cast)).any()):
            return None
        return CastError(job.source, job.dtype, is_merged=is_merged)

    def count_unpackable(self, tensor: TensorInfo, limit: float) -> tuple[int, int]:
        """Counts the values of a tensor that are NaN or infinite, and others above a magnitude."""
        values = read_values(self, tensor)
        with self.timed(Activity.COMPUTE):
            finite = torch.isfinite(values)
            not_finite = values.numel() - int(finite.sum())
            too_large = 0
            if limit < torch.finfo(values.dtype).max:
                too_large = int((finite & (values.abs() > limit)).sum())
        return not_finite, too_large


def difference(a: torch.Tensor, b: torch.Tensor) -> Errors:
    """Compares the values of two flat tensors of one length and any dtypes."""
    device = a.device
    are_wide = a.dtype == b.dtype and a.dtype in _WIDE
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, a.numel(), _CHUNK):
        left = a[start : start + _CHUNK]
        right = b[start : start + _CHUNK]
        x = left.double()
        y = right.double()
        if are_wide:
            unequal = left.view(torch.int64) != right.view(torch.int64)
        else:
            unequal = x != y
        are_nan = x.isnan() & y.isnan()
        unequal &= ~are_nan
        apart = (x - y).abs()
        distance = torch.where(unequal, apart, 0.0)
        distance = distance.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        values = x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        sums += torch.stack([distance.square().sum(), values.square().sum(), unequal.sum()])
        largest = torch.maximum(largest, distance.amax())
    found = sums.tolist()
    return Errors(
        squared_error=found[0],
        squared_weight=found[1],
        largest=float(largest),
        differing=int(found[2]),
    )


@contextmanager
def opened(device: torch.device, shared: SharedTensors, worker: Worker) -> Iterator[TorchDevice]:
    """Opens torch's device for the calling thread; an Nf4convError says that memory ran out."""
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
    """Returns the device that "auto", "cpu", "cuda" or "cuda:N" names; a PlanError without it."""
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
