"""The CRC-32 of a file whose pieces are written in any order, from the CRC-32 of each piece.

What a piece contributes to that of the whole depends on the bytes after it only by their number n:
it is multiplied by x^8n modulo the polynomial (Ross Williams, A Painless Guide to CRC Error
Detection Algorithms, 1993; zlib.h: crc32_combine). A CRC finds every flipped bit and all but one in
2^32 of other accidents, at the speed of memory.
"""

import zlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final

from nf4conv.sources.reader import read_chunks

_POLYNOMIAL: Final = 0xEDB88320  # bit 31 is the coefficient of x^0
_ALL: Final = 0xFFFFFFFF


def crc32_of_pieces(pieces: Iterable[tuple[int, int, int]], size: int) -> int:
    """The CRC-32 of so many bytes from (start, stop, CRC-32) of pieces that do not overlap; between
    them are zeros.
    """
    found = position = 0
    for start, stop, crc in sorted(pieces):
        found = _times(_power(start - position), found ^ _ALL) ^ _ALL
        found = _times(_power(stop - start), found) ^ crc
        position = stop
    return _times(_power(size - position), found ^ _ALL) ^ _ALL


def crc32_of_file(path: Path) -> int:
    """The CRC-32 of a file; a SourceError if it cannot be read."""
    found = 0
    for chunk in read_chunks(path):
        found = zlib.crc32(chunk, found)
    return found


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC-32."""
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a = a << 1 & _ALL
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=4096)
def _power(length: int) -> int:
    """x^(8 * length) modulo the polynomial of CRC-32."""
    found, factor = 1 << 31, 1 << 23  # 1, and x^8
    while length:
        if length & 1:
            found = _times(found, factor)
        factor = _times(factor, factor)
        length >>= 1
    return found
