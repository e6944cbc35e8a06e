"""Says what a program computes at once, and chooses how a product is divided into programs.

A program computes a panel of 128 or 256 rows of W for `columns` rows of x, over all k or one of
several parts of it. For few rows of x it scales sums, and rounds only the 16 values to the dtype of
x. For more it scales and rounds weights. Then in float16 the result is that of a product with
decoded weights, but for the order of float32 sums. In bfloat16 the 16 values are rounded to float16
before they are scaled: as decoded weights are rounded to a grid eight times as coarse, this adds
0.4 % to their error.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from typing import Final, NamedTuple

from nf4conv.inference.kernels.product.balancing import MOST_SPLITS
from nf4conv.inference.kernels.product.shapes import Compiled


@dataclass(eq=False, repr=False)  # told apart by identity, which is faster
class Panel(Compiled):
    """Says what a program computes at once: panel_kernel is compiled once for each.

    Attributes:
        groups: warpgroups, 64 rows of W each: 2 or 4.
        columns: rows of x, a multiple of 16 up to 256.
        scales_sums: True to scale sums of 64 k, which takes twice the registers for sums; False to
            scale weights.
        nested: True if absmax is uint8 codes.
        stages: turns of x in shared memory: four of 128 rows fit.
        sets: units of decoded weights that a warpgroup holds: with 2 it decodes one while the other
            is multiplied; four warpgroups have no registers for a second.
        rows: rows of W.
        totals: sums that a thread keeps.
        turn_bytes: of x for a turn, 128 k.
        shared_bytes: of tables and the tiles of all turns, or of sums in their place, with what
            they may be moved to begin at a multiple of 1024.
        registers: of a thread at most: a multiprocessor has 65,536, and one program.
    """

    groups: int
    columns: int
    scales_sums: bool
    nested: bool = True

    def __post_init__(self) -> None:
        self.stages = 4 if self.columns <= 128 else 3
        self.sets = 2 if self.groups == 2 else 1
        self.rows = 64 * self.groups
        self.totals = self.columns // 2
        self.turn_bytes = 256 * self.columns
        sums = 4 * self.columns * (self.rows + 4)
        self.shared_bytes = 34816 + max(self.stages * self.turn_bytes, sums)
        self.registers = 128 if self.groups == 4 else 255


@cache
def without_nesting(panel: Panel) -> Panel:
    """Returns a panel for absmax in float32, always the same one."""
    return replace(panel, nested=False)


MOST_ROWS: Final = 512
"""Rows of x at most: nothing above was measured."""

PANELS: Final = (
    Panel(2, 48, scales_sums=True),
    Panel(2, 64, scales_sums=True),
    Panel(2, 96, scales_sums=True),
    Panel(2, 128, scales_sums=True),
    Panel(4, 48, scales_sums=True),
    Panel(4, 64, scales_sums=True),
    Panel(4, 96, scales_sums=False),
    Panel(4, 128, scales_sums=False),
    Panel(2, 128, scales_sums=False),
    Panel(2, 160, scales_sums=False),
    Panel(2, 176, scales_sums=False),
    Panel(2, 192, scales_sums=False),
    Panel(2, 224, scales_sums=False),
    Panel(2, 256, scales_sums=False),
)


CLUSTERS: Final = (1, 2)
"""Sizes of clusters. Larger ones were slower wherever they were tried: 40 of three, or 32 of four,
do not run at once on an H200.
"""


class Plan(NamedTuple):
    """Says how a product is divided.

    Attributes:
        panel: what a program computes.
        cluster: programs that share a tile and add up in shared memory: one or two.
        splits: clusters that share a tile, whose sums another kernel adds up.
    """

    panel: Panel
    cluster: int
    splits: int


def plans_for(k: int) -> Iterator[Plan]:
    """Yields all plans for a product of k columns: every program has a turn of 128 at least."""
    turns = -(-k // 128)
    for panel, cluster, splits in product(PANELS, CLUSTERS, range(1, MOST_SPLITS + 1)):
        if cluster * splits <= turns:
            yield Plan(panel, cluster, splits)


@lru_cache(maxsize=4096)
def choose_plan(m: int, n: int, k: int, processors: int) -> Plan:
    """Returns the plan that takes least time for m rows of x and an [n, k] weight."""
    best = Plan(PANELS[0], 1, 1)
    least = float("inf")
    for plan in plans_for(k):
        cost = estimate(plan, m, n, k, processors)
        if cost < least:
            best = plan
            least = cost
    return best


def is_faster(m: int, n: int, k: int, processors: int) -> bool:
    """Returns True if panels are faster than decoding and the library's product."""
    if m > MOST_ROWS:
        return False
    # on an H200, in µs: a weight has 0.53 bytes in its codes and scales, and 2 decoded
    decoding = 1.5 + n * k * 2.53 / 3.9e6
    multiplying = max(2 * m * n * k / 7e8, n * k * 2 / 4.2e6)
    plan = choose_plan(m, n, k, processors)
    return estimate(plan, m, n, k, processors) < decoding + multiplying


_TURN: Final = {
    (True, 2): (0.505, 0.00329),
    (True, 4): (0.979, 0.00420),
    (False, 2): (0.544, 0.00272),
    (False, 4): (0.824, 0.00698),
}
"""The µs of a turn, and those that each row of x adds; by what is scaled (True: sums) and by the
number of warpgroups.
"""


def estimate(plan: Plan, m: int, n: int, k: int, processors: int) -> float:
    """Returns about how many µs a product takes on an H200.

    Fitted to 230 plans at the 49 sizes of docs/kernels.md: 6 % root mean square, and what is chosen
    among them takes at most 2 % longer than the fastest.
    """
    panel, cluster, splits = plan
    programs = -(-m // panel.columns) * -(-n // panel.rows) * cluster * splits
    waves = -(-programs // processors)
    turns = -(-k // (128 * cluster * splits))
    turn, turn_row = _TURN[panel.scales_sums, panel.groups]
    cost = waves * (1.56 + turns * (turn + turn_row * panel.columns))
    if cluster > 1:
        tile = panel.rows * panel.columns
        cost += 1.64 + waves * tile * 34e-6
    if splits > 1:
        cost += 0.46 + splits * m * n * 2.05e-6
    # the same for all plans: a GPU that works longer has a lower clock, and weights are read once
    return cost + m * n * k * 5.6e-10 + n * k * 2.3e-8
