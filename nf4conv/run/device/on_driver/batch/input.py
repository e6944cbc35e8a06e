"""Collects what a task brings to the GPU, so that it goes up in one copy.

Its order:

file ranges, each at a multiple of 64 bytes | numbers that the host knows | tables of integers
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nf4conv.run.device.on_driver.batch.buffers import TABLE_ROOM, DriverBuffers
from nf4conv.run.device.on_driver.batch.sizes import starts
from nf4conv.run.grouping import aligned
from nf4conv.sources.tensors import FileRange


class Row(NamedTuple):
    """A row of a table that a kernel finds its work in."""

    source: int  # address of what it reads
    result: int  # address of what it writes
    scales: int  # address of a second thing that it writes
    elements: int  # of what it reads


class TiledTable(NamedTuple):
    """A table of rows, each of which takes some programs of a kernel."""

    address: int
    tiles: int  # programs of all rows


class BatchInput:
    """Collects what a task needs on the GPU.

    Attributes:
        buffers: the thread's.
        stop: how many bytes of the input are used so far.
    """

    def __init__(self, buffers: DriverBuffers) -> None:
        self.buffers = buffers
        self.stop = 0
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

    def tiled_table(self, rows: Sequence[Row], tile: int) -> TiledTable:
        """Adds a table of rows and the first tile of each; a tile has so many elements."""
        *first_tiles, tiles = starts(-(-row.elements // tile) for row in rows)
        columns = list(zip(*rows, strict=True))
        return TiledTable(self.table([*columns, first_tiles]), tiles)
