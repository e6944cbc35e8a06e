"""Says what a program computes at once, and chooses how a product is divided into programs."""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final, NamedTuple

from nf4conv.codec.kernels.product.dividing import MOST_SPLITS


@dataclass(eq=False)  # told apart by identity, which is faster
class Panel:
    """Says what a program computes at once: panel_kernel is compiled once for each.

    Attributes:
        groups: warpgroups, 64 rows of W each: 2 or 4.
        columns: rows of x, a multiple of 16 up to 256.
        stages: turns of x in shared memory, 3 or more.
        sets: units of decoded weights that a warpgroup holds: with 2 it decodes one while the other
            is multiplied.
        nested: True if absmax is uint8 codes.
        rows: rows of W.
        totals: sums that a thread keeps.
        turn_bytes: of x for a turn, 128 k.
        shared_bytes: of tables and the tiles of all turns, or of sums in their place, with what
            they may be moved to begin at a multiple of 1024.
        registers: of a thread at most: a multiprocessor has 65,536.
        plain: the panel for absmax in float32.
    """

    groups: int
    columns: int
    stages: int
    sets: int
    nested: bool = True
    rows: int = field(init=False)
    totals: int = field(init=False)
    turn_bytes: int = field(init=False)
    shared_bytes: int = field(init=False)
    registers: int = field(init=False)
    plain: "Panel" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.rows = 64 * self.groups
        self.totals = self.columns // 2
        self.turn_bytes = 256 * self.columns
        sums = 4 * self.columns * (self.rows + 4)
        self.shared_bytes = 34816 + max(self.stages * self.turn_bytes, sums)
        self.registers = 128 if self.groups == 4 or self.totals <= 32 else 255
        self.plain = replace(self, nested=False) if self.nested else self


MOST_ROWS: Final = 512
"""Rows of x at most: nothing above was measured."""


NARROW: Final = Panel(groups=2, columns=64, stages=4, sets=2)
"""Two programs fit on a multiprocessor."""


TALL: Final = Panel(groups=4, columns=128, stages=4, sets=1)


PANELS: Final = (
    NARROW,
    Panel(groups=2, columns=96, stages=4, sets=2),
    Panel(groups=2, columns=128, stages=4, sets=2),
    TALL,
    Panel(groups=2, columns=160, stages=3, sets=2),
    Panel(groups=2, columns=176, stages=3, sets=2),
    Panel(groups=2, columns=192, stages=3, sets=2),
    Panel(groups=2, columns=224, stages=3, sets=2),
    Panel(groups=2, columns=256, stages=3, sets=2),
)


class Plan(NamedTuple):
    """Says how a product is divided.

    Attributes:
        panel: what a program computes.
        cluster: programs that share a tile and add up in shared memory: 1 or 2. Larger clusters
            leave multiprocessors idle: they must lie in one of the GPU's groups of 14 to 18.
        splits: clusters that share a tile, whose sums another kernel adds up.
    """

    panel: Panel
    cluster: int
    splits: int


def choose_plan(m: int, n: int, k: int, processors: int) -> Plan:
    """Returns the plan that takes least time.

    Args:
        m: rows of x.
        n: rows of the weights.
        k: columns of both.
        processors: multiprocessors of the GPU.
    """
    turns = -(-k // 128)
    best = Plan(NARROW, 1, 1)
    least = float("inf")
    for panel, cluster, splits in product(PANELS, (1, 2), range(1, MOST_SPLITS + 1)):
        plan = Plan(panel, cluster, splits)
        cost = _cost(plan, m, n, k, processors)
        if cluster * splits <= turns and cost < least:
            best = plan
            least = cost
    return best


def is_faster(m: int, n: int, k: int, processors: int) -> bool:
    """Returns whether panels are faster than decoding and the library's product."""
    if m > MOST_ROWS:
        return False
    decoded = 1.5 + n * k * 2.53 / 3.9e6 + max(2 * m * n * k / 7e8, n * k * 2 / 4.2e6)
    return _cost(choose_plan(m, n, k, processors), m, n, k, processors) < decoded


def _cost(plan: Plan, m: int, n: int, k: int, processors: int) -> float:
    """Returns about how many µs a product takes on an H200.

    Fitted to the sweep of docs/kernels.md, 6 % root mean square: what a program takes to begin and
    to end, its turns, the order of x, and the sums of parts.
    """
    panel, cluster, splits = plan
    programs = -(-m // panel.columns) * -(-n // panel.rows) * cluster * splits
    turns = -(-k // (128 * cluster * splits))
    begin_and_end = 2.5
    if panel is NARROW:
        whole, rest = divmod(programs, 2 * processors)
        two = begin_and_end + 1 + turns * 1.36
        cost = whole * two
        if rest > processors:
            cost += two
        elif rest > 0:
            cost += begin_and_end + turns * 0.8
    else:
        turn = 1.755 if panel is TALL else 0.55 + 0.0032 * panel.columns
        cost = -(-programs // processors) * (begin_and_end + turns * turn)
    if splits > 1:
        cost += 1 + splits * m * n * 8 / 4.1e6
    if cluster > 1:
        cost += 3
    return 0.4 + cost + m * k * 4 / 2.4e6
