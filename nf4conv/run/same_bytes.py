"""Whether two things are the same bytes, in host memory: what is stored, and what is at hand or
stored elsewhere.

That takes neither torch nor a GPU, and goes as fast as both can be read.
"""

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from nf4conv.output.writer import ShardWriter
from nf4conv.report.measured import TensorDifference
from nf4conv.run.loop import Task, Worker
from nf4conv.sources.reader import Reader
from nf4conv.sources.tensors import FileRange, TensorInfo

_CHUNK: Final = 2**22  # bytes that are read and compared at a time
_compare_memory: Final = ctypes.CDLL(None).memcmp  # which lets go of the interpreter lock
_compare_memory.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_room: Final = threading.local()  # of each thread, what it reads a chunk into


class Comparer(ShardWriter):
    """In a writer's place: holds what it is given against what is stored.

    Args:
        reader: of what is stored.
        stored: that, by where it begins in the data, and named by what is to be found unlike.
        advance: told how many stored bytes have been read.

    Attributes:
        unlike: the names of what is not the same.
    """

    def __init__(
        self, reader: Reader, stored: Mapping[int, TensorInfo], advance: Callable[[int], None]
    ) -> None:
        self.unlike: set[str] = set()
        self._reader = reader
        self._starts = sorted(stored)
        self._stored = [stored[start] for start in self._starts]
        self._advance = advance

    def write(self, offset: int, data: memoryview) -> None:
        index = bisect_right(self._starts, offset) - 1
        while data:
            first = self._stored[index]
            first = first._replace(start=first.start + offset - self._starts[index])
            names, stop, index = [first.name], first.stop, index + 1
            while stop - first.start < len(data) and self._stored[index].file_range[:2] == (
                first.file,
                stop,
            ):
                names, stop, index = (
                    [*names, self._stored[index].name],
                    self._stored[index].stop,
                    index + 1,
                )
            count = min(stop - first.start, len(data))
            if not self.is_stored(first, data[:count]):
                self.unlike.update(names)
            offset, data = offset + count, data[count:]

    def is_stored(self, place: TensorInfo, data: memoryview) -> bool:
        """Whether these bytes, which are in memory that could be written to, begin what is stored
        at a place.
        """
        if not hasattr(_room, "bytes"):
            _room.bytes = memoryview(bytearray(_CHUNK))
        for at in range(0, len(data), _CHUNK):
            part = data[at : at + _CHUNK]
            found = _room.bytes[: len(part)]
            self._reader.read_into(place.file, place.start + at, found)
            self._advance(len(part))
            left, right = (
                ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (found, part)
            )
            if _compare_memory(left, right, len(part)):
                return False
        return True


class HostEngine:
    """Workers that have host memory, and compute nothing."""

    device = "host"  # which as few workers keep busy as a GPU

    @contextmanager
    def worker(
        self, reader: Reader, piece: int, advance: Callable[[int], None]
    ) -> Iterator[Worker]:
        yield Worker(reader, memoryview(bytearray(piece)), advance)

    def device_memory(self) -> int:
        return 0


def compare_with(worker: Worker, file: Path, start: int) -> Comparer:
    """What compares with a file from some byte on; what is not the same has no name."""
    return Comparer(
        worker.reader, {0: TensorInfo("", "U8", (), file, start, 2**62)}, worker.advance
    )


def is_same(worker: Worker, file_range: FileRange, file: Path, start: int) -> bool:
    """Whether a range of one file, at most a piece long, is in another one from some byte on."""
    comparer = compare_with(worker, file, start)
    worker.copy(*file_range, comparer, 0)
    return not comparer.unlike


def byte_tasks(results: Iterable[TensorDifference], piece: int) -> Iterator[Task[Worker]]:
    """The comparison of tensors that are stored alike, byte by byte; any worker will do."""
    for result in results:
        for a, b in zip(_parts(result.a), _parts(result.b), strict=True):
            for at in range(0, a.nbytes, piece // 2):
                file_range = a.file, a.start + at, min(a.start + at + piece // 2, a.stop)
                yield partial(_compare, result, file_range, (b.file, b.start + at))


def _parts(tensor: TensorInfo) -> list[TensorInfo]:
    return [tensor] if tensor.encoding is None else [part for _, part in tensor.encoding.parts]


def _compare(
    result: TensorDifference, of_a: FileRange, in_b: tuple[Path, int], worker: Worker
) -> None:
    if result.is_identical is not False and not is_same(worker, of_a, *in_b):
        result.is_identical = False
