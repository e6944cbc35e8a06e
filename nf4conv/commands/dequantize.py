"""`nf4conv dequantize`: turns a quantized checkpoint or diffusers pipeline into a plain one."""

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from nf4conv.commands.writing import (
    describe,
    tell_what_is_read,
    write_submodels,
)
from nf4conv.declaring import after_two_places
from nf4conv.errors import DiffusersFolderError, PlanError, SourceError
from nf4conv.format.units import size
from nf4conv.options import DequantizeOptions, SourceOptions
from nf4conv.plan import dequantization
from nf4conv.plan.dequantization import DequantizationPlan
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.parts import in_parts, plan_part
from nf4conv.report.results import PlanReport, RunReport
from nf4conv.run.checkpoint import ignore, require_apart, write_checkpoint
from nf4conv.run.earlier import found_or_written
from nf4conv.run.parts import finish_without_source
from nf4conv.run.tasks.scan import check_scales
from nf4conv.sources.adapters.merging import open_merged
from nf4conv.sources.diffusers import DiffusersFolder, open_diffusers
from nf4conv.sources.opening import open_readable
from nf4conv.system.machine import uncollected

_log: Final = logging.getLogger(__name__)

AnyPlan: TypeAlias = DequantizationPlan | DiffusersPlan[DequantizationPlan]
"""Plan of one checkpoint, or of a diffusers pipeline."""


@after_two_places(DequantizeOptions)
def dequantize(source: str | Path, out: str | Path, options: DequantizeOptions) -> RunReport:
    """Decodes a 4-bit checkpoint or diffusers pipeline, exactly as bitsandbytes' CUDA library does.

    A run that was interrupted goes on where it stopped: run it again with the same arguments.

    Example:
        >>> nf4conv.dequantize("./Llama-3.1-8B-nf4", "./Llama-3.1-8B-again", dtype="float16")

    Args:
        source: a folder, a .safetensors file, or "org/name" on the Hugging Face Hub.
        out: the folder to write. It must be empty, or hold an interrupted run of the same plan.

    Returns:
        What was decoded and kept, sizes, times and memory.

    Raises:
        SourceError: the source cannot be read.
        OptionError: an option has a value that it cannot have.
        PlanError: the request cannot be met for this source.
        OutputError: `out` cannot be written. After this and any other error, `out` does not look
            like a finished checkpoint.
    """
    try:
        plan = make_plan(source, options)
    except SourceError:
        # it is not needed if parts have made all files
        found = finish_without_source(Path(out), "dequantize", options)
        if found is None:
            raise
        return found
    return execute(plan, Path(out), options)


def dry_run(source: str | Path, options: DequantizeOptions) -> PlanReport:
    """Describes what decoding a checkpoint would do."""
    return describe(plan_part(make_plan(source, options), options))


def make_plan(source: str | Path, options: DequantizeOptions) -> AnyPlan:
    """Plans a checkpoint, or each submodel of a diffusers pipeline, from headers and config alone.

    In globs for a pipeline, the name of a submodel and a slash may stand first.
    """
    started = time.perf_counter()
    plan: AnyPlan
    try:
        plan = plan_checkpoint(source, options, options)
    except DiffusersFolderError:
        plan = _plan_pipeline(source, open_diffusers(source, options), options)
    else:
        plan = replace(plan, again=partial(make_plan, source, replace(options, progress=None)))
    totals = plan.totals()
    _log.info(
        "planned %d tensors in %.1f s: %d decoded, %d kept; %d files, %s",
        totals.decoded + totals.copied,
        time.perf_counter() - started,
        totals.decoded,
        totals.copied,
        totals.shards,
        size(totals.bytes_after),
    )
    return plan


@uncollected()
def plan_checkpoint(
    source: str | Path, options: DequantizeOptions, where: SourceOptions
) -> DequantizationPlan:
    """Plans one checkpoint, or a submodel that is `where` in a pipeline.

    Raises:
        DiffusersFolderError: the source is a diffusers pipeline.
        PlanError: nothing in the source is quantized, or the request cannot be met for it.
    """
    opened = open_merged(source, where, options.lora)
    plan = dequantization.plan_source(source, opened, options)
    if not options.lora:
        return plan  # it gets no card, because its original's card says all there is
    from nf4conv.report.card import card_of  # importing YAML takes a moment

    front, complaints = card_of(opened)
    return replace(plan, front=front, notes=(*plan.notes, *complaints))


def _plan_pipeline(
    source: str | Path, folder: DiffusersFolder, options: DequantizeOptions
) -> DiffusersPlan[DequantizationPlan]:
    """Plans a diffusers pipeline; raises a PlanError if nothing in it is quantized."""
    submodels = {}
    for name, place in folder.submodels.items():
        submodels[name] = plan_submodel(folder, options, place)
    plan = DiffusersPlan(folder, submodels)
    if not plan.totals().decoded:
        raise PlanError(
            f"{source}: no submodel of this diffusers pipeline has a quantized weight to decode"
        )
    return plan


def plan_submodel(
    folder: DiffusersFolder, options: DequantizeOptions, where: SourceOptions
) -> DequantizationPlan:
    """Plans a submodel; keeps its tensors as they are if nothing in it is decoded."""
    opened = open_readable(folder.place, where)
    if any(tensor.is_quantized for tensor in opened.tensors):
        return plan_checkpoint(folder.place, options, where)
    return dequantization.plan_unchanged_submodel(opened, options)


def execute(plan: AnyPlan, out: Path, options: DequantizeOptions) -> RunReport:
    """Carries out a plan, in as many processes as the options say."""
    started = time.perf_counter()
    options = in_parts(plan, options, out)
    if options.is_spread:
        from nf4conv.commands.spread import carry_out  # few runs need to import it

        return carry_out(plan, execute, out, options)
    plan = plan_part(plan, options)
    tell_what_is_read(plan, options)
    if isinstance(plan, DequantizationPlan):
        report = _write_one(plan, out, options)
    else:
        require_apart(plan.folder.folder, out)
        report = write_submodels(plan, out, options, _write_one)
    return replace(report, seconds=time.perf_counter() - started)


def _write_one(plan: DequantizationPlan, out: Path, options: DequantizeOptions) -> RunReport:
    """Carries out the plan of one checkpoint."""
    progress = options.progress or ignore

    def write() -> RunReport:
        check_scales(list(plan.output.jobs), plan.source, options)
        return write_checkpoint(plan, out, options, progress, partial(_card, plan))

    return found_or_written(plan, out, options, progress, write)


def _card(plan: DequantizationPlan, *_figures: object) -> str | None:
    """Writes the model card of a merged model; None for any other."""
    if not plan.source.adapters:
        return None
    from nf4conv.report.card import merged_card  # importing YAML takes a moment

    return merged_card(plan)
