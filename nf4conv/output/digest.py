"""Computes a digest of a file whose pieces are written in any order, as the sum of those of the
pieces.

The file is cut into pages, and its bytes are taken as words of 64 bits. The words of page p count
2 p + 1 times, so that pages that change places are found; everything is modulo 2^64. It finds every
flipped bit and every lost page, at the speed of memory, where a CRC-32 would take as long as the
disk. It is no guard against anybody who means to deceive.
"""

import threading
from importlib import import_module
from pathlib import Path
from typing import Final

from nf4conv.sources.reader import read_chunks

_PAGE: Final = 4096
_WORD: Final = 8


def prepare_digests() -> None:
    """Imports numpy in a thread of its own, so that it is there when the first piece is written."""
    threading.Thread(target=import_module, args=("numpy",), daemon=True).start()


def digest_of_piece(data: memoryview, position: int) -> int:
    """Returns what bytes at a position of a file add to its digest. Zeros add nothing."""
    body = min(-position % _PAGE, len(data))
    tail = body + (len(data) - body) // _PAGE * _PAGE
    return (
        _digest_within_page(data[:body], position)
        + _digest_of_pages(data[body:tail], (position + body) // _PAGE)
        + _digest_within_page(data[tail:], position + tail)
    )


def sum_up(digests: list[int]) -> int:
    """Returns the digest of a file from those of its pieces, which do not overlap."""
    return sum(digests) % 2**64


def digest_of_file(path: Path) -> int:
    """Returns the digest of a file."""
    digests = []
    position = 0
    for chunk in read_chunks(path):
        digests.append(digest_of_piece(memoryview(chunk), position))
        position += len(chunk)
    return sum_up(digests)


def _digest_within_page(data: memoryview, position: int) -> int:
    """Returns what bytes add that do not fill the page in which they are."""
    if not data:
        return 0
    import numpy as np  # importing it takes a moment

    number, start = divmod(position, _PAGE)
    page = bytearray(_PAGE)
    page[start : start + len(data)] = data
    return int(np.add.reduce(np.frombuffer(page, "<u8"))) * (2 * number + 1)


def _digest_of_pages(data: memoryview, number: int) -> int:
    """Returns what whole pages add, the first of which has a number."""
    if not data:
        return 0
    import numpy as np

    sums = np.add.reduce(np.frombuffer(data, "<u8").reshape(-1, _PAGE // _WORD), axis=1)
    numbers = np.arange(number, number + len(sums), dtype=np.uint64)
    return int(sums @ (2 * numbers + 1))
