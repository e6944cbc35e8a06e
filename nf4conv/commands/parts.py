"""`--part`: which shards of a plan a process makes, by its own number or by what a scheduler tells
it.
"""

import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Final

from nf4conv.commands.diffusers import DiffusersPlan
from nf4conv.commands.output import Part
from nf4conv.errors import PlanError
from nf4conv.options import RunOptions
from nf4conv.plan.jobs import Shard, source_files

_COUNT: Final = "NF4CONV_PARTS"
_INDICES: Final = {
    "SLURM_ARRAY_TASK_ID": ("SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    "JOB_COMPLETION_INDEX": (_COUNT, None),
    "RANK": ("WORLD_SIZE", None),
}
"""What may be set to the index of a process, to how many there are, and to the first index; of
several the first.
"""


def plan_part(plan: Any, run: RunOptions, asked_by: str = "--part") -> Any:
    """The part of a quantization's or dequantization's plan that `run.part` names; all of it if
    none is named.

    A PlanError if there is no such part, or if such a plan cannot be carried out in parts, as an
    option `asked_by`.
    """
    if run.part is None:
        return plan
    if isinstance(plan, DiffusersPlan):
        how = f"{asked_by} takes the components of a diffusers pipeline one by one: --subfolder NAME, into OUT/NAME"
        raise PlanError(f"{plan.folder.place}: {how}")
    for what, is_given in {
        "--overwrite, which would delete what other parts make; remove OUT before they start": run.overwrite,
        "--single-file: one file has no parts": getattr(plan.options, "single_file", False),
        "--non-finite keep: each part would read all weights first; name those to be kept with "
        "--exclude": (getattr(plan.options, "non_finite", None) == "keep"),
    }.items():
        if is_given:
            raise PlanError(f"{asked_by} does not go with {what}")
    number, count = number_of(run.part)
    shares = _shares(plan.whole.shards, count)
    mine = tuple(shard for shard in plan.whole.shards if shares[shard.name] == number)
    part = Part(f"{number}/{count}", count, shares, plan.whole)
    return replace(plan, output=replace(plan.whole, shards=mine), part=part)


def number_of(part: str) -> tuple[int, int]:
    """The number of a part, from 1 on, and of all parts: those of "2/3", or for "auto" those of the
    environment.

    A PlanError if the one does not fit the other, or there is none.
    """
    if part == "auto":
        return _from_environment()
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", part)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise PlanError(f"--part {part}: expected auto, or I/N with I from 1 to N, such as 2/3")
    return int(match[1]), int(match[2])


def _from_environment() -> tuple[int, int]:
    name = next((name for name in _INDICES if name in os.environ), None)
    if name is None:
        raise PlanError(f"--part auto: none of {', '.join(_INDICES)} is set; give --part I/N")
    counted, first = _INDICES[name]
    index, count = _number(name), _number(_COUNT if _COUNT in os.environ else counted)
    # an array of some of the parts, to run these again: indices then count from 0, whatever its
    # first one is
    if first is not None and _number(counted) == count:
        index -= _number(first)
    if not 0 <= index < count:
        raise PlanError(f"--part auto: {name} is {os.environ[name]}, which fits no {count:,} parts")
    return index + 1, count


def _number(variable: str) -> int:
    text = os.environ.get(variable, "not set")
    if not re.fullmatch(r"\d{1,9}", text):
        raise PlanError(
            f"--part auto: {variable} is {text[:40]}, which is no number; give --part I/N"
        )
    return int(text)


def _shares(shards: Sequence[Shard], count: int) -> dict[str, int]:
    """Which part makes each shard: neighbours, about as many bytes for each part, and rather not
    two of one file.
    """
    ends = [
        *accumulate(
            shard.largest_size + sum([job.source_bytes for job in shard.jobs]) for shard in shards
        )
    ]
    files = [source_files([shard]) for shard in shards]
    # a cut through a file costs as much as an eighth of a share that is too large or too small
    costs = [ends[-1] // 8 * bool(left & right) for left, right in pairwise(files)]
    cuts = []
    for part in range(1, count):
        found = [
            abs(count * end - part * ends[-1]) + cost
            for end, cost in zip(ends, costs, strict=False)
        ]
        cuts.append(found.index(min(found)) if found else 0)
    return {shard.name: 1 + bisect_left(sorted(cuts), place) for place, shard in enumerate(shards)}
