"""Positional reads: many threads share one open file, and none of them moves a file position."""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from nf4conv.checkpoint.header import TensorInfo
from nf4conv.errors import SourceError, named

_MOST_OPEN: Final = 64  # files; macOS allows a process 256 by default
_LARGEST_READ: Final = 2**22


class _Open:
    """An open file, and how many threads are reading it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.readers = 0


class Reader:
    """Reads byte ranges of source files into the caller's buffers. Thread-safe; the last files read stay open."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, _Open] = OrderedDict()  # those read last are last
        self._lock = threading.Lock()

    def read_into(self, path: Path, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `path` from `start` on; a SourceError if it cannot be read, or ends early."""
        position = 0
        with named(path, SourceError), self._opened(path) as descriptor:
            while position < len(buffer):
                count = os.preadv(descriptor, [buffer[position:]], start + position)
                if count == 0:
                    raise SourceError(f"{path}: ends at byte {start + position:,}; it was cut off while being read")
                position += count

    def forget(self, path: Path) -> None:
        """Close a file that is not read any more."""
        with self._lock:
            file = self._files.pop(path, None)
        if file is not None:
            os.close(file.descriptor)

    def interrupt(self) -> None:
        """Let whoever waits for data give up; local files keep nobody waiting."""

    @contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        """The descriptor of a file, which is not closed meanwhile."""
        with self._lock:
            file = self._files.get(path) or self._open(path)
            self._files[path] = file
            self._files.move_to_end(path)
            file.readers += 1
        try:
            yield file.descriptor
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
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()


def read_chunks(path: Path) -> Iterator[bytes]:
    """A file from its beginning to its end, a few megabytes at a time; a SourceError if it cannot be read."""
    with named(path, SourceError), path.open("rb") as file:
        while chunk := file.read(2**22):
            yield chunk


def read_bytes(tensor: TensorInfo) -> bytes:
    """The bytes of a small tensor; a SourceError if it is not small, or they cannot be read."""
    if tensor.nbytes > _LARGEST_READ:
        raise SourceError(f"{tensor.file}: {tensor.name}: {tensor.nbytes:,} bytes, too many for what it is")
    with named(tensor.file, SourceError), tensor.file.open("rb") as file:
        file.seek(tensor.start)
        return file.read(tensor.nbytes)
