"""Computes a digest of a file whose pieces are written in any order, at the speed of memory.

A file is a sequence of 64-bit words. Its digest is the sum of all words, each times an odd factor
of its own, modulo 2^64 (multilinear hashing: Lemire and Kaser, Strongly Universal String Hashing is
Fast, 2014). So the digests of pieces add up to that of the file, zeros between them count for
nothing, and a word that is cut between two pieces is the sum of both parts. The digest finds every
flipped bit, and garbage or zeros in the place of a block; it can miss damage to nothing but the
uppermost bits of several words. It does not prove that nobody changed a file on purpose.

numpy.dot lets other threads run while it computes. einsum does not, and many short calls wait for
one another: eight threads then took three times as long. zlib's CRC-32 takes twice as long.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from nf4conv.sources.reader import read_chunks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Words: TypeAlias = "NDArray[np.uint64]"

MODULUS: Final = 1 << 64

_WORD: Final = 8  # bytes

_COLUMNS: Final = 4096
"""Words of a row. A word's factor is that of its column times that of its row."""

_FIRST_ROW: Final = 1 << 32
"""Where the factors of rows begin among all factors: behind those of columns."""


def digest_of(data: memoryview, position: int) -> int:
    """Returns what bytes at a position of a file add to its digest, below 2^64."""
    import numpy as np  # importing it takes a moment

    data = data.cast("B")
    until_word = min(-position % _WORD, len(data))
    whole = (len(data) - until_word) // _WORD * _WORD
    first = data[:until_word]
    last = data[until_word + whole :]
    words = np.frombuffer(data[until_word : until_word + whole], "<u8")
    found = _digest_of_words(words, (position + until_word) // _WORD)
    found += _digest_of_part(first, position)
    found += _digest_of_part(last, position + until_word + whole)
    return found % MODULUS


def digest_of_file(path: Path) -> int:
    """Returns the digest of a file, below 2^64."""
    found = position = 0
    for chunk in read_chunks(path):
        found += digest_of(memoryview(chunk), position)
        position += len(chunk)
    return found % MODULUS


def _digest_of_part(data: memoryview, position: int) -> int:
    """Returns the digest of bytes within one word, whose other bytes count as zeros."""
    word, byte = divmod(position, _WORD)
    value = int.from_bytes(data, "little") << 8 * byte
    row, column = divmod(word, _COLUMNS)
    return value * int(_column_factors()[column]) * int(_factors(_FIRST_ROW + row, 1)[0])


def _digest_of_words(words: Words, start: int) -> int:
    """Returns the digest of words, of which the first is number `start` of its file."""
    import numpy as np  # importing it takes a moment

    found = 0
    while len(words):
        row, column = divmod(start, _COLUMNS)
        width = min(_COLUMNS - column, len(words))
        count = len(words) // _COLUMNS if width == _COLUMNS else 1
        rows = words[: count * width].reshape(count, width)
        sums = np.dot(rows, _column_factors()[column : column + width])
        found += int(np.dot(sums, _factors(_FIRST_ROW + row, count)))
        words = words[count * width :]
        start += count * width
    return found


@cache
def _column_factors() -> Words:
    return _factors(0, _COLUMNS)


def _factors(first: int, count: int) -> Words:
    """Returns odd numbers that look random (SplitMix64: Steele, Lea and Flood, 2014)."""
    import numpy as np  # importing it takes a moment

    found = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31)) | np.uint64(1)
