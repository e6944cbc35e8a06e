"""A worker on a bare GPU: a stream, and buffers on both sides."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from nf4conv.errors import Nf4convError
from nf4conv.run.loop import Worker
from nf4conv.run.without_torch import driver
from nf4conv.run.without_torch.bundle import Kernels, Purpose, load_bundles
from nf4conv.sources.reader import Reader

TABLE_ROOM: Final = 2**20
"""Bytes at the end of a worker's input for the tables of a batch: 13 integers for each of up to
4096 tensors.
"""

FLAG: Final = 0
HEAD: Final = 256
"""Where in a worker's output kernels say that a weight is not finite, or that a cast made a value
infinite, and where anything else begins. What a task finds set it clears: to clear it before each
task would be one more call of the driver, whose lock all workers want.
"""

_OUTPUT_SLACK: Final = (
    2**20
)  # bytes of a worker's output beyond what a full piece becomes: room for alignment

Launch = tuple[driver.Function, int, tuple[int, ...]]  # kernel, programs, arguments


class CudaEngine:
    """One GPU, with kernels by purpose; `returned` bytes come back from it for each that goes
    there.
    """

    def __init__(
        self, device: driver.Device, kernels: Mapping[Purpose, Kernels[bytes]], returned: float
    ) -> None:
        self._device = device
        self._returned = returned
        self._lock = threading.Lock()
        self._spare: list[driver.DeviceMemory] = []
        self._held = 0
        stream = driver.Stream()
        self.kernels = {  # by purpose, with their tables on the device
            purpose: Kernels(
                found.functions,
                {name: self._upload(stream, content) for name, content in found.tables.items()},
                found.numbers,
            )
            for purpose, found in kernels.items()
        }
        stream.destroy()

    @property
    def device(self) -> str:
        return f"cuda:{self._device.ordinal}"

    @contextmanager
    def worker(
        self, reader: Reader, piece: int, advance: Callable[[int], None]
    ) -> Iterator["CudaWorker"]:
        self._device.use()
        try:
            sizes = piece + TABLE_ROOM, int(piece * self._returned) + _OUTPUT_SLACK
            worker = CudaWorker(self, reader, sizes, advance)
            try:
                yield worker
            finally:
                worker.close()
        except driver.CudaOutOfMemoryError as error:
            raise Nf4convError(
                f"{self.device}: {error}; try a smaller --buffer-size, or --device cpu"
            ) from error

    def device_memory(self) -> int:
        return self._held

    def allocate(self, size: int) -> driver.DeviceMemory:
        """Memory on the device, by preference some that was given back."""
        with self._lock:
            fitting = [memory for memory in self._spare if memory.size >= size]
            if fitting:
                memory = min(fitting, key=lambda memory: memory.size)
                self._spare.remove(memory)
                return memory
            self._held += size
        return driver.DeviceMemory(size)

    def give_back(self, memory: driver.DeviceMemory) -> None:
        """Memory that no stream uses any more."""
        with self._lock:
            self._spare.append(memory)

    def _upload(self, stream: driver.Stream, content: bytes) -> int:
        memory = self.allocate(len(content))
        pinned = driver.PinnedMemory(len(content))
        pinned.view[:] = content
        stream.to_device(memory.address, pinned.address, len(content))
        stream.wait()
        pinned.free()
        return memory.address


class CudaWorker(Worker):
    """A thread's stream and buffers, of so many bytes on either side."""

    def __init__(
        self,
        engine: CudaEngine,
        reader: Reader,
        sizes: tuple[int, int],
        advance: Callable[[int], None],
    ) -> None:
        self.engine = engine
        self.stream = driver.Stream()
        # a piece of weights with room for tables, and what comes back; the same on the device
        self.source, self.result = (driver.PinnedMemory(size) for size in sizes)
        self.input, self.output = (engine.allocate(size) for size in sizes)
        self._scratch: driver.DeviceMemory | None = None
        self.clear_flag()
        super().__init__(reader, self.source.view, advance)

    def close(self) -> None:
        self.stream.wait()
        self.stream.destroy()
        self.source.free()
        self.result.free()
        for memory in (self.input, self.output, self._scratch):
            if memory is not None:
                self.engine.give_back(memory)

    def reserve(self, source: int = 0, result: int = 0) -> None:
        """Make the buffers at least so large: what cannot be cut may exceed a piece. They lose what
        they held.
        """
        if source > len(self.source.view):
            self.source, self.input = self._larger(self.source, self.input, source)
            self._buffer = self.source.view
        if result > len(self.result.view):
            self.result, self.output = self._larger(self.result, self.output, result)
            self.clear_flag()

    def _larger(
        self, host: driver.PinnedMemory, device: driver.DeviceMemory, size: int
    ) -> tuple[driver.PinnedMemory, driver.DeviceMemory]:
        host.free()
        self.engine.give_back(device)
        return driver.PinnedMemory(size), self.engine.allocate(size)

    def clear_flag(self) -> None:
        self.stream.clear(self.output.address, HEAD)

    def is_flagged(self) -> bool:
        """Whether the last task's kernels have set the flag, which is cleared then."""
        found = any(self.result.view[FLAG : FLAG + 4])
        if found:
            self.clear_flag()
        return found

    def scratch(self, size: int) -> int:
        """The address of so many bytes on the device for what neither comes nor goes; they lose
        what they held.
        """
        if self._scratch is None or self._scratch.size < size:
            if self._scratch is not None:
                self.engine.give_back(self._scratch)
            self._scratch = self.engine.allocate(size)
        return self._scratch.address

    def execute(self, upload: int, launches: Sequence[Launch], download: int) -> None:
        """Copy so many bytes of the input up, launch, copy so many bytes of the output down, and
        wait for it all.
        """
        if upload:
            self.stream.to_device(self.input.address, self.source.address, upload)
        for function, programs, arguments in launches:
            if programs:
                function.launch(self.stream, programs, arguments)
        self.fetch(0, self.output.address, download)

    def fetch(self, start: int, address: int, size: int) -> None:
        """Copy so many bytes on the device to a place in the result, once all before is done, and
        wait for it.
        """
        self.stream.to_host(self.result.address + start, address, size)
        self.stream.wait()


def gpu_named(device: str) -> int | None:
    """Which of the GPUs that the driver counts "auto", "cuda" or "cuda:N" is; None if there is no
    such.
    """
    name, _, index = device.partition(":")
    is_there = (
        name in ("auto", "cuda")
        and (index or "0").isdecimal()
        and int(index or 0) < driver.device_count()
    )
    return int(index or 0) if is_there else None


def bare_engine(
    device: str, purposes: Callable[[], Collection[Purpose] | None], returned: float
) -> CudaEngine | None:
    """An engine without torch; None where torch must do it: no such GPU, or no kernels, or none
    that can be compiled.

    `purposes`, asked only where there is a GPU, tells what is to be done; None if there are no
    kernels for it.
    """
    number = gpu_named(device)
    needed = None if number is None else purposes()
    if number is None or needed is None:
        return None
    found = driver.Device(number)
    bundles = load_bundles(found, needed)
    return None if bundles is None else CudaEngine(found, bundles, returned)
