"""Reads the header of a GGUF file: its metadata, and where its tensors are.

The layout is that of docs/gguf.md in ggml: magic, version, two counts, the metadata as pairs of key
and value, a record for each tensor, and the tensors' bytes at multiples of the alignment. Versions
2 and 3 in little-endian order are read. Nothing is allocated for a count or a length before as many
bytes are here.

Anything may stand in the metadata. A number that is none, or is beyond sense, is read as if it were
absent.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from ctypes import c_float
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from nf4conv.errors import SourceError
from nf4conv.format.gguf import BLOCK_TYPES, BlockType
from nf4conv.sources.header import MOST_TENSORS, check_name
from nf4conv.sources.reader import Absent, FileBytes, bytes_of

Sizes: TypeAlias = Mapping[str, Any]
"""The metadata of a file, without the architecture's name in its keys."""

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
        stop = 0
        for _ in range(self.count):
            [length] = _LENGTH.unpack_from(self.content, stop)
            start = stop + 8
            stop = start + length
            yield self.content[start:stop].decode(errors="replace")


def positive(values: Mapping[str, Any], key: str) -> int | None:
    """Returns a count or a size; None if there is no whole number above 0, or one beyond sense."""
    value = values.get(key)
    return value if type(value) is int and 0 < value <= _LARGEST else None


def counts_of(values: Mapping[str, Any], key: str) -> list[int]:
    """Returns a list of whole numbers; an empty one if there is something else."""
    found = values.get(key)
    if not isinstance(found, list):
        return []
    # not a bool, which is an int too
    are_counts = all(type(count) is int and 0 <= count <= _LARGEST for count in found)
    return found if are_counts else []


def shortest(value: float) -> float:
    """Returns the shortest decimal that is the same number in float32.

    A number that is too large for float32 is returned as it is: GGUF also has float64.
    """
    stored = c_float(value).value
    if math.isinf(stored):
        return value
    for digits in range(1, 10):
        rounded = float(f"{value:.{digits}g}")
        if c_float(rounded).value == stored:
            return rounded
    return value


MAGIC: Final = b"GGUF"

_MOST_DIMENSIONS: Final = 4
_LONGEST_HEADER: Final = 2**28  # bytes; tokenizers of 260,000 tokens take 20 MB
_SHORTEST_READ: Final = 2**20  # bytes; most headers have 5 to 20 MB, for they hold tokenizers
_LONGEST_READ: Final = 2**24


