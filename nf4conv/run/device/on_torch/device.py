"""torch on one device, the CPU or a GPU: as all threads of a run share it, and as one uses it."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from nf4conv.errors import Nf4convError, PlanError, SourceError
from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.plan.jobs import CopyJob, PackJob
from nf4conv.plan.rows import Errors
from nf4conv.run.device.on_torch import packing
from nf4conv.run.device.on_torch.buffers import SharedTensors, TorchBuffers
from nf4conv.run.device.on_torch.reading import TORCH_DTYPES, exactly_decoded, read_values
from nf4conv.run.device.protocol import CastError, Converted, CopyPart
from nf4conv.run.pieces import aligned
from nf4conv.run.worker import Activity, Worker
from nf4conv.sources.arranged import Merged
from nf4conv.sources.foreign.bitsandbytes import packed_in_order
from nf4conv.sources.tensors import TensorInfo

_OUT_OF_MEMORY: Final = ("not enough memory", "can't allocate memory")

_CHUNK: Final = 2**18
"""Values that are compared at a time. In float64 they take a few times their memory in a file."""


class TorchBackend:
    """torch on one device: "auto", "cpu", "cuda" or "cuda:N"; a PlanError if there is none."""

    def __init__(self, device: str) -> None:
        self.torch_device = find_device(device)
        self._shared = SharedTensors()

    @property
    def name(self) -> str:
        return str(self.torch_device)

    @contextmanager
    def open(self, worker: Worker) -> "Iterator[TorchDevice]":
        """Opens the device for the calling thread; an Nf4convError says that memory ran out."""
        device = self.torch_device
        try:
            with torch.inference_mode():
                if device.type == "cpu":
                    torch.set_num_threads(1)  # of this thread only: the workers are the parallelism
                    yield TorchDevice(device, self._shared, None, worker)
                else:
                    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                    with torch.cuda.stream(stream):
                        yield TorchDevice(device, self._shared, stream, worker)
        except (RuntimeError, MemoryError) as error:
            if type(error) is RuntimeError and not _says_out_of_memory(error):
                raise
            message = f"{device}: out of memory; try fewer --workers, or --device cpu"
            raise Nf4convError(message) from error

    def device_memory(self) -> int:
        if self.torch_device.type != "cuda":
            return 0
        return torch.cuda.max_memory_reserved(self.torch_device)

    def weight_room(self, job: PackJob) -> int:
        if job.is_cut_out:
            return 2 * job.elements  # a piece holds as many in 16 bits
        return aligned(job.source_bytes)

    def weight_kind(self, job: PackJob) -> object:
        return job.name if job.is_cut_out else None  # what is cut out is read alone

    def copy_elements(self, job: CopyJob, piece: int) -> int:
        source = job.source
        is_unpacked = packed_in_order(source) is not None and job.dtype == source.dtype
        if source.encoding is None or is_unpacked:
            return piece * 8 // DTYPE_BITS[source.dtype]
        return piece // 2


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

    def subtract(self, a: TensorInfo, b: TensorInfo) -> Errors:
        """Returns how far the values of two tensors of one size are apart."""
        first = read_values(self, a).clone()  # the next read reuses the buffer
        second = read_values(self, b)
        with self.timed(Activity.COMPUTE):
            return difference(first, second)

    def count_not_finite(self, tensor: TensorInfo) -> int:
        """Counts the values of a tensor that are NaN or infinite."""
        values = read_values(self, tensor)
        with self.timed(Activity.COMPUTE):
            return values.numel() - int(torch.isfinite(values).sum())


def difference(a: torch.Tensor, b: torch.Tensor) -> Errors:
    """Compares the values of two flat tensors of one length and any dtypes."""
    device = a.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, a.numel(), _CHUNK):
        x = a[start : start + _CHUNK].double()
        y = b[start : start + _CHUNK].double()
        unequal = x != y
        are_nan = x.isnan() & y.isnan()
        unequal &= ~are_nan
        apart = (x - y).abs()
        if a.dtype == b.dtype and not a.is_floating_point():  # float64 takes neighbours for equal
            unequal = a[start : start + _CHUNK] != b[start : start + _CHUNK]
            apart = apart.clamp(min=1)
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


def device_of(worker: Worker) -> TorchDevice:
    """Returns the device of a worker that computes with torch."""
    assert isinstance(worker.device, TorchDevice)
    return worker.device
