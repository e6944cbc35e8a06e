"""Holds what the metadata of a GGUF file says: strings as they are stored, and its numbers.

Anything may stand in a file. A number that is none, or is beyond sense, is read as if it were
absent.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_LENGTH: Final = struct.Struct("<Q")

_LARGEST: Final = 2**24
"""Larger than any count or size of a model."""


@dataclass(frozen=True)
class Texts:
    """The strings of an array, as a file has them: hundreds of thousands, in a vocabulary."""

    content: bytes  # each string behind its length in 8 bytes
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        """Yields the strings. What is not UTF-8 in them is replaced."""
        for text in self.encoded():
            yield text.decode(errors="replace")

    def encoded(self) -> list[bytes]:
        """Returns the strings as they are in the file."""
        content = self.content
        found = []
        stop = 0
        for _ in range(self.count):
            [length] = _LENGTH.unpack_from(content, stop)
            start = stop + 8
            stop = start + length
            found.append(content[start:stop])
        return found


def positive(values: Mapping[str, Any], key: str) -> int | None:
    """Returns a count or a size; None if there is no whole number above 0, or one beyond sense."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value <= _LARGEST else None


def counts_of(values: Mapping[str, Any], key: str) -> list[int]:
    """Returns a list of whole numbers; an empty one if there is something else."""
    found = values.get(key)
    if not isinstance(found, list) or len(found) > _LARGEST:
        return []
    if not all(isinstance(count, int) and 0 <= count <= _LARGEST for count in found):
        return []
    return [int(count) for count in found]


def shortest(value: float) -> float:
    """Returns the shortest decimal that is the same number in float32.

    A number that is too large for float32 is returned as it is: GGUF also has float64.
    """
    stored = _in_float32(value)
    if stored is None:
        return value
    for digits in range(1, 10):
        rounded = float(f"{value:.{digits}g}")
        if _in_float32(rounded) == stored:
            return rounded
    return value


def _in_float32(value: float) -> bytes | None:
    """Returns the bytes of a number in float32; None if it is too large for that."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return None