_NUMBERS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Formats of struct by type of a value; the others are string and array."""
_STRING: Final = 8
_ARRAY: Final = 9


class GgufTensor(NamedTuple):
    """A tensor as its record describes it."""

    name: str
    shape: tuple[int, ...]  # outermost first; the file has the sizes the other way round
    block_type: BlockType
    file: Path
    start: int  # of its bytes in that file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.block_type.values * self.block_type.size


def read_gguf_header(
    path: Path, absent: Absent | None = None
) -> tuple[Mapping[str, Any], tuple[GgufTensor, ...]]:
    """Reads the header of a file, which may not be here.

    Returns the metadata, numbers, strings, lists of numbers, and `Texts`; and the tensors, in the
    order of their records.
    """
    with bytes_of(path, absent) as file:
        return _Header(path, file).parsed()


class _Header:
    """A header that is read from its first byte on; `position` is that of the next one."""

    def __init__(self, path: Path, file: FileBytes) -> None:
        self._path = path
        self._file = file
        self._end = min(file.size, _LONGEST_HEADER)
        self._here = bytearray()
        self.position = 0

    def parsed(self) -> tuple[Mapping[str, Any], tuple[GgufTensor, ...]]:
        """Reads the whole header."""
        if self._take(4) != MAGIC:
            raise self._error("is no GGUF file")
        version = self._number("I")
        if version not in (2, 3):
            raise self._error(
                f"is a GGUF file of version {version}; 2 and 3 in little-endian order are read"
            )
        tensor_count = self._number("Q")
        pair_count = self._number("Q")
        if tensor_count > MOST_TENSORS:
            raise self._error(f"claims {tensor_count:,} tensors, as no model has")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._text()
            metadata[key] = self._value(self._number("I"))
        tensors = [self._record() for _ in range(tensor_count)]
        return metadata, self._placed(tensors, metadata)

    # --- metadata ------------------------------------------------------------------------------

    def _value(self, kind: int) -> Any:
        """Reads a value of the metadata: a number, a string, or an array of either."""
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            kind = self._number("I")
            count = self._number("Q")
            if kind in _NUMBERS:
                return self._numbers(_NUMBERS[kind], count)
            if kind == _STRING:
                return self._texts(count)
        raise self._error(f"has a value of type {kind}, which is not read")

    def _text(self) -> str:
        """Reads a string. What is not UTF-8 in it is replaced, as in tokens of other encodings."""
        return self._take(self._number("Q")).decode(errors="replace")

    def _texts(self, count: int) -> Texts:
        """Reads strings that follow each other, of which only the lengths are looked at."""
        start = self.position
        here = self._here
        length_at = _LENGTH.unpack_from
        position = start
        known = len(here)
        for _ in range(count):
            if position + 8 > known:
                self._need(position + 8)
                known = len(here)
            [length] = length_at(here, position)
            position += 8 + length
        self._need(position)
        self.position = position
        return Texts(bytes(memoryview(here)[start:position]), count)

    # --- tensors -------------------------------------------------------------------------------

    def _record(self) -> GgufTensor:
        """Reads the record of a tensor, whose start is counted from the first tensor's."""
        name = self._text()
        check_name(self._path, name)
        dimensions = self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise SourceError.about(self._path, name, f"has {dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        number = self._number("I")
        offset = self._number("Q")
        block_type = BLOCK_TYPES.get(number)
        if block_type is None:
            what = f"is of type {number}, which nf4conv does not decode"
            raise SourceError.about(self._path, name, what)
        if 0 in shape:
            raise SourceError.about(self._path, name, f"is of shape {list(shape)}, without values")
        columns = shape[-1] if shape else 1
        if columns % block_type.values != 0:
            what = f"rows of {columns} values are no whole number of blocks of {block_type.name}"
            raise SourceError.about(self._path, name, what)
        return GgufTensor(name, shape, block_type, self._path, offset)

    def _placed(
        self, tensors: list[GgufTensor], metadata: Mapping[str, Any]
    ) -> tuple[GgufTensor, ...]:
        """Finds where the tensors' bytes are, and checks that they are in the file."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
            raise self._error(f"has an alignment of {alignment!r:.40}")
        data = self.position + -self.position % alignment
        placed = []
        for tensor in tensors:
            if data + tensor.start + tensor.nbytes > self._file.size:
                what = "reaches beyond the end of the file; the download is incomplete"
                raise SourceError.about(self._path, tensor.name, what)
            placed.append(tensor._replace(start=data + tensor.start))
        return tuple(placed)

    # --- bytes ---------------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        """Reads the next bytes."""
        start = self.position
        stop = start + count
        self._need(stop)
        self.position = stop
        return bytes(self._here[start:stop])

    def _numbers(self, code: str, count: int) -> list[Any]:
        """Reads numbers, by their format of struct."""
        content = self._take(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", content))

    def _number(self, code: str) -> Any:
        [number] = self._numbers(code, 1)
        return number

    def _need(self, stop: int) -> None:
        """Reads on until the bytes before `stop` are here."""
        while len(self._here) < stop:
            start = len(self._here)
            # each read is longer than the last one: each of a file on the Hub is a request
            count = min(max(_SHORTEST_READ, 2 * start), _LONGEST_READ)
            content = b""
            if stop <= self._end:
                content = self._file.read(start, min(start + count, self._end))
            if not content:
                raise self._error("is cut off in its header; the download is incomplete")
            self._here += content

    def _error(self, what: str) -> SourceError:
        return SourceError(f"{self._path}: {what}", path=self._path)
