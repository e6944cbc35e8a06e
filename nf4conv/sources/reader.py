"""Reads files: byte ranges of weight files, and small files as a whole.

Many threads share one open file, and none moves the position of another. A thread reads bytes of
the page cache itself. Where that takes long, because they come from a disk or over a network, a
read is cut into blocks for many threads: so many in flight fill a disk and hide the latency of a
network.
"""

import hashlib
import json
import random
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from nf4conv.errors import PlanError, SourceError, first_line, named
from nf4conv.sources.tensors import TensorInfo
from nf4conv.system.files import open_to_read

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MOST_OPEN: Final = 64  # files; macOS allows a process 256 by default
_BLOCK: Final = 2**20  # bytes that one of many threads reads at a time
_IN_FLIGHT: Final = 32  # such reads, of all files
_SLOW: Final = 2e-9  # seconds a byte: a fraction of what the page cache gives

_AT_A_TIME: Final = 8  # small reads, of as many files
_LONG: Final = 1e-3  # seconds that a small read takes from a disk, or over a network, at least

_PROBE: Final = 2**24  # bytes that are read at a time to see how fast a disk is
_PROBES: Final = 16
_PROBING: Final = 1.0  # seconds after which no other probe begins

_CHUNK: Final = 2**22  # bytes of a whole file that are read at a time
_LARGEST_READ: Final = 2**22  # bytes of a small tensor
_LARGEST_JSON: Final = 2**24  # bytes of config.json and the like
_DEEPEST_JSON: Final = 64  # containers in containers


ItemT = TypeVar("ItemT")
FoundT = TypeVar("FoundT")


def each(find: Callable[[ItemT], FoundT], items: Iterable[ItemT]) -> list[FoundT]:
    """Makes a small read for each item; returns what was found in their order, or raises the first
    error.

    Threads help as soon as a read takes long. Reads from the page cache they would only hinder.
    """
    left = iter(items)
    found: list[FoundT] = []
    for item in left:
        started = time.perf_counter()
        found.append(find(item))
        if time.perf_counter() - started > _LONG:
            break
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return [*found, *pool.map(find, left)]


@dataclass(frozen=True)
class FileBytes:
    """A file, which may be on the Hub."""

    size: int
    read: Callable[[int, int], bytes]  # bytes start … stop


Absent: TypeAlias = Mapping[Path, FileBytes]
"""Files that are not on this disk, by the paths that they would have."""


class _OpenFile:
    """An open file.

    Attributes:
        content: what is read at positions.
        readers: the number of threads that are reading it.
        is_slow: True if the last large read took long; None if there was none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content = open_to_read(path)
        self.readers = 0
        self.is_slow: bool | None = None

    def read(self, start: int, buffer: memoryview) -> float:
        """Fills a buffer with the bytes from `start` on, and returns the seconds that took."""
        started = time.perf_counter()
        position = 0
        while position < len(buffer):
            count = self.content.read(buffer[position:], start + position)
            if count == 0:
                end = start + position
                raise SourceError(
                    f"{self._path}: ends at byte {end:,}; it was cut off while being read",
                    path=self._path,
                )
            position += count
        return time.perf_counter() - started


class Reader:
    """Reads byte ranges of source files into the caller's buffers; of `absent` files, from the Hub.

    Threads may share it. The files that were read last stay open. Use it as a context manager.
    """

    def __init__(self, absent: Absent | None = None) -> None:
        self._absent = absent or {}
        self._files: OrderedDict[Path, _OpenFile] = OrderedDict()  # those read last are last
        self._lock = threading.Lock()
        # its threads start when there is work
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, "nf4conv-read")

    def read_into(self, path: Path, start: int, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes of `path` from `start` on."""
        if path in self._absent:
            if len(buffer):
                buffer[:] = self._absent[path].read(start, start + len(buffer))
            return
        with named(path, SourceError), self._opened(path) as file:
            if file.is_slow is None and len(buffer) > _BLOCK:
                # the first block tells how to read the others
                seconds = file.read(start, buffer[:_BLOCK])
                file.is_slow = seconds > _BLOCK * _SLOW
                start += _BLOCK
                buffer = buffer[_BLOCK:]
            if file.is_slow and len(buffer) > _BLOCK:
                seconds = self._read_in_blocks(file, start, buffer)
            else:
                seconds = file.read(start, buffer)
            if len(buffer) >= _BLOCK:
                file.is_slow = seconds > len(buffer) * _SLOW

    def _read_in_blocks(self, file: _OpenFile, start: int, buffer: memoryview) -> float:
        """Lets many threads read; returns the seconds that one thread would have taken."""
        blocks = []
        for at in range(0, len(buffer), _BLOCK):
            block = buffer[at : at + _BLOCK]
            blocks.append(self._pool.submit(file.read, start + at, block))
        wait(blocks)  # after an error too: then the buffer is the caller's again
        return sum(block.result() for block in blocks)

    def forget(self, path: Path) -> None:
        """Closes a file that is not read any more."""
        with self._lock:
            file = self._files.pop(path, None)
        if file is not None:
            file.content.close()

    def interrupt(self) -> None:
        """Lets every thread that waits for data give up; local files keep nobody waiting."""

    @contextmanager
    def _opened(self, path: Path) -> Iterator[_OpenFile]:
        """Opens a file, and sees that it is not closed meanwhile."""
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

    def _open(self, path: Path) -> _OpenFile:
        """Opens a file, and closes one that nobody reads if too many are open."""
        if len(self._files) >= _MOST_OPEN:
            for other, file in self._files.items():
                if not file.readers:
                    self._files.pop(other).content.close()
                    break
        return _OpenFile(path)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for file in self._files.values():
            file.content.close()
        self._files.clear()


