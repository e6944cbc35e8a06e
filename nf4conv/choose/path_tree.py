"""Holds paths of modules by their parts, and finds those that a name in a skip list hits."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TypeAlias

Place: TypeAlias = str | None
"""A path, or the beginning of one up to a dot; None is above all of them."""


class PathTree:
    """A tree of paths, of which a checkpoint of experts may have several 100,000.

    No object stands for a place: that would take more memory than all the rest of a plan.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        # the parts that follow a place, and whether a path ends with them
        self._below: dict[Place, dict[str, bool]] = {None: {}}
        self._sorted: dict[Place, list[str]] = {}  # the parts of places that were asked for
        parts: dict[str, str] = {}  # so that memory holds each once
        for path in paths:
            above, dot, part = path.rpartition(".")
            place = above if dot else None
            below = self._below.get(place)
            if below is None:
                below = self._made(place)
            below[parts.setdefault(part, part)] = True

    def _made(self, place: Place) -> dict[str, bool]:
        """Returns what is below a place, which is made if there is none."""
        found = self._below.get(place)
        if found is None:
            assert place is not None
            found = self._below[place] = {}
            above, dot, part = place.rpartition(".")
            self._made(above if dot else None).setdefault(part, False)
        return found

    def below(self, place: Place) -> Mapping[str, bool]:
        """Returns the parts that follow a place, and whether a path ends with them."""
        return self._below.get(place, {})

    def has_path(self, place: str) -> bool:
        """Returns True if a path ends at a place."""
        above, dot, part = place.rpartition(".")
        return self.below(above if dot else None).get(part, False)

    def paths(self, place: str) -> Iterator[str]:
        """Yields the paths that end at a place or below."""
        if self.has_path(place):
            yield place
        for part in self.below(place):
            yield from self.paths(f"{place}.{part}")

    def sizes(self) -> Counter[str]:
        """Counts the paths that begin with each first part."""
        found: Counter[str] = Counter()
        for place, parts in self._below.items():
            if place is None:
                found.update(parts)
            else:
                found[place.partition(".")[0]] += sum(parts.values())
        return found

    def hit_by(self, name: str) -> Iterator[str]:
        """Yields the places at and below which at least one loader would skip every path.

        Two rules are enough. Whatever transformers 5.21 skips by a beginning, 5.0 skips too; and
        what vLLM skips, transformers 4 skips by an end of the path above, or 5.0 by a beginning.
        """
        yield from self._ending_with(name)
        yield from self.begun_by(name)

    def _ending_with(self, name: str) -> Iterator[str]:
        """Yields the places that end with a name, which may begin inside of a part."""
        start, dot, last = name.rpartition(".")
        if not dot:
            for part, groups in self._places_above.items():
                if part.endswith(name):
                    for places in groups.values():
                        yield from (_joined(place, part) for place in places)
            return
        groups = self._places_above.get(last, {})
        own = start.rpartition(".")[2]
        # if it is not the whole part above, others end with it too
        ends = [own] if own != start else [above for above in groups if above.endswith(own)]
        for above in ends:
            for place in groups.get(above, ()):
                if place is not None and place.endswith(start):
                    yield f"{place}.{last}"

    @cached_property
    def _places_above(self) -> dict[str, dict[str, list[Place]]]:
        """Returns the places that a part follows, by the part and by the last part of the place."""
        found: dict[str, dict[str, list[Place]]] = {}
        for place, parts in self._below.items():
            own = "" if place is None else place.rpartition(".")[2]
            for part in parts:
                found.setdefault(part, {}).setdefault(own, []).append(place)
        return found

    def begun_by(self, name: str, place: Place = None) -> Iterator[str]:
        """Yields the places below at which a path begins with a name, which may end in a part."""
        first, dot, rest = name.partition(".")
        if dot:
            if first in self.below(place):
                yield from self.begun_by(rest, _joined(place, first))
            return
        in_order = self._in_order(place)
        for number in range(bisect_left(in_order, first), len(in_order)):
            if not in_order[number].startswith(first):
                return
            yield _joined(place, in_order[number])

    def _in_order(self, place: Place) -> list[str]:
        """Returns the parts that follow a place, sorted."""
        if place not in self._sorted:
            self._sorted[place] = sorted(self.below(place))
        return self._sorted[place]


def _joined(place: Place, part: str) -> str:
    return part if place is None else f"{place}.{part}"
