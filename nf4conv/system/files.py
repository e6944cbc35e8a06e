"""Reads and writes files at positions, syncs them, and keeps private ones in the user's cache.

Many threads share one file. On Linux and macOS they share a descriptor too, since `preadv` and
`pwrite` move no file position. Windows has neither: there one thread after the other moves it.
"""

import os
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from nf4conv.system.machine import IS_POSIX

# a descriptor is not inherited by other programs, and bytes are not changed as if they were text
_PLAIN: Final = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_BLOCK: Final = 512  # bytes; st_blocks counts in it, whatever the blocks of the disk are


class PositionedFile:
    """An open file that any thread may read and write at any position."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()  # for systems on which the file's position has to be moved

    def read(self, buffer: memoryview, position: int) -> int:
        """Reads bytes into a buffer, perhaps fewer than fit; returns how many, 0 at the end."""
        if hasattr(os, "preadv"):
            return os.preadv(self._descriptor, [buffer], position)
        with self._lock:
            os.lseek(self._descriptor, position, os.SEEK_SET)
            data = os.read(self._descriptor, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: memoryview, position: int) -> int:
        """Writes bytes from a position on, perhaps not all; returns how many."""
        if hasattr(os, "pwrite"):
            return os.pwrite(self._descriptor, data, position)
        with self._lock:
            os.lseek(self._descriptor, position, os.SEEK_SET)
            return os.write(self._descriptor, data)

    def truncate(self, size: int) -> None:
        """Makes the file so many bytes long; what is new is zero."""
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """Waits until the disk has all that was written, by whichever thread."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file; no thread may be using it. Does nothing the second time."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_to_read(path: Path) -> PositionedFile:
    """Opens a file to read at positions."""
    return PositionedFile(os.open(path, os.O_RDONLY | _PLAIN))


def create_to_write(path: Path) -> PositionedFile:
    """Creates a file to write at positions; that there is one, or a link, is a FileExistsError."""
    return PositionedFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _PLAIN, 0o666))


def create(path: Path, mode: int) -> int:
    """Creates a file to write from its beginning; where there is one is a FileExistsError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, mode)


def sync(descriptor: int) -> None:
    """Waits until the disk has a file's content."""
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Makes renames in a folder durable. Does nothing on Windows, which cannot be asked to."""
    if not IS_POSIX:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def let_go(path: Path) -> None:
    """Lets the page cache drop a file that is on disk, if the system can be told to.

    Linux can. macOS and Windows keep what they think right.
    """
    with suppress(OSError, AttributeError), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def space_taken(path: Path) -> int:
    """Returns the bytes that a file takes on its disk; holes in it take none.

    On Windows, which counts no blocks, its size.
    """
    status = path.stat()
    if hasattr(status, "st_blocks"):
        return status.st_blocks * _BLOCK
    return status.st_size


# --- private files --------------------------------------------------------------------------------


def read_private(path: Path) -> bytes | None:
    """Reads a file that belongs to this user and that no other may write.

    Windows tells Python neither owner nor permissions. There every file is taken for the user's: it
    is as safe as its folder, and a user's profile is closed to others.
    """
    with os.fdopen(
        os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _PLAIN), "rb"
    ) as file:
        if not _belongs_to_user(os.fstat(file.fileno())):
            return None
        return file.read()


def _belongs_to_user(status: os.stat_result) -> bool:
    """Returns True for a file that belongs to this user and that no other may write."""
    if not hasattr(os, "geteuid"):
        return True
    is_writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.geteuid() and not is_writable_by_others


def cache_folder() -> Path | None:
    """Returns where what is worth keeping between runs is kept; None for a user with no home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if not cache.is_absolute():  # its specification says to ignore relative ones
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            return None
    return cache / "nf4conv"
