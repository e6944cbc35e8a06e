"""Where a tensor stands in a model, what is of one kind there, and what is not treated like its
kind.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

from nf4conv.models.module_names import module_of

_NUMBER: Final = re.compile(r"(^|\.)(\d+)(?=\.|$)")
_FEWEST: Final = 3  # modules of one kind, of which one can be unlike the others
_MOST_LINES: Final = 8
_MOST_LAYERS: Final = 6

T = TypeVar("T")


class ModulePlace(NamedTuple):
    """Where a weight stands in a model."""

    stack: (
        str  # the path before the first number, such as "model.layers"; empty if there is no number
    )
    layer: int | None  # that number; None if there is none
    # the rest of the module's path without further numbers, such as "mlp.experts.down_proj"
    kind: str


def place_of(name: str) -> ModulePlace:
    """The place of a weight, by its name."""
    module = module_of(name)
    match = _NUMBER.search(module)
    if match is None:
        return ModulePlace("", None, module)
    kind = _NUMBER.sub("", module[match.end() :]).strip(".")
    return ModulePlace(module[: match.start()], int(match[2]), kind or module[: match.start()])


def by_kind(rows: Iterable[T], place: Callable[[T], Any]) -> Iterator[tuple[str, str, list[T]]]:
    """(stack, kind, rows) of each kind of module in each stack of layers, given the place of a row."""
    groups: defaultdict[tuple[str, str], list[T]] = defaultdict(list)
    for row in rows:
        groups[place(row).stack, place(row).kind].append(row)
    for (stack, kind), members in groups.items():
        yield stack, kind, members


def kind_name(row: Any) -> str:
    """The modules of one kind, with a star for the layer."""
    return f"{row.stack}.*.{row.kind}" if row.stack else row.kind


def unusual(treated: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """A line for each kind of tensor of which most are treated alike, and some are not.

    `treated` is the name of each tensor, and what becomes of it or how it is stored, in a few
    words.
    """
    lines, kinds = [], defaultdict(list)
    for name, treatment in treated:
        kinds[f"{kind_name(place_of(name))}.{name.rpartition('.')[2]}"].append((name, treatment))
    for kind, members in kinds.items():
        (common, count), *rare = Counter(treatment for _, treatment in members).most_common()
        for treatment, number in (
            rare if len(members) >= _FEWEST and 2 * count > len(members) else ()
        ):
            layers = [str(place_of(name).layer) for name, other in members if other == treatment]
            where = ", ".join(
                [*layers[:_MOST_LAYERS], *(["…"] if len(layers) > _MOST_LAYERS else [])]
            )
            lines.append(
                f"{kind}: {number:,} of {len(members):,} {treatment}, the others {common}: {where}"
            )
    more = len(lines) - _MOST_LINES
    return (
        *lines[:_MOST_LINES],
        *([f"… and {more:,} more kinds of modules are treated unlike"] if more > 0 else []),
    )
