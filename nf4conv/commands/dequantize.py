"""`nf4conv dequantize`: turns a quantized checkpoint or diffusers pipeline into a plain one."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from nf4conv.commands.writing import AnyPlan, convert, describe, planned
from nf4conv.declaring import after_two_places
from nf4conv.errors import DiffusersFolderError, PlanError
from nf4conv.options import DequantizeOptions
from nf4conv.plan import dequantization
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.parts import plan_part
from nf4conv.report.results import PlanReport, RunReport
from nf4conv.sources.diffusers import DiffusersFolder, open_diffusers
from nf4conv.system.machine import uncollected


@after_two_places(DequantizeOptions)
def dequantize(source: str | Path, out: str | Path, options: DequantizeOptions) -> RunReport:
    """Decodes a 4-bit checkpoint or diffusers pipeline, exactly as bitsandbytes' CUDA library does.

    A run that was interrupted goes on where it stopped: run it again with the same arguments.

    Example:
        >>> nf4conv.dequantize("./Llama-3.1-8B-nf4", "./Llama-3.1-8B-again", dtype="float16")

    Args:
        source: a folder, a .safetensors file, or "org/name" on the Hugging Face Hub.
        out: the folder to write. It must be empty, or hold an interrupted run of the same plan.

    Returns:
        What was decoded and kept, sizes, times and memory.

    Raises:
        SourceError: the source cannot be read.
        OptionError: an option has a value that it cannot have.
        PlanError: the request cannot be met for this source.
        OutputError: `out` cannot be written. After this and any other error, `out` does not look
            like a finished checkpoint.
    """
    return convert(source, Path(out), options, make_plan)


@uncollected()
def dry_run(source: str | Path, options: DequantizeOptions) -> PlanReport:
    """Describes what decoding a checkpoint would do."""
    return describe(plan_part(planned(source, options, make_plan), options))


def make_plan(source: str | Path, options: DequantizeOptions) -> AnyPlan:
    """Plans a checkpoint, or each submodel of a diffusers pipeline, from headers and config alone.

    In globs for a pipeline, the name of a submodel and a slash may stand first.
    """
    try:
        plan = dequantization.plan_checkpoint(source, options, options)
    except DiffusersFolderError:
        return _plan_pipeline(source, open_diffusers(source, options), options)
    return replace(plan, again=partial(make_plan, source, replace(options, progress=None)))


def _plan_pipeline(
    source: str | Path, folder: DiffusersFolder, options: DequantizeOptions
) -> DiffusersPlan:
    """Plans a diffusers pipeline; raises a PlanError if nothing in it is quantized."""
    submodels = {}
    for name, place in folder.submodels.items():
        submodels[name] = dequantization.plan_submodel(folder.place, options, place)
    plan = DiffusersPlan(folder, submodels)
    if not plan.totals.decoded:
        raise PlanError(
            f"{source}: no submodel of this diffusers pipeline has a quantized weight to decode"
        )
    return plan