@contextmanager
def bytes_of(path: Path, absent: Absent | None = None) -> Iterator[FileBytes]:
    """Opens a file, which may be on the Hub."""
    if absent and path in absent:
        yield absent[path]
        return
    with named(path, SourceError), path.open("rb") as file:

        def read(start: int, stop: int) -> bytes:
            file.seek(start)
            return file.read(stop - start)

        yield FileBytes(file.seek(0, 2), read)


def read_chunks(path: Path, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Yields a file from its beginning to its end, a few megabytes at a time."""
    with named(path, SourceError), path.open("rb") as file:
        file.seek(start)
        while chunk := file.read(_CHUNK if stop is None else min(stop - file.tell(), _CHUNK)):
            yield chunk


def digest_of(path: Path, digest: "hashlib._Hash | None" = None) -> str:
    """Returns a digest of a file in hexadecimal, by default the SHA-256."""
    digest = digest or hashlib.sha256()
    for chunk in read_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def read_bytes(tensor: TensorInfo, absent: Absent | None = None) -> bytes:
    """Returns the bytes of a small tensor."""
    if tensor.nbytes > _LARGEST_READ:
        raise SourceError.about(
            tensor.file, tensor.name, f"{tensor.nbytes:,} bytes, too many for what it is"
        )
    with bytes_of(tensor.file, absent) as file:
        return file.read(tensor.start, tensor.stop)


def read_json(path: Path, most: int = _LARGEST_JSON) -> dict[str, Any]:
    """Returns the JSON object in a file of at most so many bytes; raises a SourceError if there is
    none, or one that is nested too deeply.
    """
    text = read_small(path, most)
    try:
        content = json.loads(text)
        is_too_deep = isinstance(content, dict) and _depth(content) > _DEEPEST_JSON
    except RecursionError:
        is_too_deep = True
    except ValueError as error:
        raise SourceError(f"{path}: not JSON: {error}", path=path) from error
    if is_too_deep:
        raise SourceError(f"{path}: not JSON: nested more than {_DEEPEST_JSON} times", path=path)
    if not isinstance(content, dict):
        raise SourceError(f"{path}: not a JSON object", path=path)
    return content


def reading_speed(files: Iterable[Path]) -> float | None:
    """Returns the bytes a second at which places all over some files were read just now, in about a
    second. None if there is nothing to read, or if a file is not on this disk.
    """
    places = []
    for file in sorted(files):
        if not file.exists():
            return None
        size = file.stat().st_size
        places += [(file, start, min(_PROBE, size - start)) for start in range(0, size, _PROBE)]
    buffer = memoryview(bytearray(_PROBE))
    count = 0
    seconds = 0.0
    with Reader() as reader:
        for file, start, size in random.Random(0).sample(places, min(len(places), _PROBES)):
            began = time.perf_counter()
            reader.read_into(file, start, buffer[:size])
            seconds += time.perf_counter() - began
            count += size
            if seconds > _PROBING:
                break
    return count / seconds if count else None


def read_small(path: Path, most: int = _LARGEST_JSON) -> bytes:
    """Returns the content of a file of at most so many bytes; raises a SourceError if it is larger,
    or a pipe or the like.
    """
    with named(path, SourceError):
        status = path.stat()
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(f"{path}: is no file", path=path)
        if size > most:
            raise SourceError(f"{path}: {size:,} bytes; expected at most {most:,}", path=path)
        return path.read_bytes()


def _depth(value: Any) -> int:
    """Returns how many times containers are nested in each other."""
    inside = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(one) for one in inside if isinstance(one, (dict, list))), default=0)


def read_ids(path: Path) -> "npt.NDArray[np.integer[Any]]":
    """Reads integers of any type, in one dimension or more; a large file is mapped, not read.
    Raises a PlanError if they are none.
    """
    import numpy as np  # importing it takes a moment

    if path.exists() and not path.is_file():
        raise PlanError(f"{path}: is no file", path=path)  # numpy would wait at a pipe
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises anything for what is no array
        raise PlanError(
            f"{path}: is no array of numpy that can be read ({first_line(error)})", path=path
        ) from error
    if not isinstance(ids, np.ndarray) or ids.ndim < 1 or ids.dtype.kind not in "iu":
        raise PlanError(f"{path}: expected token ids: an array of integers", path=path)
    return ids
