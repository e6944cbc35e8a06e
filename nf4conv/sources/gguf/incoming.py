"""Reads the bytes of a GGUF file's header, more of them when they are needed."""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from nf4conv.errors import SourceError

_LONGEST_HEADER: Final = 2**28  # bytes; tokenizers of 260,000 tokens take 20 MB
_LONGEST_STRING: Final = 2**24
_FIRST_READ: Final = 2**20  # bytes; each one that follows is twice as long, up to the longest
_LONGEST_READ: Final = 2**24

_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True)
class Texts:
    """The strings of an array, as a file has them: hundreds of thousands, in a vocabulary.

    Attributes:
        content: the strings, each behind its length in 8 bytes.
        count: the number of strings.
    """

    content: bytes
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        """Yields the strings. What is not UTF-8 in them is replaced."""
        content = self.content
        stop = 0
        for _ in range(self.count):
            [length] = _LENGTH.unpack_from(content, stop)
            start = stop + 8
            stop = start + length
            yield content[start:stop].decode(errors="replace")


class HeaderBytes:
    """The bytes of a header, which are read from the first one on.

    Args:
        path: the file, for messages.
        file: the same file, opened.
        size: the number of its bytes.

    Attributes:
        position: where the next byte is.
    """

    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self._path = path
        self._file = file
        self._end = min(size, _LONGEST_HEADER)
        self._here = bytearray()
        self._next_read = _FIRST_READ
        self.position = 0

    @property
    def left(self) -> int:
        """Returns how many bytes the rest of the header can have."""
        return self._end - self.position

    def take(self, count: int) -> bytes:
        """Reads the next bytes."""
        start = self.position
        stop = start + count
        self._need(stop)
        self.position = stop
        return bytes(self._here[start:stop])

    def number(self, code: str) -> Any:
        """Reads a number, by its format of struct."""
        [number] = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return number

    def text(self) -> str:
        """Reads a string. What is not UTF-8 in it is replaced, as in tokens of other encodings."""
        length = self.number("Q")
        self._check_length(length)
        return self.take(length).decode(errors="replace")

    def texts(self, count: int) -> Texts:
        """Reads strings that follow each other, of which only the lengths are looked at."""
        start = self.position
        passed = self._pass_texts(count)
        while passed < count:
            self._need(self.position + 8)
            passed += self._pass_texts(count - passed)
        self._need(self.position)
        return Texts(bytes(self._here[start : self.position]), count)

    def digest(self) -> str:
        """Returns the SHA-256 of all that was read so far."""
        with memoryview(self._here) as here:
            return hashlib.sha256(here[: self.position]).hexdigest()

    def _pass_texts(self, count: int) -> int:
        """Goes on behind the next strings, and returns how many of their lengths are here.

        Raises:
            SourceError: a string is too long.
        """
        length_at = _LENGTH.unpack_from
        here = self._here
        position = self.position
        passed = 0
        length = 0
        # the fastest loop that was found: 0.08 µs a string
        try:
            for passed in range(count):  # noqa: B007 - how far it came is what counts
                [length] = length_at(here, position)
                position += 8 + length
            passed = count
        except (struct.error, OverflowError):  # the next length is not here
            self._check_length(length)
        self.position = position
        return passed

    def _need(self, stop: int) -> None:
        """Reads on until the bytes before `stop` are here."""
        if stop > self._end:
            raise self._cut_off()
        while len(self._here) < stop:
            content = self._file.read(min(self._next_read, self._end - len(self._here)))
            if not content:
                raise self._cut_off()
            self._here += content
            self._next_read = min(2 * self._next_read, _LONGEST_READ)

    def _check_length(self, length: int) -> None:
        if length > _LONGEST_STRING:
            raise SourceError(
                f"{self._path}: has a string of {length:,} bytes, which is too long",
                path=self._path,
            )

    def _cut_off(self) -> SourceError:
        return SourceError(
            f"{self._path}: is cut off in its header; the download is incomplete", path=self._path
        )
