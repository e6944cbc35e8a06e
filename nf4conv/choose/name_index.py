"""Looks names up in paths quickly."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class NameIndex:
    """Holds names, to be looked up in paths in a time that hardly depends on their number.

    For a checkpoint of experts, both the list of skipped modules and the modules themselves may
    number tens of thousands.

    Args:
        names: the names, none of them empty.

    Attributes:
        longest: the length of the longest name; 0 without names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        # by length: where names have their dots, which few names do differently from each other
        self._dots: dict[int, set[tuple[int, ...]]] = {}
        for name in self._names:
            self._dots.setdefault(len(name), set()).add(_dots_of(name))
        self._lengths = sorted(self._dots)
        self.longest = max(self._dots, default=0)
        self._known_ends: dict[str, bool] = {}

    def ends(self, path: str) -> bool:
        """Returns True if a path ends with one of the names."""
        # the modules of many layers have the same end
        tail = path[-self.longest :]
        found = self._known_ends.get(tail)
        if found is None:
            found = any(tail[-length:] in self._names for length in self._lengths)
            self._known_ends[tail] = found
        return found

    def begins(self, path: str, shortest: int, longest: int) -> bool:
        """Returns True if a path begins with one of the names, in which a dot is any character.

        Args:
            path: the path.
            shortest: the smallest number of characters that the name may have.
            longest: the largest number of characters that the name may have.
        """
        first = bisect_left(self._lengths, shortest)
        last = bisect_right(self._lengths, longest)
        return any(self._is_named(path[:length]) for length in self._lengths[first:last])

    def _is_named(self, head: str) -> bool:
        """Returns True if a text is one of the names, in which a dot is any character."""
        if head in self._names:
            return True
        for dots in self._dots[len(head)]:
            if all(head[place] == "." for place in dots):
                continue  # a name with dots there would be the text itself
            characters = list(head)
            for place in dots:
                characters[place] = "."
            if "".join(characters) in self._names:
                return True
        return False


def _dots_of(name: str) -> tuple[int, ...]:
    return tuple(place for place, character in enumerate(name) if character == ".")
