"""The digest of a file: the sum of those of its pieces, cut anywhere and in any order."""

import itertools
import random

import pytest

from nf4conv.output.digest import digest_of_file, digest_of_piece, sum_up

SIZE = 200_003


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(0).randbytes(SIZE)


def digest_of(content: bytes) -> int:
    """The definition, word by word."""
    found = 0
    for position in range(0, len(content), 8):
        word = int.from_bytes(content[position : position + 8], "little")
        found += word * (2 * (position // 4096) + 1)
    return found % 2**64


def pieces_of(content: bytes, cuts: list[int]) -> list[int]:
    return [
        digest_of_piece(memoryview(content)[start:stop], start)
        for start, stop in itertools.pairwise(cuts)
    ]


def test_a_file(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    assert digest_of_file(tmp_path / "file") == digest_of(content)


@pytest.mark.parametrize("count", [0, 1, 3, 50, 3000])
def test_pieces_in_any_order(content, count):
    numbers = random.Random(1)
    cuts = sorted({0, SIZE, *(numbers.randrange(SIZE) for _ in range(count))})
    pieces = pieces_of(content, cuts)
    numbers.shuffle(pieces)
    assert sum_up(pieces) == digest_of(content)


def test_zeros_add_nothing(content):
    holed = content[:1001] + bytes(5000) + content[6001:9000] + bytes(77)
    pieces = [
        digest_of_piece(memoryview(holed)[6001:9000], 6001),
        digest_of_piece(memoryview(holed)[:1001], 0),
    ]
    assert sum_up(pieces) == digest_of(holed)
    assert sum_up([]) == digest_of(bytes(10)) == 0


@pytest.mark.parametrize("bit", [0, 7, 8 * 4095, 8 * 4096, 8 * SIZE - 1])
def test_a_flipped_bit_is_found(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    assert digest_of_piece(memoryview(changed), 0) != digest_of_piece(memoryview(content), 0)


def test_pages_that_change_places_are_found(content):
    changed = content[4096:8192] + content[:4096] + content[8192:]
    assert digest_of_piece(memoryview(changed), 0) != digest_of_piece(memoryview(content), 0)
