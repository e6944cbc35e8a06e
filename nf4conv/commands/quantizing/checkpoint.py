"""Quantizes one checkpoint: plans it, prepares the plan, and carries it out."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nf4conv.choose.experts import Experts
from nf4conv.commands.quantizing.publishing import open_push, pushed
from nf4conv.commands.quantizing.writing import write_one
from nf4conv.errors import PlanError
from nf4conv.options import PushOptions, QuantizeOptions, RunOptions, SourceOptions
from nf4conv.plan import quantization
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.report.loading import loading_of_plan
from nf4conv.report.results.runs import QuantizeReport
from nf4conv.run.checkpoint import require_apart
from nf4conv.sources.opening import open_source
from nf4conv.sources.original_card import OriginalCard
from nf4conv.sources.source import Source
from nf4conv.system.garbage import uncollected


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
