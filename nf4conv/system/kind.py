"""Says which kind of system this is, and what it lacks.

The rest of the room asks for what it needs, `hasattr(os, "pread")`, where systems of one kind
differ; and `IS_POSIX` where Windows needs another way altogether.
"""

import importlib.util
import os
from typing import Final

IS_POSIX: Final = importlib.util.find_spec("fcntl") is not None
"""True on Linux and macOS; False on Windows."""


def lacking() -> tuple[str, ...]:
    """Returns what this system lacks, and what nf4conv does instead, one sentence for each."""
    found = []
    if not hasattr(os, "preadv") or not hasattr(os, "pwrite"):
        found.append("no positional reads and writes: each thread opens a file for itself")
    if not IS_POSIX:
        found.append("folders cannot be synced: renames are durable when the system likes")
        found.append("no owners and modes of files: cached kernels are trusted by their folder")
    if not hasattr(os, "posix_fadvise"):
        found.append("the page cache cannot be told to drop a file")
    if not hasattr(os, "sched_setaffinity"):
        found.append("processes cannot be kept to cores: --device with several shares all of them")
    if not hasattr(os, "fork"):
        found.append("no fork: kernels are compiled one after the other")
    return tuple(found)
