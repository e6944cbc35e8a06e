"""`nf4conv dequantize`: a 4-bit bitsandbytes checkpoint or diffusers pipeline in, a plain one out."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from nf4conv.checkpoint.diffusers_folder import open_diffusers
from nf4conv.checkpoint.selection import unmatched
from nf4conv.commands.diffusers import DiffusersPlan, for_submodel, is_included, write_submodels
from nf4conv.commands.output import check_apart, ignore
from nf4conv.commands.parts import plan_part
from nf4conv.commands.single.dequantize import DequantizationPlan, plan_one, plan_submodel, write_one
from nf4conv.commands.spread import carry_out, is_spread
from nf4conv.errors import DiffusersFolderError, PlanError
from nf4conv.options import DequantizeOptions, RunOptions, SourceOptions
from nf4conv.report.results import DequantizeReport

AnyDequantizationPlan: TypeAlias = DequantizationPlan | DiffusersPlan[DequantizationPlan]
"""Of one checkpoint, or of a diffusers pipeline."""


def dequantize_checkpoint(
    source: str | Path,
    out: str | Path,
    options: DequantizeOptions | None = None,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    where: SourceOptions | None = None,
) -> DequantizeReport:
    """Decode a 4-bit checkpoint, value for value as bitsandbytes' CUDA library does; a diffusers pipeline, too.

    A rerun after an interruption keeps the shards that are finished and ends in the same bytes.

    Args:
        source: a folder, a .safetensors file, or "org/name" on the Hugging Face Hub.
        out: the folder to write; it must be empty, or hold an interrupted run with the same plan.
        options: what to make of the checkpoint.
        run: how to use the machine.
        progress: told how many more source bytes have been read, from any thread.
        where: revision, subfolder and the like.

    Raises:
        SourceError, PlanError: the source cannot be read, or the request cannot be met for it.
        OutputError: `out` cannot be written; as after any error, it does not look like a finished checkpoint.
    """
    return execute_dequantization(plan_dequantization(source, options, where), out, run, progress)


def plan_dequantization(
    source: str | Path, options: DequantizeOptions | None = None, where: SourceOptions | None = None
) -> AnyDequantizationPlan:
    """Decide everything about a dequantization from headers, quant states and config; torch is not imported.

    Arguments and errors as `dequantize_checkpoint`; a source in which nothing is in 4 bits is a PlanError. Globs for a
    diffusers pipeline may begin with the name of a submodel and a slash.
    """
    options = options or DequantizeOptions()
    try:
        single = plan_one(source, options, where)
        again = partial(plan_dequantization, source, options, where)
        return replace(single, notes=(*single.notes, *unmatched(options, [("", single.source)])), again=again)
    except DiffusersFolderError:
        folder = open_diffusers(source, where)
    submodels = {
        name: plan_submodel(folder.place, for_submodel(name, options), place, decode=is_included(name, options))
        for name, place in folder.submodels.items()
    }
    parts = [(name, part.source) for name, part in submodels.items()]
    plan = DiffusersPlan(folder, submodels, complaints=tuple(unmatched(options, parts)))
    if not plan.totals().decoded:
        raise PlanError(f"{source}: no submodel of this diffusers pipeline has a weight in 4 bits to decode")
    return plan


def execute_dequantization(
    plan: AnyDequantizationPlan,
    out: str | Path,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> DequantizeReport:
    """Carry out a plan; arguments, result and errors as `dequantize_checkpoint`."""
    started = time.perf_counter()
    run, progress, out = run or RunOptions(), progress or ignore, Path(out)
    plan = plan_part(plan, run)
    if is_spread(run):
        return carry_out(plan, execute_dequantization, out, run, progress)
    if isinstance(plan, DequantizationPlan):
        report = write_one(plan, out, run, progress)
    else:
        check_apart(plan.folder.folder, out)
        report = write_submodels(plan, out, run, progress, write_one, lambda _: None)
    return replace(report, seconds=time.perf_counter() - started)
