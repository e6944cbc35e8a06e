"""Compares bytes in host memory: what is stored with what is at hand, or stored elsewhere.

That takes neither torch nor a GPU, and goes as fast as both can be read.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from nf4conv.report.measured import TensorDifference
from nf4conv.run.loop import Task
from nf4conv.run.worker import Worker
from nf4conv.sources.reader import Reader
from nf4conv.sources.tensors import FileRange, TensorInfo
from nf4conv.system.machine import is_equal

_CHUNK: Final = 2**22  # bytes that are read and compared at a time, while caches hold both
_room: Final = threading.local()  # of each thread, what it reads a chunk into


class StoredBytes:
    """Takes bytes for places, as a shard's file does, and compares them with what is stored there.

    That is listed by the offset that its first byte is written to; several may have one name.
    """

    def __init__(
        self, reader: Reader, stored: Mapping[int, TensorInfo], advance: Callable[[int], None]
    ) -> None:
        self.unlike: set[str] = set()  # the names of those that got other bytes than are stored
        self._reader = reader
        self._starts = sorted(stored)
        self._stored = [stored[start] for start in self._starts]
        self._advance = advance

    def write(self, offset: int, data: memoryview) -> None:
        """Compares bytes, in memory that could be written to, with those stored at an offset."""
        index = bisect_right(self._starts, offset) - 1
        while data:
            place = self._stored[index]
            place = place._replace(start=place.start + offset - self._starts[index])
            last = self._last_neighbour(index, place, len(data))
            stop = self._stored[last].stop
            count = min(stop - place.start, len(data))
            if not self.is_stored(place, data[:count]):
                self._find_unlike(index, last, offset, data[:count])
            index = last + 1
            offset += count
            data = data[count:]

    def _find_unlike(self, first: int, last: int, offset: int, data: memoryview) -> None:
        """Finds out which of some neighbours got other bytes than are stored."""
        for number in range(first, last + 1):
            part = self._stored[number]
            start = max(self._starts[number] - offset, 0)
            skipped = max(offset - self._starts[number], 0)
            mine = data[start : start + part.nbytes - skipped]
            if not self.is_stored(part._replace(start=part.start + skipped), mine):
                self.unlike.add(part.name)

    def _last_neighbour(self, index: int, place: TensorInfo, size: int) -> int:
        """Returns the last of the tensors that lie one after the other in the file, from one on.

        Together they are read at once; those that begin behind `size` bytes do not count.
        """
        stop = place.stop
        while stop - place.start < size:
            following = self._stored[index + 1]
            if following.file != place.file or following.start != stop:
                break
            index += 1
            stop = following.stop
        return index

    def is_stored(self, place: TensorInfo, data: memoryview) -> bool:
        """Returns True if bytes, in writable memory, begin what is stored at a place."""
        if not hasattr(_room, "bytes"):
            _room.bytes = memoryview(bytearray(_CHUNK))
        for at in range(0, len(data), _CHUNK):
            part = data[at : at + _CHUNK]
            found = _room.bytes[: len(part)]
            self._reader.read_into(place.file, place.start + at, found)
            self._advance(len(part))
            if not is_equal(found, part):
                return False
        return True


def stored_from(worker: Worker, file: Path, start: int) -> StoredBytes:
    """Returns what compares with a file from some byte on; what is unlike has no name."""
    everything = TensorInfo("", "U8", (), file, start, 2**62)
    return StoredBytes(worker.reader, {0: everything}, worker.advance)


def byte_tasks(results: Iterable[TensorDifference], piece: int) -> Iterator[Task]:
    """Yields the tasks that compare tensors which are stored as they are, byte by byte."""
    step = min(piece // 2, _CHUNK)
    for result in results:
        a, b = result.a, result.b
        for at in range(0, a.nbytes, step):
            start = a.start + at
            file_range = (a.file, start, min(start + step, a.stop))
            yield partial(_compare, result, file_range, b.file, b.start + at)


def _compare(
    result: TensorDifference, of_a: FileRange, file_of_b: Path, start: int, worker: Worker
) -> None:
    if result.is_identical is False:
        return
    stored = stored_from(worker, file_of_b, start)
    worker.copy(*of_a, stored, 0)
    if stored.unlike:
        result.is_identical = False
