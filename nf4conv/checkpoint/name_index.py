"""Many names looked up in a path at once, in a time that hardly depends on how many they are.

For a checkpoint of experts both the list of skipped modules and the modules may number tens of thousands.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable


class NameIndex:
    """A set of names.

    Args:
        names: of which none is empty.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        dots: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
        for name in self._names:
            dots[len(name)].add(tuple(place for place, character in enumerate(name) if character == "."))
        self._dots = dict(dots)
        self._lengths = sorted(dots)

    def ends(self, path: str) -> bool:
        """Whether a path ends with one of the names."""
        longest = bisect(self._lengths, len(path))
        return any(path[-length:] in self._names for length in self._lengths[:longest])

    def starts(self, path: str, length: int) -> bool:
        """Whether a path starts with a name of this length, in which a dot stands for any character."""
        head = path[:length]
        if head in self._names:
            return True
        for places in self._dots.get(length, ()):
            if any(head[place] != "." for place in places):
                characters = list(head)
                for place in places:
                    characters[place] = "."
                if "".join(characters) in self._names:
                    return True
        return False

    def starts_between(self, path: str, shortest: int, longest: int) -> bool:
        """Whether a path starts, as for `starts`, with a name longer than `shortest`, but not longer than `longest`."""
        lengths = self._lengths[bisect(self._lengths, shortest) : bisect(self._lengths, longest)]
        return any(self.starts(path, length) for length in lengths)
