"""Removes files and folders inside a folder, and never follows a link to reach them.

Linux and macOS reach each name through the handle of the folder that holds it, so a link that
somebody puts in the place of a folder meanwhile leads nowhere. Windows has no such calls: there
each folder is looked at before it is entered, and again before anything in it is removed.
"""

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_HAS_HANDLES: Final = (
    hasattr(os, "O_NOFOLLOW")
    and hasattr(os, "O_DIRECTORY")
    and {os.open, os.unlink, os.rmdir} <= os.supports_dir_fd
)


def remove(folder: Path, *names: str) -> None:
    """Removes a file, a link or a folder with all that is in it. Does nothing if it is not there.

    Args:
        folder: where to begin; it may itself be reached through links.
        names: the names that lead from there to what is removed, one for each level.

    Raises:
        OSError: it cannot be removed, or a name before the last is a link.
    """
    *parents, last = names
    with suppress(FileNotFoundError):
        if _HAS_HANDLES:
            with _handle_of(folder, parents) as handle:
                _remove_below(handle, last)
        else:
            _require_no_link(folder, parents)
            _remove_by_path(folder.joinpath(*names))


def remove_contents(folder: Path, *names: str, keep: Collection[str] = ()) -> None:
    """Removes everything in a folder; the folder stays. Does nothing if it is not there.

    Args:
        folder: where to begin; it may itself be reached through links.
        names: the names that lead from there to the folder, one for each level.
        keep: names in the folder that stay.

    Raises:
        OSError: something cannot be removed, or one of `names` is a link.
    """
    with suppress(FileNotFoundError):
        if _HAS_HANDLES:
            with _handle_of(folder, names) as handle:
                for entry in os.listdir(handle):  # noqa: PTH208 - pathlib takes no handle
                    if entry not in keep:
                        _remove_below(handle, entry)
        else:
            _require_no_link(folder, names)
            for path in folder.joinpath(*names).iterdir():
                if path.name not in keep:
                    _remove_by_path(path)


def is_link(path: Path) -> bool:
    """Returns True for a link, and for a junction of Windows, wherever it leads."""
    with suppress(OSError):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            return True
        tag = getattr(status, "st_reparse_tag", 0)
        return bool(tag) and tag == getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", 0)
    return False


@contextmanager
def _handle_of(folder: Path, names: Collection[str]) -> Iterator[int]:
    """Opens a folder, following no link on the way from `folder` on."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names:
            inner = _open_folder(handle, name)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def _open_folder(parent: int, name: str) -> int:
    """Opens a folder in another one, given the other's handle; a link is refused."""
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def _remove_below(parent: int, name: str) -> None:
    """Removes what has a name in a folder, given the folder's handle."""
    try:
        handle = _open_folder(parent, name)
    except FileNotFoundError:
        return
    except OSError:
        # a file, or a link, which is removed itself; a folder that may not be opened fails here
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
        return
    entries: list[str] = []
    try:
        with suppress(FileNotFoundError):  # another process has just removed this folder
            entries = os.listdir(handle)  # noqa: PTH208 - pathlib takes no handle
        for entry in entries:
            _remove_below(handle, entry)
    finally:
        os.close(handle)
    with suppress(FileNotFoundError):  # another process has been faster
        os.rmdir(name, dir_fd=parent)


def _require_no_link(folder: Path, names: Collection[str]) -> None:
    """Checks that no name on the way from `folder` on is a link."""
    path = folder
    for name in names:
        path /= name
        if is_link(path):
            raise OSError(f"{path}: is a link, which is not followed")


def _remove_by_path(path: Path) -> None:
    """Removes what a path names, where folders have no handles."""
    if is_link(path) or not path.is_dir():
        with suppress(FileNotFoundError):
            path.unlink()
        return
    entries: list[Path] = []
    with suppress(FileNotFoundError):  # another process has just removed this folder
        entries = list(path.iterdir())
    for entry in entries:
        if is_link(path):
            raise OSError(f"{path}: has become a link, which is not followed")
        _remove_by_path(entry)
    with suppress(FileNotFoundError):
        path.rmdir()
