"""Reads the bytes of a GGUF file's header, more of them when they are needed."""

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from nf4conv.errors import SourceError

_LONGEST_HEADER: Final = 2**28  # bytes; tokenizers of 260,000 tokens take 20 MB
_LONGEST_STRING: Final = 2**24
_READ: Final = 2**20  # bytes at a time; memory of longer reads is not used again by the next one
_BEGINNING: Final = 2**16  # bytes by which a file is recognized before its header is read

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


class HeaderBytes:
    """The bytes of a header, which are read from the first one on.

    Args:
        path: the file, for messages.
        file: the same file, opened.
        size: the number of its bytes.

    Attributes:
        position: where the next byte is.
        ends: where each array of strings ends that was read, by where its strings begin.
        strings: how many strings these arrays have.
    """

    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self._path = path
        self._file = file
        self._end = min(size, _LONGEST_HEADER)
        self._here = bytearray()
        self._expected: Mapping[int, int] = {}
        self.position = 0
        self.ends: dict[int, int] = {}
        self.strings = 0

    @property
    def left(self) -> int:
        """Returns how many bytes the rest of the header can have."""
        return self._end - self.position

    def beginning(self) -> bytes:
        """Returns the first bytes of the file. The position stays."""
        count = min(_BEGINNING, self._end)
        self._need(count)
        return bytes(self._here[:count])

    def begin_again(self, expected: Mapping[int, int]) -> None:
        """Goes back to the first byte.

        Args:
            expected: where arrays of strings end, by where their strings begin. The strings of
                these arrays are not looked at. So the caller must compare the digest.
        """
        self._expected = expected
        self.position = 0
        self.ends = {}
        self.strings = 0

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
        if start in self._expected:
            self.position = max(self._expected[start], start)
        else:
            self._find_end(count)
        self._need(self.position)
        self.ends[start] = self.position
        self.strings += count
        with memoryview(self._here) as here:
            return Texts(bytes(here[start : self.position]), count)

    def digest(self) -> str:
        """Returns the SHA-256 of all that was read so far."""
        with memoryview(self._here) as here:
            return hashlib.sha256(here[: self.position]).hexdigest()

    def _find_end(self, count: int) -> None:
        """Goes on behind the next strings, and reads more bytes as they are needed."""
        passed = self._pass_texts(count)
        while passed < count:
            self._need(self.position + 8)
            passed += self._pass_texts(count - passed)

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
            content = self._file.read(min(_READ, self._end - len(self._here)))
            if not content:
                raise self._cut_off()
            self._here += content

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
