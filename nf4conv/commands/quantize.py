"""`nf4conv quantize`: packs a checkpoint or a diffusers pipeline into bitsandbytes' 4 bits."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from nf4conv.choose.wishes import unmatched
from nf4conv.commands.quantize_checkpoint import execute_one, plan_checkpoint
from nf4conv.declaring import after_one_place, after_two_places, narrowed
from nf4conv.errors import DiffusersFolderError, PlanError, SourceError
from nf4conv.format.units import size
from nf4conv.options import PushOptions, QuantizeOptions, RunOptions, SourceOptions
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.parts import in_parts, plan_part
from nf4conv.plan.quantization import QuantizationPlan, require_searched
from nf4conv.plan.rows import PlanTotals, TensorRow
from nf4conv.report.advice import advice
from nf4conv.report.loading import gpu_bytes
from nf4conv.report.results import QuantizeReport
from nf4conv.run.checkpoint import ignore
from nf4conv.run.parts import finish_without_source

if TYPE_CHECKING:
    pass

_log: Final = logging.getLogger(__name__)

AnyQuantizationPlan: TypeAlias = QuantizationPlan | DiffusersPlan[QuantizationPlan]
"""Plan of one checkpoint, or of a diffusers pipeline."""


@after_two_places(QuantizeOptions)
def quantize(source: str | Path, out: str | Path, options: QuantizeOptions) -> QuantizeReport:
    """Quantizes a checkpoint to 4 bits; in a diffusers pipeline, each submodel by its own rules.

    A run that was interrupted goes on where it stopped: run it again with the same arguments.

    Example:
        >>> report = nf4conv.quantize("./Llama-3.1-8B", "./Llama-3.1-8B-nf4", verify=True)
        >>> print(report.packed, "weights,", report.bits_per_parameter, "bits per parameter")

    Args:
        source: a folder, a .safetensors file, a torch pickle, or "org/name" on the Hugging Face
            Hub.
        out: the folder to write. It must be empty, or hold an interrupted run of the same plan.

    Returns:
        What was packed and kept, sizes, times and memory.

    Raises:
        SourceError: the source cannot be read.
        OptionError: an option has a value that it cannot have.
        PlanError: the request cannot be met for this source.
        OutputError: `out` cannot be written. After this and any other error, `out` does not look
            like a finished checkpoint.
        VerificationError: with `verify`, what was written is not what it should be.
    """
    where = narrowed(options, SourceOptions)
    push = narrowed(options, PushOptions)
    try:
        plan = plan_quantization(source, options, where, push)
    except SourceError:
        finished = quantized_without_source(out, options)
        if finished is None:
            raise
        return finished
    run = narrowed(options, RunOptions)
    return execute_quantization(plan, out, run, options.progress, push)


@dataclass(frozen=True)
class Plan:
    """Says what quantizing a checkpoint would do, and does it.

    Attributes:
        made: the plan of the checkpoint, or of each submodel of a diffusers pipeline.
        options: those that `execute` goes by.
    """

    made: AnyQuantizationPlan
    options: QuantizeOptions

    @property
    def rows(self) -> tuple[TensorRow, ...]:
        """Says what becomes of each tensor, and why."""
        return tuple(self.made.rows())

    @property
    def totals(self) -> PlanTotals:
        """Counts tensors, parameters, bytes and files."""
        return self.made.totals()

    def execute(self, out: str | Path) -> QuantizeReport:
        """Carries the plan out. Arguments, results and errors are those of `quantize`."""
        run = narrowed(self.options, RunOptions)
        push = narrowed(self.options, PushOptions)
        return execute_quantization(self.made, out, run, self.options.progress, push)


@after_one_place(QuantizeOptions)
def plan_quantize(source: str | Path, options: QuantizeOptions) -> Plan:
    """Decides everything about a quantization from headers and config alone.

    No weight is read, and torch is not imported.

    Example:
        >>> plan = nf4conv.plan_quantize("./Llama-3.1-8B", blocksize=128)
        >>> print(plan.totals.bits_per_parameter)
        >>> plan.execute("./Llama-3.1-8B-nf4")

    Args:
        source: a folder, a .safetensors file, a torch pickle, or "org/name" on the Hugging Face
            Hub.

    Returns:
        What becomes of each tensor; `execute` writes it.

    Raises:
        SourceError: the source cannot be read.
        OptionError: an option has a value that it cannot have.
        PlanError: the request cannot be met for this source.
    """
    where = narrowed(options, SourceOptions)
    push = narrowed(options, PushOptions)
    made = plan_part(plan_quantization(source, options, where, push), narrowed(options, RunOptions))
    return Plan(made, options)


def quantized_without_source(out: str | Path, options: QuantizeOptions) -> QuantizeReport | None:
    """Makes a folder whole whose shards have all been made by parts, with the same options.

    Returns:
        A report of what is there; None if shards are missing, or parts make something else.

    Raises:
        OutputError: a shard is not what was written, or a file cannot be written.
    """
    found = finish_without_source(Path(out), "quantize", options)
    if found is None:
        return None
    run, totals = found
    return QuantizeReport(
        run=run,
        packed=totals["packed"],
        stay=totals["stay"],
        parameters=totals["parameters"],
        bits_per_parameter=8 * run.bytes_after / max(totals["parameters"], 1),
        gpu_bytes=gpu_bytes(run.bytes_after),
        loading="",
        install="",
        push="",
        advice="",
    )


def plan_quantization(
    source: str | Path,
    options: QuantizeOptions | None = None,
    where: SourceOptions | None = None,
    push: PushOptions | None = None,
) -> AnyQuantizationPlan:
    """Plans a checkpoint, or each submodel of a diffusers pipeline, from headers and config alone.

    In globs for a pipeline, the name of a submodel and a slash may stand first. If the result is to
    be pushed, experts stay in 16 bits unless `options` says otherwise, so that everybody can load
    them.
    """
    started = time.perf_counter()
    options = options or QuantizeOptions()
    is_public = push is not None and push.push_to_hub is not None
    try:
        plan = plan_checkpoint(source, options, where, is_public=is_public)
    except DiffusersFolderError as error:
        if options.calibrate is not None:
            raise PlanError(
                f"{source}: --calibrate is for models of transformers, one at a time: for a text "
                f"encoder --subfolder text_encoder; --scales search needs no text"
            ) from error
        from nf4conv.commands import quantize_pipeline  # few runs need to import it
        from nf4conv.sources.diffusers import open_diffusers  # few runs need to import it

        folder = open_diffusers(source, where)
        whole = quantize_pipeline.plan_pipeline(folder, options, is_public=is_public)
        _log_plan(whole, started)
        return replace(whole, complaints=(*whole.complaints, *_little_saved(whole)))
    require_searched(source, [plan])
    without_token = None if push is None else replace(push, token=None)
    notes = (*_little_saved(plan), *plan.notes, *unmatched(options, [("", plan.source)]))
    again = partial(
        plan_quantization, source, replace(options, progress=None), where, without_token
    )
    _log_plan(plan, started)
    return replace(plan, notes=notes, again=again)


def _log_plan(plan: AnyQuantizationPlan, started: float) -> None:
    """Logs what was planned, and how long it took since `started` (time.perf_counter)."""
    seconds = time.perf_counter() - started
    totals = plan.totals()
    tensors = totals.packed + totals.copied
    _log.info(
        "planned %d tensors in %.1f s: %d packed, %d of them as they are, %d kept; %d files, %s",
        tensors,
        seconds,
        totals.packed,
        totals.stay,
        totals.copied,
        totals.shards,
        size(totals.bytes_after),
    )


def _little_saved(plan: AnyQuantizationPlan) -> Iterator[str]:
    """Yields a line if the result will be little smaller than the source."""
    totals = plan.totals()
    if 3 * totals.bytes_after <= 2 * totals.bytes_before:
        return
    line = advice(plan.jobs)
    if line:
        yield line


def execute_quantization(
    plan: AnyQuantizationPlan,
    out: str | Path,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    push: PushOptions | None = None,
) -> QuantizeReport:
    """Carries out a plan, in as many processes as `run` says."""
    started = time.perf_counter()
    run = run or RunOptions()
    progress = progress or ignore
    out = Path(out)
    run = in_parts(plan, run, out)
    is_pushed = push is not None and push.push_to_hub is not None
    if run.part is not None and is_pushed:
        raise PlanError(
            "--push-to-hub does not go with --part, --ray or several GPUs: push what is made of "
            "all parts"
        )
    plan = plan_part(plan, run)
    if run.is_spread:
        from nf4conv.commands.spread.carry_out import carry_out  # few runs need to import it

        return carry_out(plan, partial(execute_quantization, push=push), out, run, progress)
    if isinstance(plan, QuantizationPlan):
        report = execute_one(plan, out, run, progress, push)
    else:
        from nf4conv.commands import quantize_pipeline  # few runs need to import it

        report = quantize_pipeline.execute_pipeline(plan, out, run, progress, push)
    return replace(report, run=replace(report.run, seconds=time.perf_counter() - started))
