"""The memory of a bare GPU: what all threads share of it, each thread's stream and buffers on both
sides, and what a task brings up in one copy.
"""

import struct
import threading
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from nf4conv.format.layout import Format
from nf4conv.run.device.on_driver import driver
from nf4conv.run.device.on_driver.kernels import Kernels, Purpose
from nf4conv.run.pieces import aligned, starts
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


class Gpu:
    """Holds the memory and the kernels of one GPU, which all threads share.

    The kernels' tables are copied there. For each byte that goes there, at most `returned` come
    back.
    """

    def __init__(
        self,
        device: driver.Device,
        kernels: Mapping[Purpose, Kernels[bytes]],
        format: Format,
        returned: float,
    ) -> None:
        self.returned = returned
        self.device = device
        self.format = format
        self.held = 0  # the most bytes that were held on it so far
        self._lock = threading.Lock()
        self._spare: list[driver.DeviceMemory] = []
        stream = driver.Stream()
        self.kernels: dict[Purpose, Kernels[int]] = {}
        for purpose, found in kernels.items():
            tables = {name: self._upload(stream, table) for name, table in found.tables.items()}
            self.kernels[purpose] = Kernels(found.functions, tables, found.numbers)
        stream.destroy()

    def _upload(self, stream: driver.Stream, content: bytes) -> int:
        """Copies bytes to new memory on the device; returns their address."""
        memory = self.allocate(len(content))
        pinned = driver.PinnedMemory(len(content))
        pinned.view[:] = content
        stream.to_device(memory.address, pinned.address, len(content))
        stream.wait()
        pinned.free()
        return memory.address

    def allocate(self, size: int) -> driver.DeviceMemory:
        """Returns memory on the device, by preference some that was given back."""
        with self._lock:
            fitting = [memory for memory in self._spare if memory.size >= size]
            if fitting:
                memory = min(fitting, key=lambda memory: memory.size)
                self._spare.remove(memory)
                return memory
            self.held += size
        return driver.DeviceMemory(size)

    def give_back(self, memory: driver.DeviceMemory) -> None:
        """Takes back memory that no stream uses any more."""
        with self._lock:
            self._spare.append(memory)


class Launch(NamedTuple):
    """A kernel with its arguments."""

    function: driver.Function
    programs: int
    arguments: tuple[int, ...]  # addresses and integers


class DriverBuffers:
    """Brings bytes to a GPU, launches kernels, and brings results back.

    The worker reads to `source`, with room for tables, which is copied to `input` on the GPU;
    results are copied from `output` there to `result`.
    """

    def __init__(self, gpu: Gpu, worker: Worker) -> None:
        self.gpu = gpu
        self.worker = worker
        self.timed = worker.timed
        self.stream = driver.Stream()
        source_size = worker.piece + TABLE_ROOM
        result_size = int(worker.piece * gpu.returned) + _OUTPUT_SLACK
        self.source = driver.PinnedMemory(source_size)
        self.result = driver.PinnedMemory(result_size)
        self.input = gpu.allocate(source_size)
        self.output = gpu.allocate(result_size)
        self.checked: FileRange | None = None  # the group index that was found right last
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

        The thread reads nothing else meanwhile. All but `needed` makes room.
        """
        *offsets, size = starts(aligned(stop - start) for _, start, stop in ranges)
        memory = self._kept.get(ranges)
        if memory is None:
            for other in self._kept.keys() - needed:
                self.gpu.give_back(self._kept.pop(other))
            memory = self.gpu.allocate(size)
            for file_range, offset in zip(ranges, offsets, strict=True):
                self._bring(file_range, memory.address + offset)
            self._kept[ranges] = memory
        return [memory.address + offset for offset in offsets]

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

        Both are counted from the beginning. Returns once all of that is done.
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


class Row(NamedTuple):
    """A row of a table that a kernel finds its work in."""

    source: int  # address of what it reads
    result: int  # address of what it writes
    scales: int  # address of a second thing that it writes
    elements: int  # of what it reads


class BatchInput:
    """Collects what a task brings to the GPU.

    file ranges, each at a multiple of 64 bytes | numbers that the host knows | tables of integers
    """

    def __init__(self, buffers: DriverBuffers) -> None:
        self.buffers = buffers
        self.stop = 0  # bytes of the input that are used so far
        self._ranges: list[FileRange] = []
        self._positions: list[int] = []
        self._kept: set[tuple[FileRange, ...]] = set()

    def add(self, file_range: FileRange) -> int:
        """Adds bytes of a file; returns their position."""
        self._ranges.append(file_range)
        self._positions.append(self.stop)
        _, start, stop = file_range
        return self.take(stop - start)

    def keep(self, ranges: tuple[FileRange, ...]) -> list[int]:
        """Returns the addresses of bytes that later batches may need again; to be called before
        `read`.
        """
        self._kept.add(ranges)
        return self.buffers.keep(ranges, self._kept)

    def take(self, size: int) -> int:
        """Takes room for bytes that the host fills once all has been read; returns its position."""
        start = self.stop
        self.stop += aligned(size)
        return start

    def read(self) -> None:
        """Reads all that was added; what lies between the ranges becomes zero."""
        self.buffers.reserve(source=self.stop + TABLE_ROOM)
        view = self.buffers.source.view
        self.buffers.worker.fill(view, self._ranges, self._positions)
        for (_, start, stop), position in zip(self._ranges, self._positions, strict=True):
            gap = -(stop - start) % 64
            if gap:
                end = position + stop - start
                view[end : end + gap] = bytes(gap)

    def address(self, position: int) -> int:
        """Returns where a position is on the GPU, once all has been read."""
        return self.buffers.input.address + position

    def put(self, position: int, number: float) -> int:
        """Writes a float32 to a position, once all has been read; returns its address."""
        struct.pack_into("<f", self.buffers.source.view, position, number)
        return self.address(position)

    def table(self, columns: Sequence[Iterable[int]]) -> int:
        """Adds a table of integers, one column after the other; returns its address."""
        values = array("q")
        for column in columns:
            values.extend(column)
        raw = values.tobytes()
        position = self.take(len(raw))
        self.buffers.source.view[position : position + len(raw)] = raw
        return self.address(position)

    def tiled_table(self, rows: Sequence[Row], tile: int) -> tuple[int, int]:
        """Adds a table of rows and the first tile of each; a tile has so many elements.

        Returns its address, and the number of tiles: the programs of a kernel.
        """
        *first_tiles, tiles = starts(-(-row.elements // tile) for row in rows)
        columns = list(zip(*rows, strict=True))
        return self.table([*columns, first_tiles]), tiles
