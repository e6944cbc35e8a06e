"""Carries plans out, for quantize and dequantize: describes them, writes, verifies, uploads.

open the repository to push to ▸ calibrate ▸ write ▸ commit what was uploaded

The submodels of a pipeline are written one after the other:

OUT/.nf4conv            lock of the whole
OUT/<submodel>          a checkpoint of its own: a rerun finds by its record that it is there
OUT/model_index.json    last of all: without it diffusers does not take the folder for a pipeline
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from nf4conv.commands.planning import AnyPlan, planned
from nf4conv.errors import PlanError, SourceError, VerificationError
from nf4conv.options import DequantizeOptions, QuantizeOptions, VerifyOptions, WritingOptions
from nf4conv.output.workspace import Workspace, tidy
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.jobs import PackJob
from nf4conv.plan.parts import in_parts, plan_part
from nf4conv.plan.rows import summed
from nf4conv.plan.writing import WritingPlan
from nf4conv.report.advice import tell_what_is_read
from nf4conv.report.loading import loading_of_plan, push_command
from nf4conv.report.results import PlanReport, RunReport, VerificationSummary, used_by
from nf4conv.run.checkpoint import ignore, require_apart, write_checkpoint
from nf4conv.run.earlier import found_or_written
from nf4conv.run.filling import Card
from nf4conv.run.parts import finish_without_source
from nf4conv.run.tasks.scan import check_scales
from nf4conv.sources.reader import read_chunks, read_small, reading_speed
from nf4conv.sources.unfinished import is_unfinished
from nf4conv.system.folders import remove
from nf4conv.system.machine import uncollected

if TYPE_CHECKING:
    from nf4conv.output.push import Push

Announce: TypeAlias = Callable[[str, Path], None]
"""Is told the name and the path of each shard that is finished."""


def convert(source: str | Path, out: Path, options: WritingOptions) -> RunReport:
    """Plans a conversion and carries it out.

    A source that cannot be read is not needed if parts have made all files.
    """
    try:
        plan = planned(source, options)
    except SourceError:
        found = finish_without_source(out, options)
        if found is None:
            raise
        return found
    return execute(plan, out, options)


@uncollected()
def dry_run(source: str | Path, options: WritingOptions) -> PlanReport:
    """Describes what a conversion would do."""
    plan = plan_part(planned(source, options), options)
    rows = plan.rows()
    totals = plan.totals
    # how fast some of the source is read now tells how long all of it takes
    speed = reading_speed([file for one in plan.parts for file in one.source.files])
    return PlanReport(
        command=options.command,
        source=str(plan.source),
        totals=totals,
        kinds=summed(rows),
        tensors=tuple(rows),
        config=plan.config,
        reading_seconds=None if speed is None else totals.bytes_before / speed,
        notes=tuple(plan.notes),
    )


def execute(plan: AnyPlan, out: Path, options: WritingOptions) -> RunReport:
    """Carries out a plan, in as many processes as the options say, and uploads the result."""
    started = time.perf_counter()
    # before anything is removed: --overwrite of a run that is spread empties OUT first of all
    require_apart(plan.source.folder, out)
    options = in_parts(plan, options, out)
    if options.is_spread:
        from nf4conv.commands.spread import carry_out  # few runs need to import it

        return carry_out(plan, execute, out, options)
    plan = plan_part(plan, options)
    is_quantized = isinstance(options, QuantizeOptions)
    jobs = (job for part in plan.parts for job in part.whole.jobs)
    if is_quantized and not any(isinstance(job, PackJob) for job in jobs):
        raise PlanError(
            f"{plan.source}: no tensor of this checkpoint would be packed; "
            f"--dry-run shows why each is kept"
        )
    tell_what_is_read(plan, options)
    with _open_push(options) as repository:
        offer = ignore if repository is None else repository.offer
        if isinstance(plan, DiffusersPlan):
            report = _write_pipeline(plan, out, options, offer)
        else:
            report = _write_one(plan, out, options, offer, partial(_card, plan))
        if is_quantized:
            report = _with_commands(report, plan)
        if repository is not None:
            report = _pushed(report, repository, out, plan)
    return replace(report, seconds=time.perf_counter() - started)


def _write_one(
    plan: WritingPlan,
    out: Path,
    options: WritingOptions,
    announce: Announce,
    card: Card,
) -> RunReport:
    """Carries out the plan of one checkpoint."""
    progress = options.progress or ignore

    def write() -> RunReport:
        if isinstance(options, DequantizeOptions):
            check_scales(list(plan.output.jobs), plan.source)
        if plan.calibration is None:
            return write_checkpoint(plan, out, options, progress, card, announce)
        made = plan.calibration.carry_out(plan, out, options, progress)
        after = replace(options, overwrite=False)
        return write_checkpoint(made, out, after, progress, card, announce)

    report = found_or_written(plan, out, options, progress, write)
    is_asked = isinstance(options, QuantizeOptions) and options.verify
    if is_asked and plan.part is None and report.already_complete:
        _verify_again(plan, out, options)
    return report


def _card(plan: AnyPlan, bytes_after: int, verified: VerificationSummary | None) -> str | None:
    """Writes the model card; None for a decoded model that no adapter is merged into."""
    first = plan.parts[0]
    if first.options.command == "dequantize" and not first.source.adapters:
        return None
    from nf4conv.report.card import model_card  # importing YAML takes a moment

    return model_card(plan, bytes_after, verified)


def _with_commands(report: RunReport, plan: AnyPlan) -> RunReport:
    """Adds how the result is loaded and pushed."""
    loading = loading_of_plan(plan)
    if loading is not None:
        report = replace(report, loading=loading.code(report.out), install=loading.install)
    if plan.config is not None:
        report = replace(report, push=push_command(Path(report.out)))
    return report


def _verify_again(plan: WritingPlan, out: Path, options: WritingOptions) -> None:
    """Compares a result that was complete before with its source, byte by byte.

    Raises:
        VerificationError: it is not what quantizing the source gives.
    """
    from nf4conv.commands.verify import verify_result  # few runs need to import it

    required = VerifyOptions(
        source=str(plan.source),
        tolerance=options.tolerance,
        device=options.device,
        workers=options.workers,
        buffer_size=options.buffer_size,
        progress=options.progress,
    )
    for finding in verify_result(out, plan.source, required).findings:
        if finding.is_fault:
            raise VerificationError(
                f"{out}: verification failed: {finding.line()}; --overwrite makes it anew", path=out
            )


# --- diffusers pipelines ------------------------------------------------------------------------


def _write_pipeline(
    plan: DiffusersPlan, out: Path, options: WritingOptions, announce: Announce
) -> RunReport:
    """Carries out the plans of all submodels. On the Hub, folders stand before names of files."""

    def write(name: str, options: WritingOptions) -> RunReport:
        def announce_inside(file: str, path: Path) -> None:
            announce(f"{name}/{file}", path)

        return _write_one(plan.submodels[name], out / name, options, announce_inside, ignore)

    index = plan.source.index
    if (out / index.name).is_file() and not is_unfinished(out) and not options.overwrite:
        reports = [write(name, options) for name in plan.submodels]
        tidy(out)
        return _joined(plan, out, reports)
    begun = {"command": type(options).__name__, "--device": options.device}
    with Workspace(out, begun, overwrite=options.overwrite) as workspace:
        for name in plan.submodels:
            workspace.require_name(name)
        missing = [part for name, part in plan.submodels.items() if not (out / name).exists()]
        workspace.check_space(sum(part.space_needed(()) for part in missing))
        # it is there if an earlier run ended between its last two steps
        remove(out, index.name)
        reports = []
        for name in plan.submodels:
            # one that an earlier run has finished may not be verified
            again = options.verify and not is_unfinished(out / name)
            reports.append(write(name, replace(options, overwrite=again)))
        for file in plan.source.files:
            workspace.write(str(file), read_chunks(plan.source.folder / file))
        report = _joined(plan, out, reports)
        card = _card(plan, report.totals.bytes_after, report.verification)
        if card is not None:
            workspace.write("README.md", [card.encode(errors="backslashreplace")])
        workspace.complete({index.name: read_small(index)})
    return report


def _joined(plan: DiffusersPlan, out: Path, runs: Sequence[RunReport]) -> RunReport:
    """Joins what came of all submodels."""
    shards_resumed = 0
    for run, part in zip(runs, plan.parts, strict=True):
        shards_resumed += len(part.output.shards) if run.already_complete else run.shards_resumed
    # none if this run has not verified all submodels
    verified = [run.verification for run in runs if run.verification and not run.already_complete]
    is_verified = len(verified) == len(runs)
    return replace(
        next((run for run in runs if not run.already_complete), runs[0]),
        out=str(out),
        totals=replace(plan.totals, bytes_after=sum(run.totals.bytes_after for run in runs)),
        pipeline_seconds=sum(run.pipeline_seconds for run in runs),
        shards_resumed=shards_resumed,
        notes=plan.notes,
        verification=VerificationSummary.sum_up(verified) if is_verified else None,
        **used_by(runs),
    )


# --- uploading ----------------------------------------------------------------------------------


def _open_push(
    options: WritingOptions,
) -> "AbstractContextManager[Push | None]":
    """Opens the repository to upload to, so that what is wrong with it is known at once."""
    if not isinstance(options, QuantizeOptions) or options.push_to_hub is None:
        return nullcontext()
    from nf4conv.output.push import Push  # importing huggingface_hub takes a while

    return Push(
        options.push_to_hub,
        token=options.token,
        public=options.public,
        overwrite=options.overwrite,
    )


def _pushed(report: RunReport, repository: "Push", out: Path, plan: AnyPlan) -> RunReport:
    """Commits what has been uploaded, and adds the address to the report.

    On the Hub, the code of the card loads the model from the repository.
    """
    from nf4conv.report.card import with_repository  # importing YAML takes a moment

    loading = loading_of_plan(plan)
    card = out / "README.md"
    changed = {}
    if loading is not None:
        report = replace(report, loading=loading.code(repository.repo))
        if card.is_file():
            text = with_repository(card.read_text(encoding="utf-8"), loading, repository.repo)
            changed["README.md"] = text.encode()
    return replace(report, pushed=repository.commit(out, changed), push="")
