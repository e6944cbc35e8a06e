"""Finds where a tensor stands in a model, and what is not treated like the others of its kind."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, Protocol, TypeVar

from nf4conv.models.experts import single_expert
from nf4conv.models.module_names import module_of

_NUMBER: Final = re.compile(r"(^|\.)(\d+)(?=\.|$)")
_FEWEST: Final = 3  # modules of one kind, of which one can be unlike the others
_MOST_LINES: Final = 8
_MOST_LAYERS: Final = 6  # numbers in a line

T = TypeVar("T")


class Placed(Protocol):
    """Something that stands in a model: a ModulePlace, or a row of a result."""

    @property
    def stack(self) -> str: ...
    @property
    def kind(self) -> str: ...


class ModulePlace(NamedTuple):
    """The place of a module in a model.

    Attributes:
        stack: the path before the first number, such as "model.layers". Empty if the path has no
            number.
        layer: that number. None if the path has none.
        kind: the rest of the path without further numbers, such as "mlp.experts.down_proj".
    """

    stack: str
    layer: int | None
    kind: str


def place_of(name: str) -> ModulePlace:
    """Returns the place of a weight, given its name."""
    module = module_of(name)
    number = _NUMBER.search(module)
    if number is None:
        return ModulePlace("", None, module)
    stack = module[: number.start()]
    kind = _NUMBER.sub("", module[number.end() :]).strip(".")
    return ModulePlace(stack, int(number[2]), kind or stack)


def by_kind(rows: Iterable[T], place: Callable[[T], Placed]) -> Iterator[tuple[str, str, list[T]]]:
    """Groups rows by kind of module and stack of layers.

    Args:
        rows: the rows.
        place: returns the place of a row.

    Yields:
        A stack, a kind, and the rows of this kind in this stack.
    """
    groups: defaultdict[tuple[str, str], list[T]] = defaultdict(list)
    for row in rows:
        found = place(row)
        groups[found.stack, found.kind].append(row)
    for (stack, kind), members in groups.items():
        yield stack, kind, members


def kind_name(place: Placed) -> str:
    """Returns the name of all modules of one kind, with a star in place of the layer's number."""
    return f"{place.stack}.*.{place.kind}" if place.stack else place.kind


def experts_together(rows: Iterable[T], name: Callable[[T], str]) -> dict[str, list[T]]:
    """Groups rows: the same projection of all experts of a layer, and every other row alone.

    Args:
        rows: the rows.
        name: returns the name of a row's tensor.

    Returns:
        The rows of each group by name, with a star in place of the expert's number.
    """
    groups: dict[str, list[T]] = {}
    for row in rows:
        key = name(row)
        single = single_expert(key)
        if single is not None:
            rest = key.removeprefix(single.experts).replace(f".{single.expert}.", ".*.", 1)
            key = single.experts + rest
        groups.setdefault(key, []).append(row)
    return groups


def unusual(treated: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Finds kinds of tensors of which most are treated alike, and some are not.

    Args:
        treated: the name of each tensor, and what becomes of it or how it is stored, in a few
            words.

    Returns:
        A line for each such kind and treatment, up to a limit.
    """
    kinds: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, treatment in treated:
        kind = f"{kind_name(place_of(name))}.{name.rpartition('.')[2]}"
        kinds[kind].append((name, treatment))
    lines: list[str] = []
    for kind, members in kinds.items():
        if len(members) >= _FEWEST:
            lines.extend(_unusual_lines(kind, members))
    if len(lines) <= _MOST_LINES:
        return tuple(lines)
    more = len(lines) - _MOST_LINES
    return (*lines[:_MOST_LINES], f"… and {more:,} more kinds of modules are not treated alike")


def _unusual_lines(kind: str, members: list[tuple[str, str]]) -> Iterator[str]:
    """Yields a line for each treatment of a kind that less than half of its tensors have."""
    counts = Counter(treatment for _, treatment in members).most_common()
    common, most = counts[0]
    if 2 * most <= len(members):
        return
    for treatment, count in counts[1:]:
        layers = [str(place_of(name).layer) for name, other in members if other == treatment]
        if len(layers) > _MOST_LAYERS:
            layers = [*layers[:_MOST_LAYERS], "…"]
        yield (
            f"{kind}: {count:,} of {len(members):,} {treatment}, the others {common}: "
            f"{', '.join(layers)}"
        )
