"""Estimates what a product takes on an H200, and says which plans are worth a measurement.

The estimate is that of product/panels/plans.py, for any size of panel: what a program takes to
begin and to end, its turns, and what stands beside it. Of the 679 plans that were once timed at 56
sizes (docs/kernels.md) it is off by 6 % root mean square.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Final, Literal

from nf4conv.codec.kernels.product.panels.plans import PANELS, Panel, Plan, choose_plan

PROCESSORS: Final = 132
"""Multiprocessors of an H200."""

MOST_SHARED: Final = 232_448
"""Bytes of shared memory that a program may have."""

MOST_PARTS: Final = 8

Way = Literal["ordered", "brisk", "straight"]
"""What computes: the package's panel_kernel, with x that a kernel before has ordered; kernels.py,
with such x; kernels.py, with x as it is.
"""


@dataclass(frozen=True)
class Candidate:
    """A plan that may be faster than the one that is chosen today.

    Attributes:
        way: whether x is ordered before.
        plan: how the product is divided.
    """

    way: Way
    plan: Plan

    def __str__(self) -> str:
        panel, cluster, splits = self.plan
        size = f"{panel.rows}×{panel.columns}, {panel.stages} stages, {panel.sets} sets"
        return f"{self.way} {size}, cluster {cluster}, splits {splits}"


def present(m: int, n: int, k: int) -> Candidate:
    """Returns what is chosen today."""
    return Candidate("ordered", choose_plan(m, n, k, PROCESSORS))


def goal(m: int) -> float:
    """Returns how much of cuBLAS's time a product of m rows may take."""
    if m <= 64:
        return 1.0
    return 1.15 if m <= 256 else 1.25


@cache
def panels() -> tuple[Panel, ...]:
    """Returns the panels that the kernels can be compiled for, besides those that are chosen among:
    other widths, four warpgroups, fewer stages or sets.
    """
    found = list(PANELS)
    taken = {(one.groups, one.columns, one.sets) for one in found}
    for columns in range(48, 257, 16):
        for groups, sets in ((2, 2), (2, 1), (4, 1)):
            if groups == 4 and columns > 128:  # 128 registers hold no more sums
                continue
            if sets == 1 and groups == 2 and columns > 128:  # nothing to gain but registers
                continue
            stages = 4 if columns <= 128 else 3
            one = Panel(groups=groups, columns=columns, stages=stages, sets=sets)
            fits = one.shared_bytes <= MOST_SHARED
            if fits and (groups, columns, sets) not in taken:
                found.append(one)
    return tuple(found)


def _programs_at_once(panel: Panel) -> int:
    """Returns how many programs of a panel a multiprocessor runs: 2 if registers and shared memory
    are enough.
    """
    threads = 128 * panel.groups
    fits = 2 * threads * panel.registers <= 65_536 and 2 * (panel.shared_bytes + 1024) <= 233_472
    return 2 if fits else 1


def estimate(candidate: Candidate, m: int, n: int, k: int) -> float:
    """Returns about how many µs a product takes."""
    panel, cluster, splits = candidate.plan
    programs = -(-m // panel.columns) * -(-n // panel.rows) * cluster * splits
    turns = -(-(-(-k // 128)) // (cluster * splits))
    turn = 0.55 + 0.0032 * panel.columns
    order = 0.4 + m * k * 4 / 2.4e6
    if candidate.way == "straight":
        turn += 0.55 * 0.07  # of decoding: 7 % more instructions, counted
        order = 0.0
    if panel.groups == 4:
        turn *= 2 * 0.915
    together = _programs_at_once(panel)
    one = 2.5 + turns * turn
    if together == 2:
        whole, rest = divmod(programs, 2 * PROCESSORS)
        two = 3.5 + turns * turn * 1.8
        cost = whole * two
        if rest > PROCESSORS:
            cost += two
        elif rest > 0:
            cost += one
    else:
        cost = -(-programs // PROCESSORS) * one
    if splits > 1:
        cost += 1 + splits * m * n * 8 / 4.1e6
    if cluster > 1:
        cost += 3
    return order + cost


def _plans(k: int) -> Iterator[Plan]:
    """Yields all plans that k can be divided for."""
    turns = -(-k // 128)
    for panel, cluster, splits in product(panels(), (1, 2), range(1, MOST_PARTS + 1)):
        if cluster * splits <= turns:
            yield Plan(panel, cluster, splits)


def candidates(m: int, n: int, k: int, most: int) -> list[Candidate]:
    """Returns the plans that are estimated to take least time, fastest first.

    Of each panel and way no more than two, because an estimate that is wrong for one division is
    wrong for its neighbours; of each way at least a third.
    """
    found: list[Candidate] = []
    counts: dict[tuple[Way, Panel], int] = {}
    everything = [Candidate(way, plan) for plan in _plans(k) for way in ("ordered", "straight")]
    everything.sort(key=lambda one: estimate(one, m, n, k))
    room: dict[Way, int] = {"ordered": most // 3, "straight": most - most // 3}
    for one in everything:
        kind = (one.way, one.plan.panel)
        if room[one.way] > 0 and counts.get(kind, 0) < 2:
            counts[kind] = counts.get(kind, 0) + 1
            room[one.way] -= 1
            found.append(one)
    return found
