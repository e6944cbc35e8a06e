"""Positional reads: many threads share one open file, and none of them moves a file position.

What is in the page cache is read by whoever wants it. Where that takes long, because it comes from
a disk or over a network, a read is cut into blocks for many threads: so many in flight fill a disk
and hide the latency of a network.
"""

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from nf4conv.errors import SourceError, named
from nf4conv.sources.tensors import TensorInfo

_MOST_OPEN: Final = 64  # files; macOS allows a process 256 by default
_LARGEST_READ: Final = 2**22
_BLOCK: Final = 2**20  # bytes that one of many threads reads at a time
_IN_FLIGHT: Final = 32  # such reads, of all files
_AT_A_TIME: Final = 8  # small reads, of as many files
_LONG: Final = 1e-3  # seconds that such a read takes from a disk, or over a network, at least
_SLOW: Final = 2e-9  # seconds a byte: a fraction of what the page cache gives


ItemT = TypeVar("ItemT")
FoundT = TypeVar("FoundT")


def each(find: Callable[[ItemT], FoundT], items: Iterable[ItemT]) -> list[FoundT]:
    """What is found by a small read for each item, in their order; the first error is raised.

    Threads are called as soon as a read takes long: those of the page cache they would only hinder.
    """
    left, at_once, last = iter(items), list[FoundT](), time.perf_counter()
    for item in left:
        at_once.append(find(item))
        started, last = last, time.perf_counter()
        if last - started > _LONG:
            break
    waiting = [*left]
    some = (
        len(waiting) // (2 * _AT_A_TIME) + 1
    )  # at once, for to hand over one takes as long as to read a page
    runs = [waiting[start : start + some] for start in range(0, len(waiting), some)]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return at_once + [
            found for run in pool.map(lambda run: list(map(find, run)), runs) for found in run
        ]


class _Open:
    """An open file, how many threads are reading it, and whether the last large read took long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.readers = 0
        self.is_slow: bool | None = None  # not known yet

    def read(self, start: int, buffer: memoryview) -> float:
        """Fill a buffer; the seconds that took."""
        started, position = time.perf_counter(), 0
        while position < len(buffer):
            count = os.preadv(self.descriptor, [buffer[position:]], start + position)
            if count == 0:
                end = start + position
                raise SourceError(
                    f"{self._path}: ends at byte {end:,}; it was cut off while being read"
                )
            position += count
        return time.perf_counter() - started


class Reader:
    """Reads byte ranges of source files into the caller's buffers. Thread-safe; the last files read
    stay open.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[Path, _Open] = OrderedDict()  # those read last are last
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(
            _IN_FLIGHT, "nf4conv-read"
        )  # whose threads start when there is work

    def read_into(self, path: Path, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `path` from `start` on; a SourceError if it cannot be
        read, or ends early.
        """
        with named(path, SourceError), self._opened(path) as file:
            if (
                file.is_slow is None and len(buffer) > _BLOCK
            ):  # the first block tells how to read the others
                file.is_slow = file.read(start, buffer[:_BLOCK]) > _BLOCK * _SLOW
                start, buffer = start + _BLOCK, buffer[_BLOCK:]
            if file.is_slow and len(buffer) > _BLOCK:
                places = range(0, len(buffer), _BLOCK)
                blocks = [
                    self._pool.submit(file.read, start + at, buffer[at : at + _BLOCK])
                    for at in places
                ]
                wait(blocks)  # after an error too: then the buffer is the caller's again
                seconds = sum(
                    block.result() for block in blocks
                )  # which one thread would have taken
            else:
                seconds = file.read(start, buffer)
            if len(buffer) >= _BLOCK:
                file.is_slow = seconds > len(buffer) * _SLOW

    def forget(self, path: Path) -> None:
        """Close a file that is not read any more."""
        with self._lock:
            file = self._files.pop(path, None)
        if file is not None:
            os.close(file.descriptor)

    def interrupt(self) -> None:
        """Let whoever waits for data give up; local files keep nobody waiting."""

    @contextmanager
    def _opened(self, path: Path) -> Iterator[_Open]:
        """A file, which is not closed meanwhile."""
        with self._lock:
            file = self._files.get(path) or self._open(path)
            self._files[path] = file
            self._files.move_to_end(path)
            file.readers += 1
        try:
            yield file
        finally:
            with self._lock:
                file.readers -= 1

    def _open(self, path: Path) -> _Open:
        """Open a file, and close one that nobody reads where that makes too many."""
        idle = [other for other, file in self._files.items() if not file.readers]
        if len(self._files) >= _MOST_OPEN and idle:
            os.close(self._files.pop(idle[0]).descriptor)
        return _Open(path)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()


def read_chunks(path: Path) -> Iterator[bytes]:
    """A file from its beginning to its end, a few megabytes at a time; a SourceError if it cannot
    be read.
    """
    with named(path, SourceError), path.open("rb") as file:
        while chunk := file.read(2**22):
            yield chunk


def digest_of(path: Path, digest: "hashlib._Hash | None" = None) -> str:
    """The SHA-256 of a file, or another digest of it, in hexadecimal; a SourceError if it cannot be
    read.
    """
    digest = digest or hashlib.sha256()
    for chunk in read_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def read_bytes(tensor: TensorInfo) -> bytes:
    """The bytes of a small tensor; a SourceError if it is not small, or they cannot be read."""
    if tensor.nbytes > _LARGEST_READ:
        raise SourceError(
            f"{tensor.file}: {tensor.name}: {tensor.nbytes:,} bytes, too many for what it is"
        )
    with named(tensor.file, SourceError), tensor.file.open("rb") as file:
        file.seek(tensor.start)
        return file.read(tensor.nbytes)
