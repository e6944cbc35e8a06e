"""Looks names up in paths in a time that hardly depends on how many names there are."""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable
from functools import cache


class NameIndex:
    """Names, none of them empty, to be looked up in a path in a time that hardly depends on how
    many they are.

    For a checkpoint of experts both the list of skipped modules and the modules may number tens of
    thousands.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        dots: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
        for name in self._names:
            dots[len(name)].add(
                tuple(place for place, character in enumerate(name) if character == ".")
            )
        self._dots = dict(dots)
        self._lengths = sorted(dots)
        self.longest = max(dots, default=0)
        self._ends = cache(
            lambda tail: any(tail[-length:] in self._names for length in self._lengths)
        )

    def ends(self, path: str) -> bool:
        """Whether a path ends with one of the names."""
        return self._ends(path[-self.longest :])

    def starts(self, path: str, stop: int, end: str = "") -> bool:
        """Whether a path starts with a name whose dots are any character.

        It ends with, or unless `end` says more in, the part before `stop`, or with the dot after
        it.
        """
        shortest = stop - 1 if end else path.rfind(".", 0, stop) + 1
        for length in self._lengths[
            bisect(self._lengths, shortest) : bisect(self._lengths, len(path))
        ]:
            head = path[:length]
            if head in self._names:
                return True
            for places in self._dots[length]:
                if any(head[place] != "." for place in places):
                    characters = list(head)
                    for place in places:
                        characters[place] = "."
                    if "".join(characters) in self._names:
                        return True
        return False
