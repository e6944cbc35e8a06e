"""Quantizes one checkpoint: plans it, writes it, and uploads the result."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nf4conv.choose.experts import Experts
from nf4conv.errors import PlanError, SourceError, VerificationError
from nf4conv.format.dtypes import TAGS
from nf4conv.options import PushOptions, QuantizeOptions, RunOptions, SourceOptions, VerifyOptions
from nf4conv.output.writer import write_file
from nf4conv.plan import quantization
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.jobs import PackJob
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.report.advice import advice
from nf4conv.report.loading import Loading, gpu_bytes, loading_of_plan, push_command
from nf4conv.report.results import QuantizeReport, RunReport, VerificationSummary
from nf4conv.run.checkpoint import Written, require_apart, write_checkpoint
from nf4conv.run.device.protocol import CastError, NonFiniteError
from nf4conv.run.earlier import found_or_written
from nf4conv.run.filling import Card
from nf4conv.sources.opening import open_source
from nf4conv.sources.original_card import OriginalCard
from nf4conv.sources.source import Source
from nf4conv.system.machine import uncollected

if TYPE_CHECKING:
    from nf4conv.output.push import Push


def plan_checkpoint(
    source: str | Path,
    options: QuantizeOptions,
    where: SourceOptions | None,
    *,
    is_public: bool = False,
) -> QuantizationPlan:
    """Plans one checkpoint.

    Args:
        source: a folder, a file, or "org/name" on the Hub.
        options: what to make of it.
        where: what to take of a folder or repository, and how to reach the Hub.
        is_public: True if the result is to be uploaded. Experts then stay in 16 bits unless the
            options, or a source in 4 bits, say otherwise: most who find the result on the Hub do
            not have nf4conv.

    Raises:
        DiffusersFolderError: the source is a diffusers pipeline.
        SourceError: the source cannot be read.
        PlanError: the request cannot be met for it.
    """
    with uncollected():
        opened = _open(source, options, where)
        if is_public and options.moe is None:
            experts = Experts.gather(opened.tensors, opened.config or {})
            if experts.packs_by_default():
                options = replace(options, moe="portable")
        front, complaints = _card_of(opened)
        plan = _planned(opened, options)
        return replace(plan, front=front, notes=(*plan.notes, *complaints))


def _planned(source: Source, options: QuantizeOptions) -> QuantizationPlan:
    """Plans an opened checkpoint; with --calibrate, its calibration too."""
    if options.calibrate is None:
        return quantization.plan_source(source, options)
    from nf4conv.calibrate.request import plan_calibrated  # few runs need to import it

    return plan_calibrated(source, options)


def _open(source: str | Path, options: QuantizeOptions, where: SourceOptions | None) -> Source:
    """Opens the source; with --lora, with adapters merged into it."""
    if not options.lora:
        return open_source(source, where)
    from nf4conv.sources.adapters.merging import open_merged  # few runs need to import it

    return open_merged(source, where, options.lora)


def _card_of(source: Source) -> tuple[OriginalCard, tuple[str, ...]]:
    """Reads the model card of a source, and says why if it cannot be read."""
    from nf4conv.report.card import card_of  # importing YAML takes a moment

    return card_of(source)


def read_card(card: Path, root: Path) -> tuple[OriginalCard, tuple[str, ...]]:
    """Reads a model card, and says why if it cannot be read."""
    from nf4conv.sources.original_card import read_front_matter  # importing YAML takes a moment

    return read_front_matter(card, root)


def execute_one(
    plan: QuantizationPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    push: PushOptions | None,
) -> QuantizeReport:
    """Carries out the plan of one checkpoint, and uploads the result if `push` asks for it."""
    require_apart(plan.source.folder, out)
    if not plan.packs_anything:
        raise PlanError(
            f"{plan.source}: no tensor of this checkpoint would be packed; "
            f"--dry-run shows why each is kept"
        )
    with open_push(push, run) as repository:
        if repository is None:
            return write_one(plan, out, run, progress)
        plan = replace(plan, repo=repository.repo)
        report = write_one(plan, out, run, progress, repository.offer)
        return pushed(report, repository, out, plan, loading_of_plan(plan))


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
    return QuantizeReport(
        run=run,
        packed=totals.packed,
        stay=totals.stay,
        parameters=totals.parameters,
        bits_per_parameter=8 * run.bytes_after / max(totals.parameters, 1),
        gpu_bytes=gpu_bytes(run.bytes_after),
        loading="" if loading is None else loading.code(run.out),
        install="" if loading is None else loading.install,
        push="" if plan.config is None else push_command(Path(run.out)),
        advice=advice(plan.jobs),
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


# --- uploading --------------------------------------------------------------------------------


def open_push(push: PushOptions | None, run: RunOptions) -> "AbstractContextManager[Push | None]":
    """Opens the repository to upload to before anything is computed.

    So whatever is wrong with it is known at once.
    """
    if push is None or push.push_to_hub is None:
        return nullcontext()
    from nf4conv.output.push import Push  # importing huggingface_hub takes a while

    return Push(
        push.push_to_hub,
        token=push.token,
        public=push.public,
        overwrite=run.overwrite,
    )


def pushed(
    report: QuantizeReport,
    repository: "Push",
    out: Path,
    plan: QuantizationPlan,
    loading: Loading | None,
) -> QuantizeReport:
    """Commits what has been uploaded, and adds the address to the report.

    Args:
        report: what was done.
        repository: where the result goes.
        out: the result. If an earlier run made it, its card does not name the repository yet.
        plan: the plan, or that of a submodel.
        loading: how the result is loaded. None if nothing says how.
    """
    if loading is not None and report.run.already_complete:
        _name_repository(out, loading, repository.repo)
    message = f"Quantize to {plan.output.format.quant_type} with nf4conv"
    report = replace(report, pushed=repository.commit(out, message), push="")
    if loading is None:
        return report
    return replace(report, loading=loading.code(repository.repo))


def _name_repository(out: Path, loading: Loading, repo: str) -> None:
    """Writes the repository's name into the code of a card that was made without it."""
    from nf4conv.report.card import with_repository  # importing YAML takes a moment

    card = out / "README.md"
    if not card.is_file():
        return
    before = card.read_text(encoding="utf-8")
    after = with_repository(before, loading, repo)
    if after != before:
        write_file(card, [after.encode()])
