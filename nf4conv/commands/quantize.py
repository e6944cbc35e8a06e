"""`nf4conv quantize`: packs a checkpoint or a diffusers pipeline into bitsandbytes' 4 bits."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from nf4conv.choose.wishes import unmatched
from nf4conv.commands.quantizing.checkpoint import execute_one, plan_checkpoint
from nf4conv.declaring import after_two_places, narrowed
from nf4conv.errors import DiffusersFolderError, PlanError, SourceError
from nf4conv.format.units import size
from nf4conv.options import PushOptions, QuantizeOptions, RunOptions, SourceOptions
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.parts import in_parts, plan_part
from nf4conv.plan.quantization import QuantizationPlan, require_searched
from nf4conv.report.advice import little_saved
from nf4conv.report.loading import gpu_bytes
from nf4conv.report.results.runs import QuantizeReport
from nf4conv.run.checkpoint import ignore
from nf4conv.run.parts import finish_without_source

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
    return quantize_checkpoint(
        source,
        out,
        options,
        narrowed(options, RunOptions),
        options.progress,
        narrowed(options, SourceOptions),
        narrowed(options, PushOptions),
    )


def quantize_checkpoint(
    source: str | Path,
    out: str | Path,
    options: QuantizeOptions | None = None,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    where: SourceOptions | None = None,
    push: PushOptions | None = None,
) -> QuantizeReport:
    """Quantizes a checkpoint to 4 bits; in a diffusers pipeline, each submodel by its own rules.

    A run that was interrupted goes on where it stopped: run it again with the same arguments. It
    keeps the shards that are finished, and ends in the same bytes.

    Args:
        source: a folder, a .safetensors file, a torch pickle, or "org/name" on the Hugging Face
            Hub.
        out: the folder to write. It must be empty, or hold an interrupted run of the same plan.
        options: what to make of the checkpoint; None for the defaults.
        run: how to use the machine; None for the defaults.
        progress: is called with the number of source bytes that have been read since the last
            call, from any thread.
        where: revision, subfolder and the like of the source; None for the defaults.
        push: a repository on the Hub to upload the result to; None to upload nothing.

    Returns:
        What was packed and kept, sizes, times and memory.

    Raises:
        SourceError: the source cannot be read.
        PlanError: the request cannot be met for this source.
        OutputError: `out` cannot be written. After this and any other error, `out` does not look
            like a finished checkpoint.
        VerificationError: with `run.verify`, what was written is not what it should be.

    Example:
        >>> report = nf4conv.quantize_checkpoint("./Llama-3.1-8B", "./Llama-3.1-8B-nf4")
        >>> print(report.bits_per_parameter)
    """
    try:
        plan = plan_quantization(source, options, where, push)
    except SourceError:
        finished = _quantized_without_source(out, options or QuantizeOptions())
        if finished is None:
            raise
        return finished
    return execute_quantization(plan, out, run, progress, push)


def _quantized_without_source(out: str | Path, options: QuantizeOptions) -> QuantizeReport | None:
    """Makes a folder whole whose shards have all been made by parts, with the same options.

    Returns:
        What is there; None if shards are missing, or parts make something else.

    Raises:
        OutputError: a shard is not what was written, or a file cannot be written.
    """
    found = finish_without_source(Path(out), "quantize", options)
    if found is None:
        return None
    run, totals = found
    return QuantizeReport.of_run(
        run,
        packed=totals["packed"],
        stay=totals["stay"],
        parameters=totals["parameters"],
        bits_per_parameter=8 * run.bytes_after / max(totals["parameters"], 1),
        gpu_bytes=gpu_bytes(run.bytes_after),
        loading="",
        install="",
        push="",
        advice="",
        verification=None,
    )


def plan_quantization(
    source: str | Path,
    options: QuantizeOptions | None = None,
    where: SourceOptions | None = None,
    push: PushOptions | None = None,
) -> AnyQuantizationPlan:
    """Decides everything about a quantization from headers and config alone.

    No weight is read, and torch is not imported.

    Args:
        source: a folder, a .safetensors file, a torch pickle, or "org/name" on the Hugging Face
            Hub.
        options: what to make of the checkpoint; None for the defaults. For a diffusers pipeline,
            globs and module names may begin with the name of a submodel and a slash, such as
            "transformer/*.attn.*". Others apply to all submodels.
        where: revision, subfolder and the like of the source; None for the defaults.
        push: where the result will be uploaded to, if at all. Experts then stay in 16 bits unless
            `options` says otherwise, so that everybody can load them.

    Returns:
        A plan for `execute_quantization`, `describe_plan` and `plan_part`.

    Raises:
        SourceError: the source cannot be read.
        PlanError: the request cannot be met for this source.

    Example:
        >>> plan = nf4conv.plan_quantization("./Llama-3.1-8B")
        >>> print(plan.totals().bits_per_parameter)
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
        from nf4conv.commands.quantizing import pipeline  # few runs need to import it
        from nf4conv.sources.diffusers.folder import open_diffusers  # few runs need to import it

        folder = open_diffusers(source, where)
        whole = pipeline.plan_pipeline(folder, options, is_public=is_public)
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
        return  # so most plans make no rows before the run
    line = little_saved(plan.rows())
    if line:
        yield line


def execute_quantization(
    plan: AnyQuantizationPlan,
    out: str | Path,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    push: PushOptions | None = None,
) -> QuantizeReport:
    """Carries out a plan.

    Args:
        plan: plan of `plan_quantization`.
        out: the folder to write. It must be empty, or hold an interrupted run of the same plan.
        run: how to use the machine; None for the defaults.
        progress: is called with the number of source bytes that have been read since the last
            call, from any thread.
        push: a repository on the Hub to upload the result to; None to upload nothing.

    Returns:
        What was packed and kept, sizes, times and memory.

    Raises:
        SourceError: the source cannot be read, or has changed since it was planned.
        PlanError: the run cannot be carried out as asked.
        OutputError: `out` cannot be written. After this and any other error, `out` does not look
            like a finished checkpoint.
        VerificationError: with `run.verify`, what was written is not what it should be.

    Example:
        >>> plan = nf4conv.plan_quantization("./Llama-3.1-8B")
        >>> nf4conv.execute_quantization(plan, "./Llama-3.1-8B-nf4").packed
        224
    """
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
        from nf4conv.commands.quantizing import pipeline  # few runs need to import it

        report = pipeline.execute_pipeline(plan, out, run, progress, push)
    return replace(report, seconds=time.perf_counter() - started)
