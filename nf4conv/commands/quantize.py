"""`nf4conv quantize`: packs a checkpoint or a diffusers pipeline into bitsandbytes' 4 bits."""

import gc
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from nf4conv.choose.wishes import unmatched
from nf4conv.commands.spread.carry_out import carry_out, is_spread
from nf4conv.commands.submodels import bytes_on_disk, write_submodels
from nf4conv.errors import DiffusersFolderError, OutputError, PlanError, SourceError
from nf4conv.format.layout import TAGS
from nf4conv.options import PushOptions, QuantizeOptions, RunOptions, SourceOptions
from nf4conv.plan import diffusers, quantization
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.jobs import PackJob
from nf4conv.plan.parts import plan_part
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.report.loading import advice, gpu_bytes, loading_of_pipeline, loading_of_plan
from nf4conv.report.results import QuantizeReport
from nf4conv.report.rows import VerificationSummary, WeightRow
from nf4conv.run.checkpoint import ignore, require_apart, write_checkpoint
from nf4conv.run.device.protocol import CastError, NonFiniteError
from nf4conv.run.earlier import found_or_written
from nf4conv.sources.adapters.merging import open_merged
from nf4conv.sources.diffusers.folder import DiffusersFolder, is_packed_by_default, open_diffusers
from nf4conv.sources.diffusers.original_names import with_original_names, within_blocks
from nf4conv.sources.opening import open_stored
from nf4conv.sources.original_card import OriginalCard
from nf4conv.sources.source import Source

if TYPE_CHECKING:
    from nf4conv.output.push import Push

AnyQuantizationPlan: TypeAlias = QuantizationPlan | DiffusersPlan[QuantizationPlan]
"""Plan of one checkpoint, or of a diffusers pipeline."""


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
    return execute_quantization(plan_quantization(source, options, where), out, run, progress, push)


