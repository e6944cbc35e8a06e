"""Puts small items together, and items of several groups in turn."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, TypeVar

T = TypeVar("T")

LARGEST_BATCH: Final = 4096  # items that a worker takes together


def interleave(groups: Iterable[Iterable[T]], width: int) -> Iterator[T]:
    """Yields items of `width` groups in turn; a new group takes the place of an exhausted one."""
    waiting = iter(groups)
    active = deque(iter(group) for group in islice(waiting, width))
    while active:
        group = active.popleft()
        for item in group:
            yield item
            active.append(group)
            break
        else:
            active.extend(iter(group) for group in islice(waiting, 1))


def batches(
    items: Iterable[T],
    size: Callable[[T], int],
    room: int,
    kind: Callable[[T], object],
    most: int | None = None,
) -> Iterator[tuple[T, ...]]:
    """Groups neighbouring items of the same kind.

    Args:
        items: what is grouped.
        size: returns the bytes that an item takes.
        room: bytes that the items of a group take at most. A larger item comes alone.
        kind: returns what all items of a group have in common.
        most: items of a group at most; None for any number.
    """
    batch: list[T] = []
    left = room
    for item in items:
        needed = size(item)
        if batch:
            is_full = needed > left or len(batch) == most
            if is_full or kind(item) != kind(batch[0]):
                yield tuple(batch)
                batch = []
                left = room
        batch.append(item)
        left -= needed
    if batch:
        yield tuple(batch)


def aligned(nbytes: int) -> int:
    """Returns the room that a range of so many bytes takes in a worker's buffer."""
    return nbytes + -nbytes % 64
