"""A thread's stream, and its buffers on both sides of a bare GPU."""

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from nf4conv.run.device.on_driver import driver
from nf4conv.run.device.on_driver.gpu import Gpu
from nf4conv.run.grouping import aligned
from nf4conv.run.worker import Activity, Worker
from nf4conv.sources.tensors import FileRange

TABLE_ROOM: Final = 2**20
"""Bytes at the end of a thread's input for the tables of a batch: 13 integers for each of up to
4096 tensors.
"""

FLAG: Final = 0
"""Where in a thread's output kernels say that a weight is not finite, or that a cast made a value
infinite. A task that finds it set clears it: to clear it before each task would be one more call of
the driver, whose lock all threads want.
"""

HEAD: Final = 256
"""Where in a thread's output anything but the flag begins."""

_OUTPUT_SLACK: Final = 2**20
"""Bytes of a thread's output beyond what a full piece becomes: room for alignment."""


class Launch(NamedTuple):
    """A kernel with its arguments."""

    function: driver.Function
    programs: int
    arguments: tuple[int, ...]  # addresses and integers


class DriverBuffers:
    """Brings bytes to a GPU, launches kernels, and brings results back.

    Args:
        gpu: what all threads share.
        returned: bytes that come back from the GPU for each that goes there, at most.
        worker: the thread's, which gets the buffer on the host.

    Attributes:
        source: a piece of what is read, with room for tables, on the host.
        input: the same on the GPU.
        output: results on the GPU.
        result: the same on the host.
        checked: the group index that was found right last.
    """

    def __init__(self, gpu: Gpu, returned: float, worker: Worker) -> None:
        self.gpu = gpu
        self.worker = worker
        self.timed = worker.timed
        self.stream = driver.Stream()
        source_size = worker.piece + TABLE_ROOM
        result_size = int(worker.piece * returned) + _OUTPUT_SLACK
        self.source = driver.PinnedMemory(source_size)
        self.result = driver.PinnedMemory(result_size)
        self.input = gpu.allocate(source_size)
        self.output = gpu.allocate(result_size)
        self.checked: FileRange | None = None
        self._scratch: driver.DeviceMemory | None = None
        self._kept: dict[tuple[FileRange, ...], driver.DeviceMemory] = {}
        self.clear_flag()
        worker.buffer = self.source.view

    def close(self) -> None:
        """Gives everything back once the stream is idle."""
        self.stream.wait()
        self.stream.destroy()
        self.worker.buffer = memoryview(b"")
        self.source.free()
        self.result.free()
        self.gpu.give_back(self.input)
        self.gpu.give_back(self.output)
        if self._scratch is not None:
            self.gpu.give_back(self._scratch)
        for memory in self._kept.values():
            self.gpu.give_back(memory)

    def reserve(self, source: int = 0, result: int = 0) -> None:
        """Makes the buffers at least so large, because what cannot be cut may exceed a piece.

        A buffer that grows loses what it held.
        """
        if source > len(self.source.view):
            self.worker.buffer = memoryview(b"")
            self.source, self.input = self._larger(self.source, self.input, source)
            self.worker.buffer = self.source.view
        if result > len(self.result.view):
            self.result, self.output = self._larger(self.result, self.output, result)
            self.clear_flag()

    def _larger(
        self, host: driver.PinnedMemory, device: driver.DeviceMemory, size: int
    ) -> tuple[driver.PinnedMemory, driver.DeviceMemory]:
        host.free()
        self.gpu.give_back(device)
        return driver.PinnedMemory(size), self.gpu.allocate(size)

    def clear_flag(self) -> None:
        self.stream.clear(self.output.address, HEAD)

    def is_flagged(self) -> bool:
        """Returns True if the kernels of the last task have set the flag, and clear it."""
        found = any(self.result.view[FLAG : FLAG + 4])
        if found:
            self.clear_flag()
        return found

    def scratch(self, size: int) -> int:
        """Returns the address of so many bytes on the GPU for what neither comes nor goes.

        Whatever the thread held there is lost.
        """
        if self._scratch is None or self._scratch.size < size:
            if self._scratch is not None:
                self.gpu.give_back(self._scratch)
            self._scratch = self.gpu.allocate(size)
        return self._scratch.address

    def keep(
        self, ranges: tuple[FileRange, ...], needed: Collection[tuple[FileRange, ...]]
    ) -> list[int]:
        """Returns the addresses of file ranges on the GPU; reads them unless they are there.

        Args:
            ranges: what is read together; the thread reads nothing else meanwhile.
            needed: what the current task needs of this kind. All else makes room.
        """
        starts = []
        size = 0
        for _, start, stop in ranges:
            starts.append(size)
            size += aligned(stop - start)
        memory = self._kept.get(ranges)
        if memory is None:
            for other in self._kept.keys() - needed:
                self.gpu.give_back(self._kept.pop(other))
            memory = self.gpu.allocate(size)
            for file_range, start in zip(ranges, starts, strict=True):
                self._bring(file_range, memory.address + start)
            self._kept[ranges] = memory
        return [memory.address + start for start in starts]

    def _bring(self, file_range: FileRange, address: int) -> None:
        """Reads a file range to the GPU, as much at a time as the buffer holds."""
        file, first, last = file_range
        view = self.source.view
        for start in range(first, last, len(view)):
            stop = min(start + len(view), last)
            self.worker.fill(view, [(file, start, stop)], [0])
            with self.timed(Activity.COMPUTE):
                self.stream.to_device(address + start - first, self.source.address, stop - start)
                self.stream.wait()

    def execute(self, upload: int, launches: Sequence[Launch], download: int) -> None:
        """Copies bytes of the input up, launches kernels, and copies bytes of the output down.

        Returns once all of that is done.

        Args:
            upload: bytes of the input, from its beginning on.
            launches: the kernels, in order.
            download: bytes of the output, from its beginning on.
        """
        if upload:
            self.stream.to_device(self.input.address, self.source.address, upload)
        for launch in launches:
            if launch.programs:
                launch.function.launch(self.stream, launch.programs, launch.arguments)
        self.fetch(0, self.output.address, download)

    def fetch(self, start: int, address: int, size: int) -> None:
        """Copies bytes on the device to a place in the result, after all that was launched before.

        Returns once that is done.
        """
        self.stream.to_host(self.result.address + start, address, size)
        self.stream.wait()
