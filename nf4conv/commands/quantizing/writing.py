"""Writes the prepared plan of one checkpoint, or finds what an earlier run has written of it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from nf4conv.errors import SourceError, VerificationError
from nf4conv.format.dtypes import TAGS
from nf4conv.options import RunOptions, VerifyOptions
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.jobs import PackJob
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.report.advice import advice
from nf4conv.report.loading import Loading, gpu_bytes, loading_of_plan, push_command
from nf4conv.report.results.runs import QuantizeReport, RunReport
from nf4conv.report.rows.weights import VerificationSummary
from nf4conv.run.checkpoint import Written, write_checkpoint
from nf4conv.run.device.protocol import CastError, NonFiniteError
from nf4conv.run.earlier import found_or_written
from nf4conv.run.filling import Card
from nf4conv.sources.source import Source


def write_one(
    plan: QuantizationPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    announce: Callable[[str, Path], None] | None = None,
) -> QuantizeReport:
    """Carries out the prepared plan of one checkpoint.

    `announce` is told name and path of each finished shard.
    """
    card = partial(_card, plan)
    write = partial(_write, plan, out, run, progress, card, announce)
    try:
        written = found_or_written(plan, out, run, progress, write)
    except NonFiniteError as error:
        raise _describe_non_finite(error.job, plan, run) from error
    if written.report.already_complete and run.verify and plan.part is None:
        verify_again(plan, out, run, progress)
    return report_of(plan, written)


def _write(
    plan: QuantizationPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    card: Card,
    announce: Callable[[str, Path], None] | None,
) -> Written:
    """Writes a checkpoint; one that is to be calibrated is calibrated first."""
    if plan.calibration is None:
        return write_checkpoint(plan, out, run, progress, card, announce)
    made = plan.calibration.carry_out(plan, out, run, progress)
    after = replace(run, overwrite=False)
    return write_checkpoint(made, out, after, progress, card, announce)


def _card(
    plan: QuantizationPlan, bytes_after: int, verified: VerificationSummary | None
) -> str | None:
    """Writes the model card; None for a submodel."""
    if plan.is_submodel:
        return None
    from nf4conv.report.card import (
        Figures,  # importing a reader of YAML takes a moment
        model_card,  # importing a reader of YAML takes a moment
    )

    figures = Figures(_source_bytes(plan.source), bytes_after, verified)
    return model_card(plan, figures, loading_of_plan(plan), plan.options.base_model, plan.repo)


def report_of(plan: QuantizationPlan, written: Written) -> QuantizeReport:
    """Adds what a plan tells to the report of what came of it."""
    run = written.report
    if plan.part is None:
        run = replace(run, bytes_before=_source_bytes(plan.source))
    return report_of_run(plan, run, loading_of_plan(plan), written.verification)


def report_of_run(
    plan: QuantizationPlan | DiffusersPlan[QuantizationPlan],
    run: RunReport,
    loading: Loading | None,
    verification: VerificationSummary | None,
) -> QuantizeReport:
    """Adds what only a quantization reports to what every run reports.

    Args:
        plan: the plan that was carried out, of a checkpoint or of a whole diffusers pipeline.
        run: what came of it.
        loading: how the result is loaded. None if nothing says how.
        verification: what was measured. None without `--verify`.
    """
    totals = plan.totals()
    return QuantizeReport.of_run(
        run,
        packed=totals.packed,
        stay=totals.stay,
        parameters=totals.parameters,
        bits_per_parameter=8 * run.bytes_after / max(totals.parameters, 1),
        gpu_bytes=gpu_bytes(run.bytes_after),
        loading="" if loading is None else loading.code(run.out),
        install="" if loading is None else loading.install,
        push="" if plan.config is None else push_command(Path(run.out)),
        advice=advice(plan.rows()),
        verification=verification,
    )


def _source_bytes(source: Source) -> int:
    return sum(tensor.nbytes for tensor in source.tensors)


def verify_again(
    plan: QuantizationPlan, out: Path, run: RunOptions, progress: Callable[[int], None]
) -> None:
    """Compares a result that was complete before with its source, byte by byte.

    Raises:
        VerificationError: it is not what quantizing the source gives.
    """
    from nf4conv.commands.verify import verify_result  # few runs need to import it

    report = verify_result(out, plan.source, VerifyOptions(tolerance=run.tolerance), run, progress)
    for finding in report.findings:
        if finding.is_fault:
            raise VerificationError(
                f"{out}: verification failed: {finding.line()}; --overwrite makes it anew", path=out
            )


def _describe_non_finite(job: PackJob, plan: QuantizationPlan, run: RunOptions) -> SourceError:
    """Counts what cannot be packed in a weight, and says so."""
    from nf4conv.run.tasks.scan import find_unpackable  # importing torch takes seconds

    found = find_unpackable([job], plan.output.format, run, plan.source)
    if job.source.name not in found:
        return CastError(job.source, TAGS[plan.output.format.dtype])
    count, what = found[job.source.name]
    tensor = job.source
    return SourceError.about(
        tensor.file,
        tensor.name,
        f"{count:,} of {tensor.elements:,} values are "
        f"{what}; repair the checkpoint, or leave it unquantized with --exclude",
    )
