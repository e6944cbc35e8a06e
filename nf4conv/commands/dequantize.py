"""`nf4conv dequantize`: turns a quantized checkpoint or diffusers pipeline into a plain one."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from nf4conv.choose.wishes import unmatched
from nf4conv.commands.pipelines import open_unchanged, write_submodels
from nf4conv.declaring import after_two_places, narrowed
from nf4conv.errors import DiffusersFolderError, PlanError, SourceError
from nf4conv.format.units import size
from nf4conv.options import DequantizeOptions, RunOptions, SourceOptions
from nf4conv.plan import dequantization
from nf4conv.plan.dequantization import DequantizationPlan
from nf4conv.plan.diffusers import DiffusersPlan, for_submodel, is_included
from nf4conv.plan.parts import in_parts, plan_part
from nf4conv.report.loading import loading_of_plan
from nf4conv.report.results import DequantizeReport, VerificationSummary
from nf4conv.run.checkpoint import Written, ignore, require_apart, write_checkpoint
from nf4conv.run.earlier import found_or_written
from nf4conv.run.parts import finish_without_source
from nf4conv.run.scales import check_scales
from nf4conv.sources.adapters.merging import open_merged
from nf4conv.sources.diffusers import DiffusersFolder, open_diffusers
from nf4conv.sources.opening import open_readable
from nf4conv.system.garbage import uncollected

_log: Final = logging.getLogger(__name__)

AnyDequantizationPlan: TypeAlias = DequantizationPlan | DiffusersPlan[DequantizationPlan]
"""Plan of one checkpoint, or of a diffusers pipeline."""


@after_two_places(DequantizeOptions)
def dequantize(source: str | Path, out: str | Path, options: DequantizeOptions) -> DequantizeReport:
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
        plan = plan_dequantization(source, options, narrowed(options, SourceOptions))
    except SourceError:
        finished = decoded_without_source(out, options)
        if finished is None:
            raise
        return finished
    return execute_dequantization(plan, out, narrowed(options, RunOptions), options.progress)


def decoded_without_source(out: str | Path, options: DequantizeOptions) -> DequantizeReport | None:
    """Makes a folder whole whose shards have all been made by parts, with the same options.

    Returns:
        A report of what is there; None if shards are missing, or parts make something else.

    Raises:
        OutputError: a shard is not what was written, or a file cannot be written.
    """
    found = finish_without_source(Path(out), "dequantize", options)
    if found is None:
        return None
    run, totals = found
    return DequantizeReport(run, totals["decoded"])


def plan_dequantization(
    source: str | Path, options: DequantizeOptions | None = None, where: SourceOptions | None = None
) -> AnyDequantizationPlan:
    """Plans a checkpoint, or each submodel of a diffusers pipeline, from headers and config alone.

    In globs for a pipeline, the name of a submodel and a slash may stand first.
    """
    started = time.perf_counter()
    options = options or DequantizeOptions()
    try:
        plan = plan_checkpoint(source, options, where)
    except DiffusersFolderError:
        pipeline = _plan_pipeline(source, open_diffusers(source, where), options)
        _log_plan(pipeline, started)
        return pipeline
    notes = (*plan.notes, *unmatched(options, [("", plan.source)]))
    again = partial(plan_dequantization, source, replace(options, progress=None), where)
    _log_plan(plan, started)
    return replace(plan, notes=notes, again=again)


def _log_plan(plan: AnyDequantizationPlan, started: float) -> None:
    """Logs what was planned, and how long it took since `started` (time.perf_counter)."""
    seconds = time.perf_counter() - started
    totals = plan.totals()
    _log.info(
        "planned %d tensors in %.1f s: %d decoded, %d kept; %d files, %s",
        totals.decoded + totals.copied,
        seconds,
        totals.decoded,
        totals.copied,
        totals.shards,
        size(totals.bytes_after),
    )


@uncollected()
def plan_checkpoint(
    source: str | Path, options: DequantizeOptions, where: SourceOptions | None
) -> DequantizationPlan:
    """Plans one checkpoint.

    Args:
        source: a folder, a .safetensors file, or "org/name" on the Hugging Face Hub.
        options: what to make of the checkpoint.
        where: revision, subfolder and the like of the source.

    Raises:
        DiffusersFolderError: the source is a diffusers pipeline.
        SourceError: the source cannot be read.
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
        submodels[name] = plan_submodel(folder, name, options, place)
    parts = [(name, part.source) for name, part in submodels.items()]
    plan = DiffusersPlan(folder, submodels, complaints=tuple(unmatched(options, parts)))
    if not plan.totals().decoded:
        raise PlanError(
            f"{source}: no submodel of this diffusers pipeline has a quantized weight to decode"
        )
    return plan


