"""Workers that compute with torch: on the CPU, or on a GPU by way of pinned buffers and a stream
for each.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Final

import torch

from nf4conv.errors import Nf4convError, PlanError
from nf4conv.output.writer import ShardWriter
from nf4conv.run.loop import Activity, Worker, aligned
from nf4conv.sources.reader import Reader
from nf4conv.sources.tensors import FileRange, TensorInfo

_OUT_OF_MEMORY: Final = ("not enough memory", "can't allocate memory")


class TorchEngine:
    """torch on one device: "auto", "cpu", "cuda" or "cuda:N"; a PlanError if there is no such
    device.
    """

    def __init__(self, device: str) -> None:
        self._device = _find_device(device)
        self.kept: dict[
            TensorInfo, torch.Tensor
        ] = {}  # what many tasks need, on the device until the end
        self.reading: dict[
            TensorInfo, threading.Lock
        ] = {}  # one of each, so that nobody waits for another one
        self.lock = threading.Lock()

    @property
    def device(self) -> str:
        return str(self._device)

    @contextmanager
    def worker(
        self, reader: Reader, piece: int, advance: Callable[[int], None]
    ) -> Iterator["TorchWorker"]:
        try:
            with torch.inference_mode():
                if self._device.type == "cpu":
                    torch.set_num_threads(1)  # of this thread only: the workers are the parallelism
                    yield TorchWorker(self, None, reader, piece, advance)
                else:
                    stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                    with torch.cuda.stream(stream):
                        yield TorchWorker(self, stream, reader, piece, advance)
        except (RuntimeError, MemoryError) as error:
            # on a CPU torch says so in words only
            if type(error) is RuntimeError and not any(
                words in str(error) for words in _OUT_OF_MEMORY
            ):
                raise
            message = f"{self._device}: out of memory; try a smaller --buffer-size, or --device cpu"
            raise Nf4convError(message) from error

    def device_memory(self) -> int:
        return torch.cuda.max_memory_reserved(self._device) if self._device.type == "cuda" else 0


class TorchWorker(Worker):
    """A thread's buffers."""

    def __init__(
        self,
        engine: TorchEngine,
        stream: torch.cuda.Stream | None,
        reader: Reader,
        piece: int,
        advance: Callable[[int], None],
    ) -> None:
        self.device = engine._device
        self._stream = stream
        self._engine = engine
        self._input = torch.empty(piece, dtype=torch.uint8, pin_memory=stream is not None)
        self._output = torch.empty(
            0 if stream is None else piece, dtype=torch.uint8, pin_memory=stream is not None
        )
        super().__init__(reader, self._input.numpy().data, advance)

    def read(self, ranges: Sequence[FileRange]) -> list[torch.Tensor]:
        """The bytes of some file ranges on the device: a uint8 tensor for each, aligned to 64
        bytes.

        On the CPU they are the worker's own buffer and live until the next call. Ranges larger than
        the buffer (`aligned` and summed) get one of their own.
        """
        positions = list(
            accumulate((aligned(stop - start) for _, start, stop in ranges), initial=0)
        )
        fits = positions[-1] <= self._input.numel()
        host = (
            self._input[: positions[-1]] if fits else torch.empty(positions[-1], dtype=torch.uint8)
        )
        self.fill(host.numpy().data, ranges, positions)
        buffer = host.to(self.device, non_blocking=True)
        return [
            buffer[position : position + stop - start]
            for (_, start, stop), position in zip(ranges, positions, strict=False)
        ]

    def kept(
        self, tensor: TensorInfo, read: Callable[["TorchWorker", TensorInfo], torch.Tensor]
    ) -> torch.Tensor:
        """A small tensor that is read once for all workers, such as a factor of an adapter."""
        with self._engine.lock:
            reading = self._engine.reading.setdefault(tensor, threading.Lock())
        with reading:
            kept = self._engine.kept
            if tensor not in kept:
                kept[tensor] = read(self, tensor).clone()
                if self._stream is not None:
                    self._stream.synchronize()  # the other workers have streams of their own
            return kept[tensor]

    def write(self, writes: Sequence[tuple[ShardWriter, int, torch.Tensor]]) -> None:
        """Write tensors to their places: (shard, offset in its data, contiguous tensor of any
        dtype, anywhere).
        """
        with self.timed(Activity.COMPUTE):
            fetched = self._fetch(writes)
        with self.timed(Activity.WRITE):
            for (shard, offset, _), host in zip(writes, fetched, strict=True):
                shard.write(offset, host.numpy().data)

    def _fetch(self, writes: Sequence[tuple[ShardWriter, int, torch.Tensor]]) -> list[torch.Tensor]:
        """The tensors' bytes on the host; waits for the device."""
        fetched = []
        position = 0
        for _, _, tensor in writes:
            raw = tensor.reshape(-1).view(torch.uint8)
            if raw.device.type == "cuda":
                fits = position + raw.numel() <= self._output.numel()
                room = (
                    self._output[position : position + raw.numel()]
                    if fits
                    else torch.empty_like(raw, device="cpu")
                )
                position += raw.numel() if fits else 0
                raw = room.copy_(raw, non_blocking=True)
            fetched.append(raw)
        if self._stream is not None:
            self._stream.synchronize()
        return fetched


def _find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    prefix, _, index = name.partition(":")
    if prefix != "cuda" or (index and not index.isdecimal()):
        raise PlanError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    found = torch.cuda.device_count()
    if int(index or 0) >= found:
        raise PlanError(f"--device {name}: torch finds {found} CUDA devices on this machine")
    return torch.device("cuda", int(index or 0))
