"""Notices that a file has changed since its header was read."""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from nf4conv.errors import SourceError, named
from nf4conv.sources.header import LENGTH_BYTES, LONGEST_HEADER
from nf4conv.sources.reader import each

_ENDS: Final = 2**14  # bytes at either end of a file whose checksum is taken


class Stamp(NamedTuple):
    """A file as it was at a time. Only on one host do times mean the same."""

    size: int  # bytes
    modified: int  # when its content changed, which can be set at will; ns
    changed: int  # when the kernel last saw any change; ns
    ends: int  # CRC-32 of its first and last bytes, between them the header


def stamp_of(path: Path) -> Stamp:
    """Returns what a file is now; raises a SourceError if it cannot be read."""
    stamp, _ = stamp_and_head(path)
    return stamp


def stamp_and_head(path: Path) -> tuple[Stamp, bytes]:
    """Reads both ends of a file.

    Returns:
        stamp: what the file is now.
        head: its first bytes, which hold the whole header of a safetensors file.

    Raises:
        SourceError: the file cannot be read.
    """
    with named(path, SourceError), path.open("rb") as file:
        status = os.fstat(file.fileno())
        head = file.read(_ENDS)
        if path.suffix == ".safetensors":  # pickles and GGUF begin with other bytes than a length
            length = min(int.from_bytes(head[:LENGTH_BYTES], "little"), LONGEST_HEADER)
            head += file.read(max(LENGTH_BYTES + length - len(head), 0))
        file.seek(max(status.st_size - _ENDS, 0))
        ends = zlib.crc32(file.read(_ENDS), zlib.crc32(head))
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, ends), head


def changed_files(stamps: Mapping[Path, Stamp]) -> list[Path]:
    """Returns the files that are not what they were.

    Args:
        stamps: what each file was when its source was opened.

    Raises:
        SourceError: a file is gone.
    """
    changed = []
    for file, stamp in zip(stamps, each(stamp_of, stamps), strict=True):
        if stamp != stamps[file]:
            changed.append(file)
    return changed
