"""Quantizes a diffusers pipeline: each submodel by its own rules, and one result of all."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nf4conv.choose.wishes import unmatched
from nf4conv.commands.pipelines import bytes_on_disk, open_unchanged, write_submodels
from nf4conv.commands.quantize_checkpoint import (
    open_push,
    plan_checkpoint,
    pushed,
    read_card,
    report_of_run,
    write_one,
)
from nf4conv.errors import PlanError
from nf4conv.options import PushOptions, QuantizeOptions, RunOptions, SourceOptions
from nf4conv.plan import diffusers, quantization
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.plan.rows import TensorRow
from nf4conv.report.loading import loading_of_pipeline
from nf4conv.report.results import QuantizeReport, VerificationSummary
from nf4conv.run.checkpoint import require_apart
from nf4conv.sources.diffusers import DiffusersFolder, is_packed_by_default

if TYPE_CHECKING:
    from nf4conv.output.push import Push


def plan_pipeline(
    folder: DiffusersFolder, options: QuantizeOptions, *, is_public: bool = False
) -> DiffusersPlan[QuantizationPlan]:
    """Plans a diffusers pipeline: each submodel by its own rules.

    Args:
        folder: the pipeline.
        options: what to make of it.
        is_public: True if the result is to be uploaded, as for `plan_checkpoint`.

    Raises:
        SourceError: a submodel cannot be read.
        PlanError: nothing would be packed, or the request cannot be met for a submodel.
    """
    submodels = {}
    for name, place in folder.submodels.items():
        submodels[name] = _plan_submodel(folder, name, options, place, is_public=is_public)
    front, complaints = read_card(folder.folder / "README.md", folder.folder)
    parts = [(name, part.source) for name, part in submodels.items()]
    plan = DiffusersPlan(folder, submodels, front, (*complaints, *unmatched(options, parts)))
    _require_packed_submodel(plan)
    quantization.require_searched(folder.place, list(submodels.values()))
    return plan


def _plan_submodel(
    folder: DiffusersFolder,
    name: str,
    options: QuantizeOptions,
    where: SourceOptions,
    *,
    is_public: bool,
) -> QuantizationPlan:
    """Plans a submodel; keeps its tensors as they are if nothing in it is packed."""
    mine = diffusers.for_submodel(name, options)
    if is_packed_by_default(name) and diffusers.is_included(name, options):
        plan = plan_checkpoint(folder.place, mine, where, is_public=is_public)
        if plan.packs_anything:
            return replace(plan, is_submodel=True)
    return quantization.plan_unchanged_submodel(open_unchanged(folder, name, where), mine)


def _require_packed_submodel(plan: DiffusersPlan[QuantizationPlan]) -> None:
    """Raises a PlanError if no weight of the pipeline would be packed."""
    if not plan.totals().packed:
        raise PlanError(
            f"{plan.folder.place}: no tensor of this diffusers pipeline would be packed; "
            f"--dry-run shows why each is kept"
        )


def execute_pipeline(
    plan: DiffusersPlan[QuantizationPlan],
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    push: PushOptions | None,
) -> QuantizeReport:
    """Carries out the plan of a pipeline, and uploads the result if `push` asks for it."""
    require_apart(plan.folder.folder, out)
    with open_push(push, run) as repository:
        report: QuantizeReport = write_submodels(
            plan,
            out,
            run,
            progress,
            write=partial(_write_submodel, repository),
            join=partial(_joined, plan),
            card=partial(_pipeline_card, plan, None if repository is None else repository.repo),
        )
        if repository is None:
            return report
        first = next(iter(plan.submodels.values()))
        return pushed(report, repository, out, first, loading_of_pipeline(plan))


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
        return write_one(plan, folder, run, progress)
    offer = repository.offer

    def announce(name: str, path: Path) -> None:
        offer(f"{folder.name}/{name}", path)

    return write_one(plan, folder, run, progress, announce)


def _joined(
    plan: DiffusersPlan[QuantizationPlan],
    report: QuantizeReport,
    reports: Sequence[QuantizeReport],
) -> QuantizeReport:
    """Adds what only a quantization reports to the joined report of all submodels."""
    return report_of_run(plan, report.run, loading_of_pipeline(plan), _verification(plan, reports))


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
    rows: list[TensorRow] = []
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


def _pipeline_card(
    plan: DiffusersPlan[QuantizationPlan], repo: str | None, report: QuantizeReport
) -> str:
    """Writes the model card of a diffusers pipeline."""
    from nf4conv.report.card import (
        Figures,  # importing YAML takes a moment
        diffusers_card,  # importing YAML takes a moment
    )

    figures = {}
    for name, part in plan.submodels.items():
        after = bytes_on_disk(Path(report.run.out), name, part)
        figures[name] = Figures(part.totals().bytes_before, after)
    first = next(iter(plan.submodels.values()))
    return diffusers_card(
        plan.front,
        loading_of_pipeline(plan),
        plan.submodels,
        figures,
        report.verification,
        first.options.base_model,
        repo,
    )
