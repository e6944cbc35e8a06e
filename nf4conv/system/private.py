"""Finds the user's cache folder, and reads and writes files that nobody else could have written."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from nf4conv.system.files import create

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
        if not _belongs_to_user(os.fstat(file.fileno())):
            return None
        return file.read()


def _belongs_to_user(status: os.stat_result) -> bool:
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
