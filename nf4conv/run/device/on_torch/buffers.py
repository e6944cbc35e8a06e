"""A thread's host buffers and, on a GPU, its stream: what comes to torch and what goes back; and
tensors that all threads share.
"""

import threading
from collections.abc import Callable, Sequence

import torch

from nf4conv.run.pieces import aligned, starts
from nf4conv.run.worker import Worker
from nf4conv.sources.tensors import FileRange, TensorInfo


class SharedTensors:
    """Small tensors that many tasks need, such as the factors of an adapter.

    They stay on the device until the end.
    """

    def __init__(self) -> None:
        self._kept: dict[TensorInfo, torch.Tensor] = {}
        # one for each tensor, so that nobody waits for another one
        self._reading: dict[TensorInfo, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, tensor: TensorInfo, read: Callable[[TensorInfo], torch.Tensor]) -> torch.Tensor:
        """Returns a tensor; `read` is asked once for it, by one of the threads."""
        with self._lock:
            reading = self._reading.setdefault(tensor, threading.Lock())
        with reading:
            if tensor not in self._kept:
                self._kept[tensor] = read(tensor)
            return self._kept[tensor]


class TorchBuffers:
    """Brings bytes of files to the device, and tensors back.

    On the CPU there is no stream.
    """

    def __init__(
        self,
        device: torch.device,
        shared: SharedTensors,
        stream: torch.cuda.Stream | None,
        worker: Worker,
    ) -> None:
        self.torch_device = device
        self.worker = worker
        self.timed = worker.timed
        self._shared = shared
        self._stream = stream
        self._uploaded: torch.cuda.Event | None = None
        self._kept_ranges: tuple[FileRange, ...] = ()
        self._kept: torch.Tensor | None = None
        is_pinned = stream is not None
        self._buffer = torch.empty(worker.piece, dtype=torch.uint8, pin_memory=is_pinned)
        worker.buffer = self._buffer.numpy().data
        self._output = torch.empty(
            worker.piece if is_pinned else 0, dtype=torch.uint8, pin_memory=is_pinned
        )

    def read(self, ranges: Sequence[FileRange]) -> list[torch.Tensor]:
        """Reads file ranges to the device: a uint8 tensor for each, aligned to 64 bytes.

        On the CPU they are the worker's own buffer and live until the next call. Ranges that are
        larger than the buffer get memory of their own.
        """
        *positions, size = _places(ranges)
        if self._uploaded is not None:
            self._uploaded.synchronize()  # the copy that still reads the buffer, if there is one
        if size <= self._buffer.numel():
            host = self._buffer[:size]
        else:
            host = torch.empty(size, dtype=torch.uint8)
        self.worker.fill(host.numpy().data, ranges, positions)
        buffer = host.to(self.torch_device, non_blocking=True)
        if self._stream is not None:
            self._uploaded = self._stream.record_event(self._uploaded)
        return _cut(buffer, ranges, positions)

    def keep(self, ranges: tuple[FileRange, ...]) -> list[torch.Tensor] | None:
        """Returns file ranges that later calls ask for again; they are read unless they are there.

        What was kept before is overwritten. None if they are larger than a piece, which is the
        most that host memory has room for.
        """
        *positions, size = _places(ranges)
        if self._stream is None and size > self.worker.piece:
            return None
        if ranges != self._kept_ranges:
            self._kept_ranges = ()
            if self._kept is None or self._kept.numel() < size:
                room = max(size, self.worker.piece)
                self._kept = torch.empty(room, dtype=torch.uint8, device=self.torch_device)
            if self._stream is None:
                self.worker.fill(self._kept.numpy().data, ranges, positions)
            else:
                for file_range, position in zip(ranges, positions, strict=True):
                    self._bring(file_range, self._kept[position:])
            self._kept_ranges = ranges
        assert self._kept is not None
        return _cut(self._kept, ranges, positions)

    def _bring(self, file_range: FileRange, target: torch.Tensor) -> None:
        """Reads a file range to the beginning of a tensor on a GPU, a piece at a time."""
        file, start, stop = file_range
        for first in range(start, stop, self.worker.piece):
            last = min(first + self.worker.piece, stop)
            [raw] = self.read([(file, first, last)])
            target[first - start : last - start] = raw

    def kept(
        self,
        tensor: TensorInfo,
        read: "Callable[[TorchBuffers, TensorInfo], torch.Tensor]",
    ) -> torch.Tensor:
        """Returns a small tensor, such as an adapter's factor; it is read once for all threads."""

        def read_now(wanted: TensorInfo) -> torch.Tensor:
            values = read(self, wanted).clone()
            if self._stream is not None:
                self._stream.synchronize()  # the other threads have streams of their own
            return values

        return self._shared.get(tensor, read_now)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        """Returns the bytes of contiguous tensors on the host; waits for the device.

        On the CPU they are the tensors' own memory. On a GPU they live until the next call.
        """
        fetched = []
        position = 0
        for tensor in tensors:
            raw = tensor.reshape(-1).view(torch.uint8)
            if raw.device.type == "cuda":
                if position + raw.numel() <= self._output.numel():
                    room = self._output[position : position + raw.numel()]
                    position += raw.numel()
                else:
                    room = torch.empty_like(raw, device="cpu")
                raw = room.copy_(raw, non_blocking=True)
            fetched.append(raw)
        if self._stream is not None:
            self._stream.synchronize()
        return [raw.numpy().data for raw in fetched]


def _places(ranges: Sequence[FileRange]) -> list[int]:
    """Returns where each of some file ranges begins in a buffer, and where the last one ends."""
    return starts(aligned(stop - start) for _, start, stop in ranges)


def _cut(
    buffer: torch.Tensor, ranges: Sequence[FileRange], positions: Sequence[int]
) -> list[torch.Tensor]:
    """Returns what was read to a buffer, for each of the file ranges."""
    tensors = []
    for (_, start, stop), position in zip(ranges, positions, strict=True):
        tensors.append(buffer[position : position + stop - start])
    return tensors
