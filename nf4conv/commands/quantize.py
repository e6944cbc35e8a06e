"""`nf4conv quantize`: a checkpoint or a diffusers pipeline in, its 4-bit bitsandbytes form out."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from nf4conv.choose.selection import unmatched
from nf4conv.commands import diffusers
from nf4conv.commands.diffusers import DiffusersPlan
from nf4conv.commands.output import check_apart, ignore
from nf4conv.commands.parts import plan_part
from nf4conv.commands.single import quantize as single
from nf4conv.commands.single.quantize import QuantizationPlan
from nf4conv.commands.spread import carry_out, is_spread
from nf4conv.errors import DiffusersFolderError, PlanError
from nf4conv.options import PushOptions, QuantizeOptions, RunOptions, SourceOptions
from nf4conv.report.results import QuantizeReport
from nf4conv.sources.diffusers_folder import is_packed_by_default, open_diffusers

if TYPE_CHECKING:
    from nf4conv.output.push import Push

AnyQuantizationPlan: TypeAlias = QuantizationPlan | DiffusersPlan[QuantizationPlan]
"""Of one checkpoint, or of a diffusers pipeline."""


def quantize_checkpoint(
    source: str | Path,
    out: str | Path,
    options: QuantizeOptions | None = None,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    where: SourceOptions | None = None,
    push: PushOptions | None = None,
) -> QuantizeReport:
    """Quantize a checkpoint to 4 bits; of a diffusers pipeline, each submodel by its own rule.

    A rerun after an interruption keeps the shards that are finished and ends in the same bytes.

    Args:
        source: a folder, a .safetensors file, a torch pickle, or "org/name" on the Hugging Face
            Hub.
        out: the folder to write; it must be empty, or hold an interrupted run with the same plan.
        options: what to make of the checkpoint.
        run: how to use the machine.
        progress: told how many more source bytes have been read, from any thread.
        where: revision, subfolder and the like.
        push: a repository on the Hub to push the result to.

    Raises:
        SourceError, PlanError: the source cannot be read, or the request cannot be met for it.
        OutputError: `out` cannot be written; as after any error, it does not look like a finished
            checkpoint.
        VerificationError: with `run.verify`, what has been written is not what was to be.
    """
    return execute_quantization(plan_quantization(source, options, where), out, run, progress, push)


def plan_quantization(
    source: str | Path, options: QuantizeOptions | None = None, where: SourceOptions | None = None
) -> AnyQuantizationPlan:
    """Decide everything about a quantization from headers and config alone; no weight is read,
    torch is not imported.

    Arguments and errors as `quantize_checkpoint`. Globs and module names for a diffusers pipeline
    may begin with the name of a submodel and a slash: "transformer/*.attn.*"; others apply to all.
    """
    options = options or QuantizeOptions()
    try:
        plan = single.plan_one(source, options, where)
        again = partial(plan_quantization, source, options, where)
        return replace(
            plan, notes=(*plan.notes, *unmatched(options, [("", plan.source)])), again=again
        )
    except DiffusersFolderError as error:
        if options.single_file:
            what = "--single-file is for one part of a diffusers pipeline: --subfolder transformer, or unet"
            raise PlanError(f"{source}: {what}") from error
        folder = open_diffusers(source, where)
    submodels = {
        name: single.plan_submodel(
            folder.place,
            replace(
                diffusers.for_submodel(name, options),
                skip_modules=diffusers.applying(options.skip_modules, name),
            ),
            place,
            pack=is_packed_by_default(name) and diffusers.is_included(name, options),
        )
        for name, place in folder.submodels.items()
    }
    parts = [(name, part.source) for name, part in submodels.items()]
    from nf4conv.report.card import read_front_matter  # importing a reader of YAML takes a moment

    front, complaint = read_front_matter(folder.folder / "README.md", folder.folder)
    return _checked(
        DiffusersPlan(folder, submodels, front, (*complaint, *unmatched(options, parts)))
    )


def _checked(plan: DiffusersPlan[QuantizationPlan]) -> DiffusersPlan[QuantizationPlan]:
    if not plan.totals().packed:
        raise PlanError(
            f"{plan.folder.place}: no tensor of this diffusers pipeline would be packed; "
            f"--dry-run shows why each is "
            "kept"
        )
    return plan


def second_opinion(plan: AnyQuantizationPlan) -> tuple[str, ...]:
    """What the installed transformers, if there is one, would decide otherwise than a plan by the
    rules: a line.

    It takes seconds to ask transformers. A diffusers pipeline is not its business.
    """
    if (
        not isinstance(plan, QuantizationPlan)
        or plan.options.plan_with != "rules"
        or find_spec("transformers") is None
    ):
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
    """Carry out a plan; arguments, result and errors as `quantize_checkpoint`."""
    started = time.perf_counter()
    run, progress, out = run or RunOptions(), progress or ignore, Path(out)
    if run.part is not None and push is not None and push.push_to_hub is not None:
        raise PlanError(
            "--push-to-hub does not go with --part, --ray or several GPUs: push what is made of "
            "all parts"
        )
    plan = plan_part(plan, run)
    if is_spread(run):
        return carry_out(plan, partial(execute_quantization, push=push), out, run, progress)
    if isinstance(plan, QuantizationPlan):
        check_apart(plan.source.folder, out)
        plan = single.prepared(plan, run)
        if plan.options.single_file:
            return single.write_one_file(plan, out, run, progress, push)
    else:
        check_apart(plan.folder.folder, out)
        submodels = {name: single.prepared(part, run) for name, part in plan.submodels.items()}
        plan = _checked(replace(plan, submodels=submodels))
    with _open_push(push, run) as repository:
        if isinstance(plan, QuantizationPlan):
            report = single.write_one(
                plan, out, run, progress, None if repository is None else repository.offer
            )
            format = plan.output.format
        else:
            report = diffusers.write_submodels(
                plan, out, run, progress, partial(_write, repository), partial(_card, plan)
            )
            format = next(iter(plan.submodels.values())).output.format
        address = None
        if repository is not None:
            address = repository.commit(out, f"Quantize to {format.quant_type} with nf4conv")
    return replace(report, pushed=address, seconds=time.perf_counter() - started)


def _open_push(push: PushOptions | None, run: RunOptions) -> "AbstractContextManager[Push | None]":
    """A repository to push to, before anything is computed, so that what is wrong with it is known
    at once.
    """
    if push is None or push.push_to_hub is None:
        return nullcontext()
    from nf4conv.output.push import Push  # importing huggingface_hub takes a while

    return Push(push.push_to_hub, token=push.token, public=push.public, overwrite=run.overwrite)


def _write(
    repository: "Push | None",
    plan: QuantizationPlan,
    folder: Path,
    run: RunOptions,
    progress: Callable[[int], None],
) -> QuantizeReport:
    """Carry out the plan of a submodel, whose folder's name stands before those of its files on the
    Hub.
    """
    offer = (
        None
        if repository is None
        else lambda name, path: repository.offer(f"{folder.name}/{name}", path)
    )
    return single.write_one(plan, folder, run, progress, offer)


def _card(plan: DiffusersPlan[QuantizationPlan], report: QuantizeReport) -> str:
    from nf4conv.report.card import (  # importing a reader of YAML takes a moment
        Figures,
        diffusers_card,
    )

    figures = {
        name: Figures(
            part.totals().bytes_before, diffusers.bytes_on_disk(Path(report.out), name, part)
        )
        for name, part in plan.submodels.items()
    }
    return diffusers_card(
        plan.front,
        plan.loading,
        {name: (part.source, part.output) for name, part in plan.submodels.items()},
        figures,
        report.verification,
        next(iter(plan.submodels.values())).options.base_model,
    )
