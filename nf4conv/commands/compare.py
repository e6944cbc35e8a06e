"""`nf4conv compare`: do two checkpoints or diffusers pipelines hold the same tensors, or how far are they apart?"""

from collections.abc import Callable
from pathlib import Path

from nf4conv.checkpoint.diffusers_folder import DiffusersFolder, open_diffusers
from nf4conv.checkpoint.header import TensorInfo
from nf4conv.checkpoint.source import Source, open_source
from nf4conv.commands.diffusers import for_submodel, is_included
from nf4conv.commands.output import ignore
from nf4conv.commands.single.compare import ComparisonPlan, execute, make_plan, pair_tensors, plan_one
from nf4conv.errors import DiffusersFolderError, NoDiffusersFolderError, PlanError
from nf4conv.options import CompareOptions, RunOptions, SourceOptions
from nf4conv.report.results import ComparisonReport
from nf4conv.report.tolerance import check_tolerance


def compare_checkpoints(
    a: str | Path,
    b: str | Path,
    options: CompareOptions | None = None,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    where: SourceOptions | None = None,
) -> ComparisonReport:
    """Compare two checkpoints, or two diffusers pipelines, tensor by tensor, whatever format each is in.

    Args:
        a: a folder, a weight file, or "org/name" on the Hugging Face Hub.
        b: another.
        options: what to look at, and what to let pass.
        run: how to use the machine.
        progress: told how many more bytes have been read, from any thread.
        where: revision, subfolder and the like, of both.

    Raises:
        SourceError: one of them cannot be read.
        PlanError: the request makes no sense, or only one of them is a diffusers pipeline.
    """
    return execute_comparison(plan_comparison(a, b, options, where), run, progress)


def plan_comparison(
    a: str | Path, b: str | Path, options: CompareOptions | None = None, where: SourceOptions | None = None
) -> ComparisonPlan:
    """Look at the headers of two checkpoints; torch is not imported.

    Arguments and errors as `compare_checkpoints`. The names of a diffusers pipeline's tensors begin with the submodel
    and a slash.
    """
    options = options or CompareOptions()
    check_tolerance(options.tolerance)
    try:
        return plan_one(a, b, options, where)
    except DiffusersFolderError:
        sides = tuple(_open(side, where) for side in (a, b))
    tensors: dict[str, tuple[TensorInfo | None, TensorInfo | None]] = {}
    parts: list[tuple[str, Source]] = []
    for name in dict.fromkeys((*sides[0].submodels, *sides[1].submodels)):
        if not is_included(name, options):
            continue
        first, second = (
            open_source(side.place, side.submodels[name]) if name in side.submodels else None for side in sides
        )
        parts += [(name, side) for side in (first, second) if side is not None]
        pairs = pair_tensors(first, second, for_submodel(name, options))
        tensors |= {f"{name}/{tensor}": pair for tensor, pair in pairs.items()}
    return make_plan(str(a), str(b), options, tensors, parts)


def _open(side: str | Path, where: SourceOptions | None) -> DiffusersFolder:
    try:
        return open_diffusers(side, where)
    except NoDiffusersFolderError as error:
        raise PlanError(f"a diffusers pipeline can only be compared with a diffusers pipeline: {error}") from error


def execute_comparison(
    plan: ComparisonPlan, run: RunOptions | None = None, progress: Callable[[int], None] | None = None
) -> ComparisonReport:
    """Carry out a plan; arguments, result and errors as `compare_checkpoints`."""
    return execute(plan, run or RunOptions(), progress or ignore)
