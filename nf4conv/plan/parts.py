"""Divides a plan into parts: which shards a process makes, by its own number or a scheduler's."""

import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Final, TypeVar

from nf4conv.errors import PlanError
from nf4conv.options import QuantizeOptions, RunOptions
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.jobs import Shard, source_files
from nf4conv.plan.writing import Part, WritingPlan

_COUNT: Final = "NF4CONV_PARTS"


@dataclass(frozen=True)
class _Scheduler:
    """Names the environment variables by which a scheduler numbers its processes."""

    index: str  # index of the process
    count: str  # number of processes
    first: str | None = None  # first index; None where indices count from 0


_SCHEDULERS: Final = (
    _Scheduler("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    _Scheduler("JOB_COMPLETION_INDEX", _COUNT),  # an indexed job of Kubernetes
    _Scheduler("RANK", "WORLD_SIZE"),  # torchrun
)
"""The schedulers that are known. If the variables of several are set, the first one counts."""


PlanT = TypeVar("PlanT", bound=WritingPlan | DiffusersPlan[Any])


def plan_part(plan: PlanT, run: RunOptions, asked_by: str = "--part") -> PlanT:
    """Returns the part of a plan that `run.part` names.

    Args:
        plan: plan of `plan_quantization` or `plan_dequantization`.
        run: how to use the machine. Without `run.part` the plan is returned as it is.
        asked_by: option to name in errors.

    Returns:
        A plan of the same kind, with the shards of the part.

    Raises:
        PlanError: there is no such part, or the plan cannot be carried out in parts.

    Example:
        >>> run = nf4conv.RunOptions(part="2/8")
        >>> part = nf4conv.plan_part(nf4conv.plan_quantization("./Llama-3.1-70B"), run)
    """
    if run.part is None:
        return plan
    if isinstance(plan, DiffusersPlan):
        raise PlanError(
            f"{plan.folder.place}: {asked_by} takes the components of a diffusers pipeline one by "
            f"one: --subfolder NAME, into OUT/NAME"
        )
    _require_divisible(plan, run, asked_by)
    number, count = number_of(run.part)
    shares = _shares(plan.whole.shards, count)
    mine = tuple(shard for shard in plan.whole.shards if shares[shard.name] == number)
    part = Part(number, count, shares, plan.whole)
    notes = plan.notes
    if not mine:
        files = len(plan.whole.shards)
        notes = (
            *notes,
            f"part {number:,} of {count:,} has nothing to do: {files:,} files make at most "
            f"{files:,} parts; --max-shard-size makes more of them",
        )
    return replace(plan, output=replace(plan.whole, shards=mine), part=part, notes=notes)


def _require_divisible(plan: WritingPlan, run: RunOptions, asked_by: str) -> None:
    """Raises a PlanError for options with which a plan cannot be carried out in parts."""
    if run.overwrite:
        raise PlanError(
            f"{asked_by} does not go with --overwrite, which would delete what other parts make; "
            f"remove OUT before they start"
        )
    if not isinstance(plan.options, QuantizeOptions):
        return
    if plan.options.calibrate:
        raise PlanError(
            f"{asked_by} does not go with --calibrate: what goes into a block comes from all "
            f"blocks before it, so one process on one device calibrates them all"
        )


def number_of(part: str) -> tuple[int, int]:
    """Returns the number of a part, counting from 1, and the number of all parts.

    Args:
        part: such as "2/3", or "auto" for what a scheduler has put into the environment.

    Raises:
        PlanError: the environment says nothing, or what fits no part.
    """
    if part == "auto":
        return _from_environment()
    number, _, count = part.partition("/")
    return int(number), int(count)


def _from_environment() -> tuple[int, int]:
    """Returns the number of this part and of all parts, from a scheduler's variables."""
    scheduler = _scheduler()
    index = _number(scheduler.index)
    count = _number(_COUNT if _COUNT in os.environ else scheduler.count)
    if scheduler.first is not None:
        # An array of only some of the parts, to run these again, has a smaller count of its own.
        # Its indices then count from 0, whatever its first one is.
        is_whole = _number(scheduler.count) == count
        if is_whole:
            index -= _number(scheduler.first)
    if not 0 <= index < count:
        found = os.environ[scheduler.index]
        raise PlanError(f"--part auto: {scheduler.index} is {found}, which fits no {count:,} parts")
    return index + 1, count


def _scheduler() -> _Scheduler:
    for scheduler in _SCHEDULERS:
        if scheduler.index in os.environ:
            return scheduler
    names = ", ".join(scheduler.index for scheduler in _SCHEDULERS)
    raise PlanError(f"--part auto: none of {names} is set; give --part I/N")


def _number(variable: str) -> int:
    """Reads a whole number from an environment variable; raises a PlanError for anything else."""
    text = os.environ.get(variable, "not set")
    if not re.fullmatch(r"\d{1,9}", text):
        raise PlanError(
            f"--part auto: {variable} is {text[:40]}, which is no number; give --part I/N"
        )
    return int(text)


def _shares(shards: Sequence[Shard], count: int) -> dict[str, int]:
    """Returns the number of the part that makes each shard, by the shard's name.

    A part makes neighbouring shards, and about as many bytes as the other parts. Cuts between
    source files are preferred, so that two parts seldom read one file. If there are more parts than
    shards, the last parts make none.
    """
    count = min(count, len(shards))
    sizes = [shard.largest_size + shard.source_bytes for shard in shards]
    ends = list(accumulate(sizes))
    total = ends[-1]
    inside, between = _possible_cuts(shards, ends)
    cuts = []
    for part in range(1, count):
        # measured in bytes times `count`, to stay in integers
        wanted = part * total
        # a cut through a file costs as much as an eighth of a share that is too large or too small
        candidates = [
            *_nearest(between, wanted, count, cost=0),
            *_nearest(inside, wanted, count, cost=total // 8),
        ]
        cuts.append(min(candidates)[1])
    cuts.sort()
    return {shard.name: 1 + bisect_left(cuts, place) for place, shard in enumerate(shards)}


@dataclass(frozen=True)
class _Cuts:
    """Lists places between neighbouring shards at which parts may be divided."""

    ends: list[int]  # bytes of all shards before each place, in order
    shards: list[int]  # number of the shard before each place


def _possible_cuts(shards: Sequence[Shard], ends: Sequence[int]) -> tuple[_Cuts, _Cuts]:
    """Returns the places at which both neighbours read one source file, and all others."""
    inside = _Cuts([], [])
    between = _Cuts([], [])
    files = [source_files([shard]) for shard in shards]
    for number, (left, right) in enumerate(pairwise(files)):
        cuts = between if left.isdisjoint(right) else inside
        cuts.ends.append(ends[number])
        cuts.shards.append(number)
    return inside, between


def _nearest(cuts: _Cuts, wanted: int, count: int, cost: int) -> Iterator[tuple[int, int]]:
    """Yields (error, number of the shard before it) of the places around a wanted one.

    Args:
        cuts: the places.
        wanted: bytes before the wanted place, times `count`.
        count: number of parts.
        cost: what is added to the error of each.
    """
    after = bisect_left(cuts.ends, -(-wanted // count))
    for place in (after - 1, after):
        if 0 <= place < len(cuts.ends):
            end = cuts.ends[place]
            first = bisect_left(cuts.ends, end)  # of several that are equal
            yield abs(count * end - wanted) + cost, cuts.shards[first]
