"""A worker on a bare GPU: a stream, and buffers of fixed size on both sides."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nf4conv.checkpoint.reader import Reader
from nf4conv.cuda.bundle import Bundle, load_bundle
from nf4conv.cuda.driver import CudaOutOfMemoryError, Device, DeviceMemory, PinnedMemory, Stream, device_count
from nf4conv.errors import Nf4convError
from nf4conv.pipeline import Worker

TABLE_ROOM = 2**20
"""Bytes at the end of a worker's input for the tables of a batch: 13 integers for each of up to 4096 tensors."""

OUTPUT_SLACK = 2**20
"""Bytes of a worker's output beyond what codes and scales of a full piece take: room for their alignment."""


class CudaEngine:
    """One GPU, with the kernels for weights of one dtype in one format.

    Args:
        device: of this process.
        bundle: the kernels.
    """

    def __init__(self, device: Device, bundle: Bundle) -> None:
        self.bundle = bundle
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
        self.source = PinnedMemory(piece + TABLE_ROOM)
        # 2-byte weights in blocks of 32: 1/4 of a piece in codes, 1/16 in absmax, 1/64 in its codes
        self.result = PinnedMemory(piece * 3 // 8 + OUTPUT_SLACK)
        self.input = engine.allocate(piece + TABLE_ROOM)
        self.output = engine.allocate(piece * 3 // 8 + OUTPUT_SLACK)
        super().__init__(reader, self.source.view, advance)

    def close(self) -> None:
        self.stream.wait()
        self.stream.destroy()
        self.source.free()
        self.result.free()
        self.engine.give_back(self.input)
        self.engine.give_back(self.output)

    def launch(self, name: str, programs: int, *arguments: int) -> None:
        if programs:
            self.engine.bundle.functions[name].launch(self.stream, programs, arguments)


def bare_engine(device: str, dtype: str, quant_type: str, blocksize: int) -> CudaEngine | None:
    """An engine for weights of one dtype in one format.

    Args:
        device: "auto", "cuda" or "cuda:N"; auto takes the first GPU.
        dtype: "float32", "float16" or "bfloat16".
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one absmax.

    Returns:
        None where torch must do it: no such GPU, or none that the kernels can be compiled for.
    """
    index = device.partition(":")[2] or "0"
    if not index.isdecimal() or int(index) >= device_count():
        return None
    found = Device(int(index))
    bundle = load_bundle(found, dtype, quant_type, blocksize)
    return None if bundle is None else CudaEngine(found, bundle)
