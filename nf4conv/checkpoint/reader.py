"""Positional reads: many threads share one open file, and none of them moves a file position."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from nf4conv.checkpoint.header import TensorInfo
from nf4conv.errors import SourceError, named


class Reader:
    """Reads byte ranges of source files into the caller's buffers. Thread-safe; files stay open until it is closed."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read_into(self, path: Path, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `path` from `start` on.

        Raises:
            SourceError: the file cannot be read, or ends early.
        """
        descriptor = self._descriptor(path)
        position = 0
        with named(path, SourceError):
            while position < len(buffer):
                count = os.preadv(descriptor, [buffer[position:]], start + position)
                if count == 0:
                    raise SourceError(f"{path}: ends at byte {start + position:,}; it was cut off while being read")
                position += count

    def forget(self, path: Path) -> None:
        """Close a file that is not read any more."""
        with self._lock:
            descriptor = self._descriptors.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def interrupt(self) -> None:
        """Let whoever waits for data give up; local files keep nobody waiting."""

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                with named(path, SourceError):
                    self._descriptors[path] = os.open(path, os.O_RDONLY)
            return self._descriptors[path]

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def read_chunks(path: Path) -> Iterator[bytes]:
    """A file from its beginning to its end, a few megabytes at a time; a SourceError if it cannot be read."""
    with named(path, SourceError), path.open("rb") as file:
        while chunk := file.read(2**22):
            yield chunk


def read_bytes(tensor: TensorInfo) -> bytes:
    """The bytes of a small tensor; a SourceError if they cannot be read."""
    with named(tensor.file, SourceError), tensor.file.open("rb") as file:
        file.seek(tensor.start)
        return file.read(tensor.nbytes)
