"""Says which plans of product/panels are worth a measurement."""

from collections import Counter
from typing import Final

from nf4conv.inference.kernels.product.panels.plans import (
    Panel,
    Plan,
    choose_plan,
    estimate,
    plans_for,
)

PROCESSORS: Final = 132
"""Multiprocessors of an H200."""

WAYS: Final = ("sums", "weights")
"""What a panel scales."""


def name_of(plan: Plan) -> str:
    """Returns a name that begins with what is scaled."""
    panel, cluster, splits = plan
    way = WAYS[0] if panel.scales_sums else WAYS[1]
    size = f"{panel.rows}×{panel.columns}, {panel.stages} stages, {panel.sets} sets"
    return f"{way} {size}, cluster {cluster}, splits {splits}"


def present(m: int, n: int, k: int) -> Plan:
    """Returns what is chosen today."""
    return choose_plan(m, n, k, PROCESSORS)


def estimated(plan: Plan, m: int, n: int, k: int) -> float:
    """Returns about how many µs a product takes on an H200."""
    return estimate(plan, m, n, k, PROCESSORS)


def goal(m: int) -> float:
    """Returns how much of cuBLAS's time a product of m rows may take."""
    if m <= 64:
        return 1.0
    return 1.15 if m <= 256 else 1.25


def candidates(m: int, n: int, k: int, most: int) -> list[Plan]:
    """Returns the plans besides today's that are estimated to take least time.

    Of each panel in clusters of one size no more than two, because an estimate that is wrong for
    one division is wrong for its neighbours.
    """
    today = present(m, n, k)
    counts: Counter[tuple[Panel, int]] = Counter()
    found: list[Plan] = []
    for plan in sorted(plans_for(k), key=lambda one: estimated(one, m, n, k)):
        kind = plan.panel, plan.cluster
        if plan == today or counts[kind] == 2 or len(found) == most:
            continue
        counts[kind] += 1
        found.append(plan)
    return found
