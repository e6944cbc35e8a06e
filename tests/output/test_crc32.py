"""The CRC-32 of a file: that of its pieces in any order and cut, with zeros between them."""

import itertools
import random
import zlib

import pytest

from nf4conv.output.crc32 import Piece, crc32_of_file, crc32_of_pieces

SIZE = 200_003


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(0).randbytes(SIZE)


def piece_of(content: bytes, start: int, stop: int) -> Piece:
    return Piece(start, stop, zlib.crc32(content[start:stop]))


def test_a_file(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    assert crc32_of_file(tmp_path / "file") == zlib.crc32(content)


@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_pieces_in_any_order(content, count):
    numbers = random.Random(1)
    cuts = sorted({0, SIZE, *(numbers.randrange(SIZE) for _ in range(count))})
    pieces = [piece_of(content, *cut) for cut in itertools.pairwise(cuts)]
    numbers.shuffle(pieces)
    assert crc32_of_pieces(pieces, SIZE) == zlib.crc32(content)


def test_zeros_between_pieces_and_behind_them(content):
    holed = content[:1001] + bytes(5000) + content[6001:9000] + bytes(77)
    pieces = [piece_of(holed, 6001, 9000), piece_of(holed, 0, 1001)]
    assert crc32_of_pieces(pieces, len(holed)) == zlib.crc32(holed)
    assert crc32_of_pieces([], 10) == zlib.crc32(bytes(10))