def plan_quantization(
    source: str | Path, options: QuantizeOptions | None = None, where: SourceOptions | None = None
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

    Returns:
        A plan for `execute_quantization`, `describe_plan` and `plan_part`.

    Raises:
        SourceError: the source cannot be read.
        PlanError: the request cannot be met for this source.

    Example:
        >>> plan = nf4conv.plan_quantization("./Llama-3.1-8B")
        >>> print(plan.totals().bits_per_parameter)
    """
    options = options or QuantizeOptions()
    try:
        plan = _plan_checkpoint(source, options, where)
    except DiffusersFolderError as error:
        if options.single_file:
            raise PlanError(
                f"{source}: --single-file is for one part of a diffusers pipeline: "
                f"--subfolder transformer, or unet"
            ) from error
        return _plan_pipeline(open_diffusers(source, where), options)
    return replace(
        plan,
        notes=(*plan.notes, *unmatched(options, [("", plan.source)])),
        again=partial(plan_quantization, source, options, where),
    )


def _plan_checkpoint(
    source: str | Path, options: QuantizeOptions, where: SourceOptions | None
) -> QuantizationPlan:
    """Plans one checkpoint; raises DiffusersFolderError for a diffusers pipeline."""
    quantization.check_options(options)
    with _without_garbage_collection():
        opened = open_merged(source, where, options.lora)
        if options.single_file:
            opened = with_original_names(opened)
            options = within_blocks(opened, options)
        front, complaints = _front_matter(opened.folder / "README.md", opened.root)
        plan = quantization.plan_source(opened, options)
        return replace(plan, front=front, notes=(*plan.notes, *complaints))


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


def _front_matter(card: Path, root: Path) -> tuple[OriginalCard, tuple[str, ...]]:
    from nf4conv.report.card import read_front_matter  # importing a reader of YAML takes a moment

    return read_front_matter(card, root)


def _plan_pipeline(
    folder: DiffusersFolder, options: QuantizeOptions
) -> DiffusersPlan[QuantizationPlan]:
    submodels = {}
    for name, place in folder.submodels.items():
        submodels[name] = _plan_submodel(folder, name, options, place)
    front, complaints = _front_matter(folder.folder / "README.md", folder.folder)
    parts = [(name, part.source) for name, part in submodels.items()]
    plan = DiffusersPlan(folder, submodels, front, (*complaints, *unmatched(options, parts)))
    _require_packed_submodel(plan)
    return plan


def _plan_submodel(
    folder: DiffusersFolder, name: str, options: QuantizeOptions, where: SourceOptions
) -> QuantizationPlan:
    """Plans a submodel; keeps its tensors as they are if nothing in it is packed."""
    skip_modules = diffusers.applying(options.skip_modules, name)
    mine = replace(diffusers.for_submodel(name, options), skip_modules=skip_modules)
    if is_packed_by_default(name) and diffusers.is_included(name, options):
        plan = _plan_checkpoint(folder.place, mine, where)
        if plan.packs_anything:
            return replace(plan, is_submodel=True)
    return quantization.plan_unchanged_submodel(open_stored(folder.place, where), mine)


def _require_packed_submodel(plan: DiffusersPlan[QuantizationPlan]) -> None:
    if not plan.totals().packed:
        raise PlanError(
            f"{plan.folder.place}: no tensor of this diffusers pipeline would be packed; "
            f"--dry-run shows why each is kept"
        )


def second_opinion(plan: AnyQuantizationPlan) -> tuple[str, ...]:
    """Asks the installed transformers what it would decide otherwise than a plan by the rules.

    Loading transformers takes seconds.

    Args:
        plan: plan of `plan_quantization`.

    Returns:
        A line for each kind of difference. Nothing for a diffusers pipeline, for a plan that
        transformers made itself, and where transformers is not installed.
    """
    if not isinstance(plan, QuantizationPlan) or plan.options.plan_with != "rules":
        return ()
    if find_spec("transformers") is None:
        return ()
    from nf4conv.choose import skeleton  # importing transformers takes seconds

    return skeleton.second_opinion(plan.source.tensors, plan.source.config, plan.options)


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
    """
    started = time.perf_counter()
    run = run or RunOptions()
    progress = progress or ignore
    out = Path(out)
    is_pushed = push is not None and push.push_to_hub is not None
    if run.part is not None and is_pushed:
        raise PlanError(
            "--push-to-hub does not go with --part, --ray or several GPUs: push what is made of "
            "all parts"
        )
    plan = plan_part(plan, run)
    if is_spread(run):
        return carry_out(plan, partial(execute_quantization, push=push), out, run, progress)
    if isinstance(plan, QuantizationPlan):
        report = _execute_one(plan, out, run, progress, push)
    else:
        report = _execute_pipeline(plan, out, run, progress, push)
    return replace(report, seconds=time.perf_counter() - started)


def _execute_one(
    plan: QuantizationPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    push: PushOptions | None,
) -> QuantizeReport:
    require_apart(plan.source.folder, out)
    plan = _prepared(plan, run)
    if plan.options.single_file:
        return _write_one_file(plan, out, run, progress, push)
    with _open_push(push, run) as repository:
        announce = None if repository is None else repository.offer
        report = _write_one(plan, out, run, progress, announce)
        return _pushed(report, repository, out, plan)


def _execute_pipeline(
    plan: DiffusersPlan[QuantizationPlan],
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    push: PushOptions | None,
) -> QuantizeReport:
    require_apart(plan.folder.folder, out)
    submodels = {name: _prepared(part, run) for name, part in plan.submodels.items()}
    plan = replace(plan, submodels=submodels)
    _require_packed_submodel(plan)
    with _open_push(push, run) as repository:
        report = write_submodels(
            plan,
            out,
            run,
            progress,
            write=partial(_write_submodel, repository),
            join=partial(_joined, plan),
            card=partial(_pipeline_card, plan),
        )
        return _pushed(report, repository, out, next(iter(submodels.values())))


def _open_push(push: PushOptions | None, run: RunOptions) -> "AbstractContextManager[Push | None]":
    """Opens the repository to upload to before anything is computed.

    So whatever is wrong with it is known at once.
    """
    if push is None or push.push_to_hub is None:
        return nullcontext()
    from nf4conv.output.push import Push  # importing huggingface_hub takes a while

    return Push(push.push_to_hub, token=push.token, public=push.public, overwrite=run.overwrite)


def _pushed(
    report: QuantizeReport, repository: "Push | None", out: Path, plan: QuantizationPlan
) -> QuantizeReport:
    """Commits what has been uploaded, and adds the address to the report."""
    if repository is None:
        return report
    message = f"Quantize to {plan.output.format.quant_type} with nf4conv"
    return replace(report, pushed=repository.commit(out, message))


def _prepared(plan: QuantizationPlan, run: RunOptions) -> QuantizationPlan:
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
    anew = quantization.plan_source(plan.source, plan.options, frozenset(found))
    _, complaints = _front_matter(plan.source.folder / "README.md", plan.source.root)
    return replace(
        anew,
        front=plan.front,
        notes=(*anew.notes, *complaints, *notes),
        is_submodel=plan.is_submodel,
    )


def _write_one(
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
    write = partial(write_checkpoint, plan, out, run, progress, card, announce)
    try:
        written = found_or_written(plan, out, run, progress, write)
    except NonFiniteError as error:
        raise _describe_non_finite(error.job, plan, run) from error
    report = written.report
    totals, loading = plan.totals(), loading_of_plan(plan)
    if plan.part is None:
        report = replace(report, bytes_before=_source_bytes(plan.source))
    return QuantizeReport.of_run(
        report,
        packed=totals.packed,
        parameters=totals.parameters,
        bits_per_parameter=8 * report.bytes_after / max(totals.parameters, 1),
        gpu_bytes=gpu_bytes(report.bytes_after),
        loading="" if loading is None else loading.call(str(out)),
        advice=advice(plan.rows()),
        verification=written.verification,
    )


def _source_bytes(source: Source) -> int:
    return sum(tensor.nbytes for tensor in source.tensors)


def _card(
    plan: QuantizationPlan, bytes_after: int, verified: VerificationSummary | None
) -> str | None:
    """Writes the model card; None for a submodel or a single file."""
    if plan.is_submodel or plan.options.single_file:
        return None
    from nf4conv.report.card import Figures, model_card  # importing a reader of YAML takes a moment

    return model_card(
        plan.source,
        plan.whole,
        plan.config,
        plan.front,
        Figures(_source_bytes(plan.source), bytes_after, verified),
        loading_of_plan(plan),
        plan.options.base_model,
    )


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
        raise PlanError(f"{out}: --single-file writes one file, such as OUT.safetensors")
    if out.exists() and not run.overwrite:
        raise OutputError(f"{out}: exists; choose another file, or --overwrite")
    folder = out.with_name(f"{out.name}.unfinished")
    report = _write_one(plan, folder, run, progress)
    (folder / plan.output.shards[0].name).replace(out)
    shutil.rmtree(folder)
    return replace(report, out=str(out))


def _describe_non_finite(job: PackJob, plan: QuantizationPlan, run: RunOptions) -> SourceError:
    """Counts what cannot be packed in a weight, and says so."""
    from nf4conv.run.tasks.scan import find_unpackable  # importing torch takes seconds

    found = find_unpackable([job], plan.output.format, run, plan.source)
    if job.source.name not in found:
        return CastError(job.source, TAGS[plan.output.format.dtype])
    count, what = found[job.source.name]
    return SourceError(
        f"{job.source.file}: {job.source.name}: {count:,} of {job.source.elements:,} values are "
        f"{what}; repair the checkpoint, or leave such tensors unquantized: --non-finite keep"
    )


def _write_submodel(
    repository: "Push | None",
    plan: QuantizationPlan,
    folder: Path,
    run: RunOptions,
    progress: Callable[[int], None],
) -> QuantizeReport:
    """Carries out the plan of a submodel.

    On the Hub, the name of its folder stands before the names of its files.
    """
    if repository is None:
        return _write_one(plan, folder, run, progress)
    offer = repository.offer

    def announce(name: str, path: Path) -> None:
        offer(f"{folder.name}/{name}", path)

    return _write_one(plan, folder, run, progress, announce)


def _joined(
    plan: DiffusersPlan[QuantizationPlan],
    report: QuantizeReport,
    reports: Sequence[QuantizeReport],
) -> QuantizeReport:
    """Adds what only a quantization reports to the joined report of all submodels."""
    totals = plan.totals()
    return replace(
        report,
        packed=totals.packed,
        parameters=totals.parameters,
        bits_per_parameter=8 * report.bytes_after / max(totals.parameters, 1),
        gpu_bytes=gpu_bytes(report.bytes_after),
        loading=loading_of_pipeline(plan).call(report.out),
        advice=advice(plan.rows()),
        verification=_verification(plan, reports),
    )


def _verification(
    plan: DiffusersPlan[QuantizationPlan], reports: Sequence[QuantizeReport]
) -> VerificationSummary | None:
    """Joins the summaries of all submodels; None if nothing was verified.

    Without verification no report has one. With it, no submodel is skipped.
    """
    found: list[VerificationSummary] = []
    for report in reports:
        if report.verification is None:
            return None
        found.append(report.verification)
    rows: list[WeightRow] = []
    for name, part in zip(plan.submodels, found, strict=True):
        rows += [row.inside(name) for row in part.weights]
    if rows:
        return VerificationSummary.of(rows, sum(part.copied for part in found))
    # An earlier run verified them, and its figures are all that is left. They do not tell the
    # median of all weights.
    return VerificationSummary(
        packed=sum(part.packed for part in found),
        copied=sum(part.copied for part in found),
        largest_relative_error=max(part.largest_relative_error for part in found),
        median_relative_error=float("nan"),
        bytes_differing=sum(part.bytes_differing for part in found),
    )


def _pipeline_card(plan: DiffusersPlan[QuantizationPlan], report: QuantizeReport) -> str:
    """Writes the model card of a diffusers pipeline."""
    from nf4conv.report.card import Figures, diffusers_card  # importing YAML takes a moment

    figures, originals = {}, {}
    for name, part in plan.submodels.items():
        after = bytes_on_disk(Path(report.out), name, part)
        figures[name] = Figures(part.totals().bytes_before, after)
        originals[name] = (part.source, part.output)
    return diffusers_card(
        plan.front,
        loading_of_pipeline(plan),
        originals,
        figures,
        report.verification,
        next(iter(plan.submodels.values())).options.base_model,
    )
