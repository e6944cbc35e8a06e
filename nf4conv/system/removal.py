"""Removes files and folders inside a folder, and never follows a link to reach them."""

import shutil
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path


def remove(folder: Path, *names: str) -> None:
    """Removes a file, a link or a folder with all that is in it. Does nothing if it is not there.

    Args:
        folder: where to begin; it may itself be reached through links.
        names: the names that lead from there to what is removed, one for each level.

    Raises:
        OSError: it cannot be removed, or a name before the last is a link.
    """
    _require_no_link(folder, names[:-1])
    _remove(folder.joinpath(*names))


def remove_contents(folder: Path, *names: str, keep: Collection[str] = ()) -> None:
    """Removes everything in a folder; the folder stays. Does nothing if it is not there.

    Args:
        folder: where to begin; it may itself be reached through links.
        names: the names that lead from there to the folder, one for each level.
        keep: names in the folder that stay.

    Raises:
        OSError: something cannot be removed, or one of `names` is a link.
    """
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
