"""The digest of a file: that of its pieces in any order and cut, and another for other content."""

import itertools
import random

import numpy as np
import pytest

from nf4conv.output.digest import MODULUS, digest_of, digest_of_file

SIZE = 200_003  # rows of words, and bytes behind the last word


def slow_digest(data: bytes) -> int:
    """Returns the digest as its module describes it, word by word."""

    def factor(number: int) -> int:
        found = number * 0x9E3779B97F4A7C15 % MODULUS
        found = (found ^ found >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
        found = (found ^ found >> 27) * 0x94D049BB133111EB % MODULUS
        return found ^ found >> 31 | 1

    padded = data + bytes(-len(data) % 8)
    words = np.frombuffer(padded, "<u8").tolist()
    return sum(
        word * factor(index % 4096) * factor(2**32 + index // 4096)
        for index, word in enumerate(words)
    ) % MODULUS  # fmt: skip


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(0).randbytes(SIZE)


def test_it_is_the_formula(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    assert digest_of_file(tmp_path / "file") == slow_digest(content)
    assert digest_of(memoryview(b""), 5) == 0


def test_pieces_in_any_order(content):
    numbers = random.Random(1)
    for count in (1, 3, 50):
        cuts = sorted({0, SIZE, *(numbers.randrange(SIZE) for _ in range(count))})
        pieces = list(itertools.pairwise(cuts))
        numbers.shuffle(pieces)
        total = sum(digest_of(memoryview(content)[start:stop], start) for start, stop in pieces)
        assert total % MODULUS == slow_digest(content)


def test_every_short_piece(content):
    """Pieces that begin and end within a word, or hold none of its ends."""
    for start in range(4094 * 8, 4094 * 8 + 20):
        for stop in range(start, start + 20):
            alone = bytes(start) + content[start:stop]
            assert digest_of(memoryview(content)[start:stop], start) == slow_digest(alone)


def test_zeros_between_pieces_need_not_be_told(content):
    holed = content[:1001] + bytes(5000) + content[6001:]
    pieces = (memoryview(content)[:1001], 0), (memoryview(content)[6001:], 6001)
    assert sum(digest_of(*piece) for piece in pieces) % MODULUS == slow_digest(holed)


def test_accidents_are_found(content):
    """A flipped bit, exchanged words, rows and columns, and a page of zeros."""
    whole = digest_of(memoryview(content), 0)
    numbers = random.Random(2)
    for _ in range(200):
        changed = bytearray(content)
        changed[numbers.randrange(SIZE)] ^= 1 << numbers.randrange(8)
        assert digest_of(memoryview(changed), 0) != whole
    for width, first, second in ((8, 0, 8), (8, 0, 8 * 4096), (32768, 0, 32768), (4096, 0, 8192)):
        changed = bytearray(content)
        changed[first : first + width] = content[second : second + width]
        changed[second : second + width] = content[first : first + width]
        assert digest_of(memoryview(changed), 0) != whole
    for bit in (0, 31, 40):  # of two words
        changed = np.frombuffer(content[: SIZE // 8 * 8], "<u8").copy()
        changed[[7, 9000]] ^= np.uint64(1 << bit)
        assert digest_of(memoryview(changed.tobytes() + content[SIZE // 8 * 8 :]), 0) != whole
    assert digest_of(memoryview(content[:4096] + bytes(4096) + content[8192:]), 0) != whole
