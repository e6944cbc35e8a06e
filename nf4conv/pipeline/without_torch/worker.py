"""A worker on a bare GPU: a stream, and buffers of fixed size on both sides."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from nf4conv.checkpoint.header import DTYPE_BITS
from nf4conv.checkpoint.reader import Reader
from nf4conv.errors import Nf4convError
from nf4conv.format.codebook import NESTED_BLOCKSIZE
from nf4conv.format.layout import TAGS
from nf4conv.pipeline.loop import Worker
from nf4conv.pipeline.without_torch.bundle import Action, Bundle, Purpose, load_bundle
from nf4conv.pipeline.without_torch.driver import (
    CudaOutOfMemoryError,
    Device,
    DeviceMemory,
    PinnedMemory,
    Stream,
    device_count,
)

TABLE_ROOM = 2**20
"""Bytes at the end of a worker's input for the tables of a batch: 13 integers for each of up to 4096 tensors."""

OUTPUT_SLACK = 2**20
"""Bytes of a worker's output beyond what a full piece becomes: room for alignment."""


Launch = tuple[str, int, tuple[int, ...]]
"""Kernel, programs, arguments."""


class CudaEngine:
    """One GPU, with the kernels for weights of one dtype in one format.

    Args:
        device: of this process.
        bundle: the kernels.
        purpose: what they are for.

    Attributes:
        bundle: the kernels.
        tables: device addresses of their tables.
    """

    def __init__(self, device: Device, bundle: Bundle, purpose: Purpose) -> None:
        self.bundle = bundle
        self._purpose = purpose
        self._device = device
        self._lock = threading.Lock()
        self._spare: list[DeviceMemory] = []
        self._held = 0
        self.tables: dict[str, int] = {}
        stream = Stream()
        for name, content in bundle.tables.items():
            self.tables[name] = self._upload(stream, content)
        stream.destroy()

    @property
    def device(self) -> str:
        return f"cuda:{self._device.ordinal}"

    @contextmanager
    def worker(self, reader: Reader, piece: int, advance: Callable[[int], None]) -> Iterator["CudaWorker"]:
        self._device.use()
        try:
            worker = CudaWorker(self, reader, piece, advance)
            try:
                yield worker
            finally:
                worker.close()
        except CudaOutOfMemoryError as error:
            raise Nf4convError(f"{self.device}: {error}; try a smaller --buffer-size, or --device cpu") from error

    def device_memory(self) -> int:
        return self._held

    def room(self, piece: int) -> tuple[int, int]:
        """Bytes of input and of output that a worker needs for pieces of this size."""
        if self._purpose.action is Action.PACK:
            # 2-byte weights in blocks of 32: 1/4 of a piece in codes, 1/16 in absmax, 1/64 in its codes
            return piece + TABLE_ROOM, piece * 3 // 8 + OUTPUT_SLACK
        # packed weights are taken in pieces that become as large as this, but are not cut within 256 blocks
        least = NESTED_BLOCKSIZE * self._purpose.blocksize * DTYPE_BITS[TAGS[self._purpose.dtype]] // 8
        return max(piece, least) + TABLE_ROOM, max(piece, least) + OUTPUT_SLACK

    def allocate(self, size: int) -> DeviceMemory:
        """Memory on the device, by preference some that was given back."""
        with self._lock:
            fitting = [memory for memory in self._spare if memory.size >= size]
            if fitting:
                memory = min(fitting, key=lambda memory: memory.size)
                self._spare.remove(memory)
                return memory
            self._held += size
        return DeviceMemory(size)

    def give_back(self, memory: DeviceMemory) -> None:
        """Memory that no stream uses any more."""
        with self._lock:
            self._spare.append(memory)

    def _upload(self, stream: Stream, content: bytes) -> int:
        memory = self.allocate(len(content))
        pinned = PinnedMemory(len(content))
        pinned.view[:] = content
        stream.to_device(memory.address, pinned.address, len(content))
        stream.wait()
        pinned.free()
        return memory.address


class CudaWorker(Worker):
    """A thread's buffers.

    Attributes:
        engine: whose kernels it launches.
        stream: on which it does.
        source, result: host memory: a piece of weights with room for tables, and what comes back.
        input, output: the same on the device.
    """

    def __init__(self, engine: CudaEngine, reader: Reader, piece: int, advance: Callable[[int], None]) -> None:
        self.engine = engine
        self.stream = Stream()
        source, result = engine.room(piece)
        self.source = PinnedMemory(source)
        self.result = PinnedMemory(result)
        self.input = engine.allocate(source)
        self.output = engine.allocate(result)
        super().__init__(reader, self.source.view, advance)

    def close(self) -> None:
        self.stream.wait()
        self.stream.destroy()
        self.source.free()
        self.result.free()
        self.engine.give_back(self.input)
        self.engine.give_back(self.output)

    def execute(self, upload: int, launches: Sequence[Launch], download: int) -> None:
        """Copy so many bytes of the input up, launch, copy so many bytes of the output down, and wait for it all."""
        self.stream.to_device(self.input.address, self.source.address, upload)
        for name, programs, arguments in launches:
            if programs:
                self.engine.bundle.functions[name].launch(self.stream, programs, arguments)
        self.stream.to_host(self.result.address, self.output.address, download)
        self.stream.wait()


def bare_engine(device: str, purpose: Purpose) -> CudaEngine | None:
    """An engine for weights of one dtype in one format.

    Args:
        device: "auto", "cuda" or "cuda:N"; auto takes the first GPU.
        purpose: what is to be done with them.

    Returns:
        None where torch must do it: no such GPU, or none that the kernels can be compiled for.
    """
    name, _, index = device.partition(":")
    index = index or "0"
    if name not in ("auto", "cuda") or not index.isdecimal() or int(index) >= device_count():
        return None
    found = Device(int(index))
    bundle = load_bundle(found, purpose)
    return None if bundle is None else CudaEngine(found, bundle, purpose)
