"""Estimates what a product takes on an H200, and says which plans are worth a measurement.

The estimate is that of product/panels/plans.py, for any size of panel: what a program takes to
begin and to end, its turns, and what stands beside it. It was off by 6 % root mean square for the
679 plans that were timed at 56 sizes in the sweep that docs/kernels.md tells of.
"""

from collections import Counter
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

Way = Literal["ordered", "brisk", "straight", "scaled", "stream", "shared"]
"""What computes: the package's panel_kernel, with x that a kernel before has ordered; kernels.py,
with such x; kernels.py, with x as it is; the same, with sums that are scaled instead of weights;
streaming.py: "straight", and programs share all turns evenly (a plan's cluster and splits are 1).
"""


SCALED: Final = ("scaled", "shared")
STREAMS: Final = ("stream", "shared")


@dataclass(frozen=True)
class Candidate:
    """A plan that may be faster than the one that is chosen today.

    Attributes:
        way: whether x is ordered before.
        plan: how the product is divided.
        registers: of a thread at most.
    """

    way: Way
    plan: Plan

    @property
    def registers(self) -> int:
        panel = self.plan.panel
        twice = self.way in SCALED and panel.sets == 2  # there are twice as many sums
        if twice or (self.way in STREAMS and panel.groups == 2):
            return 255
        return panel.registers

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


def programs_at_once(candidate: Candidate) -> int:
    """Returns how many programs a multiprocessor has room for: 1 or 2."""
    panel = candidate.plan.panel
    threads = 128 * panel.groups
    fits = (
        2 * threads * candidate.registers <= 65_536 and 2 * (panel.shared_bytes + 1024) <= 233_472
    )
    return 2 if fits else 1


def _turn(candidate: Candidate) -> float:
    """Returns about how many µs a turn of a program takes: 128 k."""
    panel = candidate.plan.panel
    turn = 0.55 + 0.0032 * panel.columns
    if candidate.way in ("straight", "stream"):
        turn += 0.55 * 0.07
    elif candidate.way in SCALED:
        turn += 0.0006 * panel.columns - 0.55 * 0.3
    if panel.groups == 4:
        return turn * 2 * 0.915
    return turn * 1.03 if panel.sets == 1 else turn


