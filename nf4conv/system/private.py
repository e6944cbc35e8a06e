"""Finds the user's cache folder, and reads and writes files that nobody else could have written.

Also keeps folders of the cache small.
"""

import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from nf4conv.system.files import create
from nf4conv.system.removal import remove

_IN_USE: Final = 3600
"""Seconds after which nobody reads any more what was found in a cache."""

_ATTEMPTS: Final = 10

_FLAGS: Final = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)  # a pipe is not waited for
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def read_private(path: Path) -> bytes | None:
    """Reads a file that belongs to this user and that no other may write.

    Windows tells Python neither owner nor permissions. There every file is taken for the user's: it
    is as safe as its folder, and a user's profile is closed to others.

    Returns:
        The content; None if another user owns the file, or could have written it.

    Raises:
        OSError: it cannot be read.
    """
    with os.fdopen(os.open(path, _FLAGS), "rb") as file:
        if not belongs_to_user(os.fstat(file.fileno())):
            return None
        return file.read()


def belongs_to_user(status: os.stat_result) -> bool:
    """Returns True for a file that belongs to this user and that no other may write."""
    if not hasattr(os, "geteuid"):
        return True
    is_writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.geteuid() and not is_writable_by_others


def write_private(path: Path, content: bytes) -> None:
    """Writes a file for this user, which appears whole or not at all. Makes its folder if needed.

    Raises:
        OSError: it cannot be written.
    """
    for _ in range(_ATTEMPTS - 1):
        with suppress(FileNotFoundError, FileExistsError):  # another process removes it
            _write(path, content)
            return
    _write(path, content)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{os.urandom(8).hex()}")
    try:
        with os.fdopen(create(draft, 0o600), "wb") as file:
            file.write(content)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):  # half of a file would keep a full disk full
            draft.unlink()
        raise


def cache_folder() -> Path | None:
    """Returns where what is worth keeping between runs is kept; None for a user with no home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if not cache.is_absolute():  # its specification says to ignore relative ones
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            return None
    return cache / "nf4conv"


def remove_oldest(folder: Path, most: int) -> None:
    """Removes from a cache what was used longest ago, until the rest is small enough.

    Entries used in the last hour stay, for another process may read them. An entry is renamed
    before it is removed: nobody sees half of one. What cannot be removed stays, too.

    Args:
        folder: the cache. Its entries are files and folders, whose times say when they were used.
        most: the bytes that it may have.
    """
    entries = []
    with suppress(OSError):
        for entry in folder.iterdir():
            with suppress(OSError):  # another process removes it
                entries.append((entry.lstat().st_mtime, _size_of(entry), entry))
    entries.sort(reverse=True)
    total = 0
    latest = time.time() - _IN_USE
    for used, size, entry in entries:
        total += size
        is_removed = entry.name.startswith(".")  # by a process that did not come to its end
        if used < latest and (total > most or is_removed):
            with suppress(OSError):
                if entry.lstat().st_mtime != used:
                    continue
                unseen = f".{os.urandom(8).hex()}"
                entry.rename(folder / unseen)
                remove(folder, unseen)


def _size_of(entry: Path) -> int:
    """Returns the bytes of a file, or of all files below a folder."""
    total = 0
    for folder, _, names in os.walk(entry):
        for name in names:
            total += Path(folder, name).lstat().st_size
    return total + entry.lstat().st_size
