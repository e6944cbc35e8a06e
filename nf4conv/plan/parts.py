"""Divides a plan into parts: which shards a process makes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from nf4conv.errors import PlanError
from nf4conv.options import QuantizeOptions, RunOptions
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.jobs import Shard
from nf4conv.plan.writing import Part, WritingPlan
from nf4conv.sources.unfinished import is_filled_in_parts

PlanT = TypeVar("PlanT", bound=WritingPlan | DiffusersPlan)
RunT = TypeVar("RunT", bound=RunOptions)


def plan_part(plan: PlanT, run: RunOptions, asked_by: str = "--part") -> PlanT:
    """Returns the part of a plan that `run.part` names; without it, the plan as it is.

    Errors name the option `asked_by`.
    """
    if run.part is None:
        return plan
    if isinstance(plan, DiffusersPlan):
        raise PlanError(
            f"{plan.source}: {asked_by} takes the components of a diffusers pipeline one by "
            f"one: --subfolder NAME, into OUT/NAME"
        )
    _require_divisible(plan, run, asked_by)
    number, _, count = run.part.partition("/")
    shards = plan.whole.shards
    mine = _share(shards, int(number), int(count))
    notes = plan.notes
    if not mine:
        notes = (
            *notes,
            f"part {int(number):,} of {int(count):,} has nothing to do: {len(shards):,} files make "
            f"at most {len(shards):,} parts; --max-shard-size makes more of them",
        )
    part = Part(run.part, plan.whole)
    return replace(plan, output=replace(plan.whole, shards=mine), part=part, notes=notes)


def in_parts(plan: WritingPlan | DiffusersPlan, run: RunT, out: Path) -> RunT:
    """Lets a run of a whole plan make all that is missing in a folder that parts have begun."""
    is_whole = isinstance(plan, WritingPlan) and plan.part is None and run.part is None
    if not is_whole or run.overwrite or run.is_spread or not is_filled_in_parts(out):
        return run
    return replace(run, part="1/1")


def _require_divisible(plan: WritingPlan, run: RunOptions, asked_by: str) -> None:
    """Raises a PlanError for options with which a plan cannot be carried out in parts."""
    if run.overwrite:
        raise PlanError(
            f"{asked_by} does not go with --overwrite, which would delete what other parts make; "
            f"remove OUT before they start"
        )
    if not isinstance(plan.options, QuantizeOptions):
        return
    if plan.options.push_to_hub is not None:
        raise PlanError(
            "--push-to-hub does not go with --part, --ray or several GPUs: push what is made of "
            "all parts"
        )
    if plan.options.calibrate is not None:
        raise PlanError(
            f"{asked_by} does not go with --calibrate: what goes into a block comes from all "
            f"blocks before it, so one process on one device calibrates them all"
        )


def _share(shards: Sequence[Shard], number: int, count: int) -> tuple[Shard, ...]:
    """Returns the shards of a part, which are neighbours, and about as many bytes as others make.

    If there are more parts than shards, the last parts make none.
    """
    count = min(count, len(shards))
    work = [shard.largest_size + shard.source_bytes for shard in shards]
    total = sum(work)
    mine = []
    for shard, size, end in zip(shards, work, accumulate(work), strict=True):
        middle = end - size // 2
        if count * middle // total == number - 1:
            mine.append(shard)
    return tuple(mine)
