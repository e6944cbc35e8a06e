"""Removes what is in folders and follows no link to it; locks a folder; knows names that leave it.

A lock is held for as long as the descriptor is open, and ends with the process, however it ends.
"""

import importlib
import os
import shutil
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from nf4conv.system.machine import IS_POSIX

_FORBIDDEN: Final = "" if IS_POSIX else '<>:"|?*\\'
"""Characters that a name cannot have on Windows. A colon would lead to another file, or disk."""


def remove(folder: Path, *names: str) -> None:
    """Removes a file, a link or a folder with all that is in it, if it is there.

    `names` lead to it from a folder, one for each level. None of them may be a link.
    """
    _require_no_link(folder, names[:-1])
    _remove(folder.joinpath(*names))


def remove_contents(folder: Path, *names: str, keep: Collection[str] = ()) -> None:
    """Removes everything in a folder that `names` lead to, but names to keep."""
    _require_no_link(folder, names)
    with suppress(FileNotFoundError):
        for path in list(folder.joinpath(*names).iterdir()):
            if path.name not in keep:
                _remove(path)


def is_link(path: Path) -> bool:
    """Returns True for a link, and for a junction of Windows, wherever it leads."""
    with suppress(OSError):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            return True
        tag = getattr(status, "st_reparse_tag", 0)
        return bool(tag) and tag == getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", 0)
    return False


def _require_no_link(folder: Path, names: Collection[str]) -> None:
    """Checks that no name on the way from `folder` on is a link."""
    path = folder
    for name in names:
        path /= name
        if is_link(path):
            raise OSError(f"{path}: is a link, which is not followed")


def _remove(path: Path) -> None:
    """Removes what a path names; of a link, the link. shutil.rmtree follows none either."""
    if is_link(path) or not path.is_dir():
        with suppress(FileNotFoundError):
            path.unlink()
        return
    while path.is_dir() and not is_link(path):
        with suppress(FileNotFoundError):  # another process removes it too
            shutil.rmtree(path)


def open_lock(path: Path) -> int:
    """Opens the file of a lock, which is made if it is missing; a link is not followed."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
    if hasattr(os, "O_NOFOLLOW"):
        flags |= os.O_NOFOLLOW
    elif path.is_symlink():
        raise OSError(f"{path}: is a link")
    return os.open(path, flags, 0o666)


def hold(lock: int) -> None:
    """Takes a lock for this process, without waiting.

    An OSError says that another process holds it, or that the file system has no locks.
    """
    if IS_POSIX:
        fcntl = importlib.import_module("fcntl")  # Windows has none
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    msvcrt = importlib.import_module("msvcrt")  # only Windows has it
    msvcrt.locking(lock, msvcrt.LK_NBLCK, 1)  # the first byte, which need not be there


def leads_elsewhere(name: str) -> bool:
    """Returns True for a path with slashes that may lead out of the folder that it is meant for."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or not set(name).isdisjoint(_FORBIDDEN)
