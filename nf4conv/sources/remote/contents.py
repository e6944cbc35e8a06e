"""Compares downloaded files with the hashes that the Hub states for them.

A file of the Hub's cache that was found right is noted in the user's cache folder, with its size,
time and inode, and is not read again while these are the same.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from nf4conv.sources.reader import digest_of
from nf4conv.system.files import cache_folder, read_private, write_private

_AT_A_TIME: Final = 4  # files


class RemoteFile(NamedTuple):
    """A file of a repository, as the Hub describes it."""

    name: str  # its path in the repository
    size: int  # bytes
    sha256: str | None  # of its content; None for a small file that is kept in git itself
    blob: str | None  # git's name for it; None if unknown


def check_content(path: Path, file: RemoteFile) -> str | None:
    """Returns what is wrong with a downloaded file; None if it is what the Hub describes."""
    size = path.stat().st_size
    if size != file.size:
        return f"has {size:,} bytes, not the {file.size:,} that the hub says"
    if file.sha256 is not None:
        digest = hashlib.sha256()
        expected = file.sha256
    elif file.blob is not None:
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)  # as git computes it
        expected = file.blob
    else:
        return None
    if digest_of(path, digest) != expected:
        return f"its hash is not {expected}, which the hub says"
    return None


def damaged_files(files: Iterable[tuple[Path, RemoteFile]]) -> dict[RemoteFile, str]:
    """Returns what is wrong with files of the Hub's cache; only those that are damaged are named.

    Files that an earlier run found right are not read again, unless they have changed.
    """
    listed = list(files)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        problems = list(pool.map(_check_once, listed))
    return {
        file: problem
        for (_, file), problem in zip(listed, problems, strict=True)
        if problem is not None
    }


def _check_once(listed: tuple[Path, RemoteFile]) -> str | None:
    """Returns what is wrong with a file; does not read one again that was found right before."""
    path, file = listed
    path = path.resolve()  # the cache has links to its blobs
    state = _state_of(path, file)
    note = _note_of(path)
    if note is not None and _read_note(note) == state:
        return None
    problem = check_content(path, file)
    if problem is None and note is not None and _state_of(path, file) == state:
        _write_note(note, state)
    return problem


def _state_of(path: Path, file: RemoteFile) -> list[object]:
    """Returns what tells that a file is still the one that was read, as JSON values."""
    status = path.stat()
    identity = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    return [str(path), file.sha256, file.blob, *identity]


def _note_of(path: Path) -> Path | None:
    """Returns where it is noted that a file was right; None for a user who has no home."""
    folder = cache_folder()
    if folder is None:
        return None
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    return folder / "checked" / f"{name}.json"


def _read_note(note: Path) -> object:
    with suppress(OSError, ValueError, RecursionError):
        content = read_private(note)
        if content is not None:
            return json.loads(content)
    return None


def _write_note(note: Path, state: list[object]) -> None:
    # a home that cannot be written to costs time at the next run, not this result
    with suppress(OSError):
        write_private(note, json.dumps(state).encode())
