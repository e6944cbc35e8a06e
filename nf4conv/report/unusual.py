"""What stands out in a checkpoint: a few modules that are not treated like the others of their kind."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Final

from nf4conv.report.measured import place_of
from nf4conv.report.rows import kind_name

_FEWEST: Final = 3  # modules of one kind, of which one can be unlike the others
_MOST_LINES: Final = 8
_MOST_LAYERS: Final = 6


def unusual(treated: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """A line for each kind of tensor of which most are treated alike, and some are not.

    `treated` is the name of each tensor, and what becomes of it or how it is stored, in a few words.
    """
    lines, kinds = [], defaultdict(list)
    for name, treatment in treated:
        kinds[f"{kind_name(place_of(name))}.{name.rpartition('.')[2]}"].append((name, treatment))
    for kind, members in kinds.items():
        (common, count), *rare = Counter(treatment for _, treatment in members).most_common()
        for treatment, number in rare if len(members) >= _FEWEST and 2 * count > len(members) else ():
            layers = [str(place_of(name).layer) for name, other in members if other == treatment]
            where = ", ".join([*layers[:_MOST_LAYERS], *(["…"] if len(layers) > _MOST_LAYERS else [])])
            lines.append(f"{kind}: {number:,} of {len(members):,} {treatment}, the others {common}: {where}")
    more = len(lines) - _MOST_LINES
    return (*lines[:_MOST_LINES], *([f"… and {more:,} more kinds of modules are treated unlike"] if more > 0 else []))
