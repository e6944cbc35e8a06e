"""Locks a file for one process at a time.

The lock is held for as long as the descriptor is open, and ends with the process, however it ends.
"""

import importlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from nf4conv.system.kind import IS_POSIX
from nf4conv.system.removal import remove

IS_REMOVED_WHILE_HELD: Final = IS_POSIX
"""True if a locked file can be removed. On Windows no file can be that is open: the lock must be
let go first."""


def open_lock(path: Path) -> int:
    """Opens the file of a lock, which is made if it is missing. A link is not followed.

    Returns:
        The descriptor.

    Raises:
        OSError: it cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
    if hasattr(os, "O_NOFOLLOW"):
        flags |= os.O_NOFOLLOW
    elif path.is_symlink():
        raise OSError(f"{path}: is a link")
    return os.open(path, flags, 0o666)


def hold(lock: int) -> None:
    """Takes a lock for this process, without waiting.

    Args:
        lock: the descriptor that `open_lock` gave.

    Raises:
        OSError: another process holds it, or the file system has no locks.
    """
    if IS_POSIX:
        fcntl = importlib.import_module("fcntl")  # Windows has none
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    msvcrt = importlib.import_module("msvcrt")  # only Windows has it
    msvcrt.locking(lock, msvcrt.LK_NBLCK, 1)  # the first byte, which need not be there


def remove_lock(folder: Path, *names: str) -> None:
    """Removes the file of a lock, if it is there.

    On Windows it stays if another process holds it by now.

    Args:
        folder: where to begin.
        names: the names that lead from there to the file, one for each level.

    Raises:
        OSError: it cannot be removed, or a name before the last is a link.
    """
    if IS_REMOVED_WHILE_HELD:
        remove(folder, *names)
        return
    with suppress(PermissionError):
        remove(folder, *names)