def estimate(candidate: Candidate, m: int, n: int, k: int) -> float:
    """Returns about how many µs a product takes.

    Nothing but "ordered" was measured: the others are taken to need 1 µs less for the end of a
    program and 1 µs less for adding up in a cluster, "straight" 7 % more for decoding and "scaled"
    30 % less, but time for each sum, as their instructions were counted.
    """
    if candidate.way in STREAMS:
        return _estimate_stream(candidate, m, n, k)
    if candidate.way in FITTED:
        return _fitted(candidate, m, n, k)
    panel, cluster, splits = candidate.plan
    programs = -(-m // panel.columns) * -(-n // panel.rows) * cluster * splits
    all_turns = -(-k // 128)
    turns = -(-all_turns // (cluster * splits))
    begin_and_end, pair = 2.5, 3.0
    if candidate.way != "ordered":
        begin_and_end, pair = 1.5, 2.0
    order = 0.0
    if candidate.way in ("ordered", "brisk"):
        order = 0.4 + m * k * 4 / 2.4e6
    turn = _turn(candidate)
    one = begin_and_end + turns * turn
    if programs_at_once(candidate) == 2:
        whole, rest = divmod(programs, 2 * PROCESSORS)
        two = begin_and_end + 1 + turns * turn * 1.8
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
        cost += pair
    return order + cost


PER_WAVE: Final = {1: 132, 2: 132, 3: 126, 4: 128, 5: 120}
"""Programs that run at once in clusters of a size, which must lie in one of the GPU's groups."""

FITTED: Final[dict[str, dict[str, float]]] = {
    "straight": {
        "two": 0.609, "cluster": 0.517, "exchange": 1.864, "sum": 2.469, "split": 1.43,
        "2": 0.721, "2 column": 0.331, "1": 0.754, "1 column": 0.307,
        "4": 1.402, "4 column": 0.502, "twice": 0.95, "twice column": 1.248,
    },
    "scaled": {
        "two": 0, "cluster": 0.329, "exchange": 3.475, "sum": 2.592, "split": 1.4,
        "2": 0.603, "2 column": 0.399, "1": 0.445, "1 column": 0.721,
        "4": 1.212, "4 column": 0.402, "twice": 1.228, "twice column": 0.453,
    },
}  # fmt: skip


def _fitted(candidate: Candidate, m: int, n: int, k: int) -> float:
    """Returns what was fitted to the first sweep."""
    panel, cluster, splits = candidate.plan
    fit = FITTED[candidate.way]
    programs = -(-m // panel.columns) * -(-n // panel.rows) * cluster * splits
    all_turns = -(-k // 128)
    turns = -(-all_turns // (cluster * splits))
    at_once = PER_WAVE[cluster]
    kind = "4" if panel.groups == 4 else str(panel.sets)
    alone = splits > 1 and programs <= PROCESSORS
    waves, doubles = -(-programs // at_once), 0
    if programs_at_once(candidate) == 2 and not alone:
        doubles, rest = divmod(programs, 2 * at_once)
        doubles += rest > at_once
        waves = 1 if 0 < rest <= at_once else 0
    hundreds = panel.columns / 100
    cost = waves * turns * (fit[kind] + fit[f"{kind} column"] * hundreds)
    cost += doubles * (fit["two"] + turns * (fit["twice"] + fit["twice column"] * hundreds))
    if splits > 1:
        cost += fit["sum"] + fit["split"] * splits * m * n / 1e6
    if cluster > 1:
        tile = max(waves, 1) * panel.rows * panel.columns / 1e4
        cost += fit["cluster"] + fit["exchange"] * tile * (cluster - 1) / cluster
    return cost


def _estimate_stream(candidate: Candidate, m: int, n: int, k: int) -> float:
    """Returns the same for programs that share all turns: each begins a segment in 0.7 µs, and
    leaves a tile of sums, at 60 bytes a ns; an owner reads those of others.
    """
    panel = candidate.plan.panel
    all_turns = -(-k // 128)
    total = -(-m // panel.columns) * -(-n // panel.rows) * all_turns
    turns = -(-total // PROCESSORS)
    segments = 1 + -(-turns // all_turns)
    others = -(-all_turns // turns)
    tile = 4 * panel.rows * panel.columns / 60e3
    fit = FITTED["scaled" if candidate.way == "shared" else "straight"]
    kind = "4" if panel.groups == 4 else str(panel.sets)
    turn = fit[kind] + fit[f"{kind} column"] * panel.columns / 100
    return turns * turn + 0.7 * segments + (1 + others) * tile


def _plans(k: int) -> Iterator[Plan]:
    """Yields all plans that k can be divided for."""
    turns = -(-k // 128)
    for panel, cluster, splits in product(panels(), tuple(PER_WAVE), range(1, MOST_PARTS + 1)):
        if cluster * splits <= turns:
            yield Plan(panel, cluster, splits)


def fits(way: Way, plan: Plan) -> bool:
    """Returns whether a kernel takes a plan, and a thread has registers enough."""
    panel, cluster, splits = plan
    if way not in FITTED and cluster > 2:
        return False
    if way in STREAMS and (cluster * splits > 1 or panel.columns % 32 > 0):
        return False
    return way not in SCALED or panel.columns <= (64 if panel.sets == 1 else 128)


def candidates(m: int, n: int, k: int, most: int) -> list[Candidate]:
    """Returns the plans that are estimated to take least time, and the plan of today for each way.

    Of each panel and way no more than two, because an estimate that is wrong for one division is
    wrong for its neighbours.
    """
    today = present(m, n, k)
    found: list[Candidate] = []
    shares: dict[Way, int] = {"straight": 5, "scaled": 5, "stream": 3, "shared": 3}
    if m > 128:
        shares = {"straight": 8, "stream": 5, "shared": 1, "scaled": 2}
    elif m <= 64:
        shares = {"scaled": 9, "shared": 4, "straight": 3}
    for way, parts in shares.items():
        share = most * parts // 16
        everything = [Candidate(way, plan) for plan in _plans(k) if fits(way, plan)]
        ranked = sorted(everything, key=lambda one: estimate(one, m, n, k))
        counts: Counter[Panel] = Counter()
        for one in ranked:
            if one in found or one == today or counts[one.plan.panel] == 2:
                continue
            counts[one.plan.panel] += 1
            found.append(one)
            if counts.total() == share:
                break
    return found
