"""Remembers where arrays of strings end in the header of a GGUF file, for the next run.

A vocabulary and its merges are hundreds of thousands of strings, and where the last one ends is
found by going from each to the next: half of the time that it takes to open a file. What is
remembered is believed only if the metadata has the SHA-256 that it had when this was found.

    CACHE/gguf/KEY.json     KEY is made of the first bytes of the file
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nf4conv.system.private import cache_folder, read_private, write_private


@dataclass(frozen=True)
class KnownEnds:
    """The ends of the arrays of strings in metadata.

    Attributes:
        digest: the SHA-256 of the metadata's bytes.
        ends: positions in the file, by where the strings of each array begin.
    """

    digest: str
    ends: Mapping[int, int]


def place_of(beginning: bytes) -> Path | None:
    """Returns the file of the cache for GGUF files that begin so; None if there is no cache."""
    cache = cache_folder()
    if cache is None:
        return None
    return cache / "gguf" / f"{hashlib.sha256(beginning).hexdigest()[:32]}.json"


def recall(place: Path | None) -> KnownEnds | None:
    """Returns what an earlier run has found; None if there is nothing of this user."""
    if place is None:
        return None
    try:
        found = json.loads(read_private(place) or b"")
        os.utime(place)  # remove_oldest of unpacked.py keeps what was used last
        ends = {int(start): int(end) for start, end in found["ends"].items()}
        return KnownEnds(str(found["digest"]), ends)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    except (RecursionError, OverflowError):  # of JSON that nests deeply, or has Infinity
        return None


def remember(place: Path | None, known: KnownEnds) -> None:
    """Keeps what was found. Does nothing where it cannot be kept."""
    if place is None:
        return
    content = json.dumps({"digest": known.digest, "ends": known.ends})
    with suppress(OSError):
        write_private(place, content.encode())
