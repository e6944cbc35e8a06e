"""Quantizes one checkpoint: plans it, prepares the plan, writes the folder or the file."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nf4conv.check.checksums import renew_checksum
from nf4conv.choose.experts import Experts
from nf4conv.errors import OutputError, PlanError, SourceError, VerificationError
from nf4conv.format.layout import TAGS
from nf4conv.options import (
    PushOptions,
    QuantizeOptions,
    RunOptions,
    SourceOptions,
    VerifyOptions,
)
from nf4conv.output.writer import write_file
from nf4conv.plan import quantization
from nf4conv.plan.jobs import PackJob
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.report.advice import advice
from nf4conv.report.loading import Loading, gpu_bytes, loading_of_plan, push_command
from nf4conv.report.results.runs import QuantizeReport
from nf4conv.report.rows.weights import VerificationSummary
from nf4conv.run.checkpoint import Card, Written, require_apart, write_checkpoint
from nf4conv.run.device.protocol import CastError, NonFiniteError
from nf4conv.run.earlier import find_earlier_file, found_or_written
from nf4conv.sources.opening import open_source
from nf4conv.sources.original_card import OriginalCard
from nf4conv.sources.source import Source
from nf4conv.sources.unfinished import is_unfinished
from nf4conv.system.removal import remove

if TYPE_CHECKING:
    from nf4conv.output.push import Push


def plan_checkpoint(
    source: str | Path,
    options: QuantizeOptions,
    where: SourceOptions | None,
    *,
    is_public: bool = False,
) -> QuantizationPlan:
    """Plans one checkpoint; raises DiffusersFolderError for a diffusers pipeline.

    With `is_public`, experts stay in 16 bits unless the options, or a source in 4 bits, say
    otherwise: most who find the result on the Hub do not have nf4conv.
    """
    with _without_garbage_collection():
        opened = _open(source, options, where)
        if options.single_file:
            from nf4conv.sources.diffusers import original_names  # few runs need to import it

            opened = original_names.with_original_names(opened)
            options = original_names.within_blocks(opened, options)
        if is_public and options.moe is None:
            experts = Experts.gather(opened.tensors, opened.config or {})
            if experts.packs_by_default(options):
                options = replace(options, moe="portable")
        front, complaints = read_card(opened.folder / "README.md", opened.root)
        plan = _planned(opened, options)
        return replace(plan, front=front, notes=(*plan.notes, *complaints))


def _planned(
    source: Source, options: QuantizeOptions, non_finite: frozenset[str] = frozenset()
) -> QuantizationPlan:
    """Plans an opened checkpoint; with --calibrate, its calibration too."""
    if not options.calibrate:
        return quantization.plan_source(source, options, non_finite)
    from nf4conv.calibrate import planning  # importing torch takes seconds

    planning.refuse_impossible(source, options)
    searched = replace(options, scales="search")
    return planning.plan_calibration(quantization.plan_source(source, searched, non_finite))


def _open(source: str | Path, options: QuantizeOptions, where: SourceOptions | None) -> Source:
    """Opens the source; with --lora, with adapters merged into it."""
    if not options.lora:
        return open_source(source, where)
    from nf4conv.sources.adapters.merging import open_merged  # few runs need to import it

    return open_merged(source, where, options.lora, options.lora_experts)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keeps Python from looking for dead objects.

    Planning makes many small objects that live on: looking through them takes a quarter of the
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_card(card: Path, root: Path) -> tuple[OriginalCard, tuple[str, ...]]:
    from nf4conv.report.card.front_matter import (
        read_front_matter,  # importing a reader of YAML takes a moment
    )

    return read_front_matter(card, root)


def execute_one(
    plan: QuantizationPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    push: PushOptions | None,
) -> QuantizeReport:
    require_apart(plan.source.folder, out)
    plan = prepared(plan, run)
    if plan.options.single_file:
        return _write_one_file(plan, out, run, progress, push)
    with open_push(push, run) as repository:
        if repository is None:
            return write_one(plan, out, run, progress)
        plan = replace(plan, repo=repository.repo)
        report = write_one(plan, out, run, progress, repository.offer)
        return pushed(report, repository, out, plan, loading_of_plan(plan))


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
        create_pr=push.create_pr,
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
    if loading is not None and report.already_complete:
        _name_repository(out, loading, repository.repo)
    message = f"Quantize to {plan.output.format.quant_type} with nf4conv"
    report = replace(report, pushed=repository.commit(out, message), push="")
    if loading is None or repository.creates_pr:
        return report
    return replace(report, loading=loading.code(repository.repo))


def _name_repository(out: Path, loading: Loading, repo: str) -> None:
    """Writes the repository's name into the code of a card that was made without it."""
    from nf4conv.report.card.sections import with_repository  # importing YAML takes a moment

    card = out / "README.md"
    if not card.is_file():
        return
    before = card.read_text(encoding="utf-8")
    after = with_repository(before, loading, repo)
    if after != before:
        write_file(card, [after.encode()])
        renew_checksum(out, card.name)


