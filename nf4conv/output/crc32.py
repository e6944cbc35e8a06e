"""Computes the CRC-32 of a file whose pieces are written in any order, from those of the pieces.

To append n bytes multiplies the CRC of what is before them by x^8n, modulo the polynomial, whatever
the bytes are; their own CRC is then added (Ross Williams, A Painless Guide to CRC Error Detection
Algorithms, 1993; zlib.h: crc32_combine). A CRC finds every flipped bit and all but one in 2^32 of
other accidents, at the speed of memory.
"""

import zlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from nf4conv.sources.reader import read_chunks

# Bit 31 is the coefficient of x^0.
_POLYNOMIAL: Final = 0xEDB88320
_ONE: Final = 1 << 31
_X_TO_THE_8: Final = 1 << 23
_ALL: Final = 0xFFFFFFFF


class Piece(NamedTuple):
    """Describes bytes of a file that were written at once."""

    start: int  # where they begin in the file
    stop: int  # where they end
    crc32: int  # of these bytes


def crc32_of_pieces(pieces: Iterable[Piece], size: int) -> int:
    """Returns the CRC-32 of a file. Pieces do not overlap; between them are zeros."""
    found = 0
    position = 0
    for piece in sorted(pieces):
        found = _after_zeros(found, piece.start - position)
        found = _times(_power(piece.stop - piece.start), found) ^ piece.crc32
        position = piece.stop
    return _after_zeros(found, size - position)


def crc32_of_file(path: Path) -> int:
    """Returns the CRC-32 of a file."""
    found = 0
    for chunk in read_chunks(path):
        found = zlib.crc32(chunk, found)
    return found


def _after_zeros(crc32: int, count: int) -> int:
    """Returns the CRC-32 of bytes and `count` zeros after them."""
    return _times(_power(count), crc32 ^ _ALL) ^ _ALL


def _times(a: int, b: int) -> int:
    """Returns the product of two polynomials modulo that of CRC-32."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & _ALL
        if b & 1:
            b = (b >> 1) ^ _POLYNOMIAL
        else:
            b >>= 1
    return product


@lru_cache(maxsize=4096)
def _power(length: int) -> int:
    """Returns x^(8 * length) modulo the polynomial of CRC-32."""
    found = _ONE
    factor = _X_TO_THE_8
    while length:
        if length & 1:
            found = _times(found, factor)
        factor = _times(factor, factor)
        length >>= 1
    return found