def plan_submodel(
    folder: DiffusersFolder, name: str, options: DequantizeOptions, where: SourceOptions
) -> DequantizationPlan:
    """Plans a submodel of a pipeline; keeps its tensors as they are if nothing in it is decoded.

    Args:
        folder: the pipeline.
        name: the submodel.
        options: what to make of the pipeline.
        where: the subfolder of the submodel, and the like.

    Raises:
        SourceError: the submodel cannot be read.
        PlanError: the request cannot be met for it.
    """
    mine = for_submodel(name, options)
    opened = open_readable(folder.place, where)
    if is_included(name, options) and dequantization.has_wanted_weights(opened, mine):
        return plan_checkpoint(folder.place, mine, where)
    return dequantization.plan_unchanged_submodel(open_unchanged(folder, name, where), mine)


def execute_dequantization(
    plan: AnyDequantizationPlan,
    out: str | Path,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> DequantizeReport:
    """Carries out a plan, in as many processes as `run` says."""
    started = time.perf_counter()
    run = run or RunOptions()
    progress = progress or ignore
    out = Path(out)
    run = in_parts(plan, run, out)
    plan = plan_part(plan, run)
    if run.is_spread:
        from nf4conv.commands.spread.carry_out import carry_out  # few runs need to import it

        return carry_out(plan, execute_dequantization, out, run, progress)
    if isinstance(plan, DequantizationPlan):
        report = _write_one(plan, out, run, progress)
    else:
        require_apart(plan.folder.folder, out)
        report = write_submodels(
            plan, out, run, progress, write=_write_one, join=partial(_joined, plan), card=_no_card
        )
    return replace(report, run=replace(report.run, seconds=time.perf_counter() - started))


def _write_one(
    plan: DequantizationPlan, out: Path, run: RunOptions, progress: Callable[[int], None]
) -> DequantizeReport:
    """Carries out the plan of one checkpoint."""
    write = partial(_decode, plan, out, run, progress)
    written = found_or_written(plan, out, run, progress, write)
    return DequantizeReport(written.report, plan.totals().decoded)


def _decode(
    plan: DequantizationPlan, out: Path, run: RunOptions, progress: Callable[[int], None]
) -> Written:
    """Looks at the scales of all weights, and writes the checkpoint."""
    check_scales(list(plan.output.jobs), plan.source, run)
    return write_checkpoint(plan, out, run, progress, partial(_card, plan))


def _card(
    plan: DequantizationPlan,
    bytes_after: int,  # noqa: ARG001 - a card in 16 bits has no figures
    verified: VerificationSummary | None,  # noqa: ARG001
) -> str | None:
    """Writes the model card of a merged model; None for any other."""
    if not plan.source.adapters:
        return None
    from nf4conv.report.card import merged_card  # importing a reader of YAML takes a moment

    return merged_card(plan, loading_of_plan(plan))


def _no_card(report: DequantizeReport) -> None:
    """Stands for the card of a diffusers pipeline that is decoded, which gets none."""


def _joined(
    plan: DiffusersPlan[DequantizationPlan],
    report: DequantizeReport,
    reports: Sequence[DequantizeReport],  # noqa: ARG001 - those of the submodels add nothing
) -> DequantizeReport:
    """Adds what only a dequantization reports to the joined report of all submodels."""
    return replace(report, decoded=plan.totals().decoded)