def prepared(plan: QuantizationPlan, run: RunOptions) -> QuantizationPlan:
    """Returns the plan to carry out.

    With --non-finite keep, weights are looked through for NaN and infinity first.

    Raises:
        PlanError: nothing is left to pack.
    """
    if plan.options.non_finite == "keep":
        plan = _without_non_finite(plan, run)
    if not plan.is_submodel and not plan.packs_anything:
        raise PlanError(
            f"{plan.source}: no tensor of this checkpoint would be packed; "
            f"--dry-run shows why each is kept"
        )
    return plan


def _without_non_finite(plan: QuantizationPlan, run: RunOptions) -> QuantizationPlan:
    """Keeps every weight that holds NaN or infinity, after a pass over all weights to find them."""
    from nf4conv.run.tasks.scan import find_unpackable  # importing torch takes seconds

    jobs = [job for job in plan.output.jobs if isinstance(job, PackJob)]
    found = find_unpackable(jobs, plan.output.format, run, plan.source)
    if not found:
        return plan
    notes = []
    for name, (count, what) in found.items():
        notes.append(f"{name}: kept unquantized, {count:,} values are {what}")
    anew = _planned(plan.source, plan.options, frozenset(found))
    _, complaints = read_card(plan.source.folder / "README.md", plan.source.root)
    return replace(
        anew,
        front=plan.front,
        notes=(*anew.notes, *complaints, *notes),
        is_submodel=plan.is_submodel,
    )


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
        _verify_again(plan, out, run, progress)
    return _report_of(plan, out, written)


def _report_of(plan: QuantizationPlan, out: Path, written: Written) -> QuantizeReport:
    """Adds what a plan tells to the report of what came of it."""
    report = written.report
    totals, loading = plan.totals(), loading_of_plan(plan)
    if plan.part is None:
        report = replace(report, bytes_before=_source_bytes(plan.source))
    return QuantizeReport.of_run(
        report,
        packed=totals.packed,
        stay=totals.stay,
        parameters=totals.parameters,
        bits_per_parameter=8 * report.bytes_after / max(totals.parameters, 1),
        gpu_bytes=gpu_bytes(report.bytes_after),
        loading="" if loading is None else loading.code(str(out)),
        install="" if loading is None else loading.install,
        push="" if plan.config is None else push_command(out),
        advice=advice(plan.rows()),
        verification=written.verification,
    )


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
    from nf4conv.calibrate.calibrating import calibrate  # importing torch takes seconds

    made = calibrate(plan, out, run, progress)
    after = replace(run, overwrite=False)
    return write_checkpoint(made, out, after, progress, card, announce)


def _verify_again(
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


def _source_bytes(source: Source) -> int:
    return sum(tensor.nbytes for tensor in source.tensors)


def _card(
    plan: QuantizationPlan, bytes_after: int, verified: VerificationSummary | None
) -> str | None:
    """Writes the model card; None for a submodel or a single file."""
    if plan.is_submodel or plan.options.single_file:
        return None
    from nf4conv.report.card.cards import model_card  # importing a reader of YAML takes a moment
    from nf4conv.report.card.subject import Figures  # importing a reader of YAML takes a moment

    figures = Figures(_source_bytes(plan.source), bytes_after, verified)
    return model_card(plan, figures, loading_of_plan(plan), plan.options.base_model, plan.repo)


def _write_one_file(
    plan: QuantizationPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    push: PushOptions | None,
) -> QuantizeReport:
    """Carries out a plan by way of a folder beside the file.

    An interrupted run leaves the folder to be resumed.
    """
    if run.checksum or (push is not None and push.push_to_hub is not None):
        raise PlanError("--single-file: --push-to-hub and --checksum are for folders")
    if out.suffix != ".safetensors":
        raise PlanError(f"{out}: --single-file writes one file, such as OUT.safetensors", path=out)
    folder = out.with_name(f"{out.name}.unfinished")
    if out.exists() and not run.overwrite:
        found = find_earlier_file(plan, out, run)
        if found is None:
            raise OutputError(f"{out}: exists; choose another file, or --overwrite", path=out)
        if run.verify:
            _verify_again(plan, out, run, progress)
        else:
            progress(plan.bytes_to_read)
        if folder.is_dir() and not is_unfinished(folder):
            remove(folder.parent, folder.name)  # left by a run that ended at its last step
        return _report_of(plan, out, found)
    report = write_one(plan, folder, run, progress)
    (folder / plan.output.shards[0].name).replace(out)
    remove(folder.parent, folder.name)
    return replace(report, out=str(out), push=push_command(out))


def _describe_non_finite(job: PackJob, plan: QuantizationPlan, run: RunOptions) -> SourceError:
    """Counts what cannot be packed in a weight, and says so."""
    from nf4conv.run.tasks.scan import find_unpackable  # importing torch takes seconds

    found = find_unpackable([job], plan.output.format, run, plan.source)
    if job.source.name not in found:
        return CastError(job.source, TAGS[plan.output.format.dtype])
    count, what = found[job.source.name]
    tensor = job.source
    return SourceError(
        f"{tensor.file}: {tensor.name}: {count:,} of {tensor.elements:,} values are "
        f"{what}; repair the checkpoint, or leave such tensors unquantized: --non-finite keep",
        path=tensor.file,
        tensor=tensor.name,
    )
