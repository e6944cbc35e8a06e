"""`nf4conv quantize`: packs a checkpoint or a diffusers pipeline into bitsandbytes' 4 bits."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nf4conv.choose.experts import Experts
from nf4conv.choose.selection import unmatched
from nf4conv.commands.writing import AnyPlan, convert, describe, execute, planned
from nf4conv.declaring import after_one_place, after_two_places
from nf4conv.errors import DiffusersFolderError, PlanError
from nf4conv.options import QuantizeOptions, SourceOptions
from nf4conv.plan import diffusers, quantization
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.parts import plan_part
from nf4conv.plan.rows import PlanTotals, TensorRow
from nf4conv.plan.writing import WritingPlan, plan_unchanged
from nf4conv.report.advice import advice
from nf4conv.report.results import PlanReport, RunReport
from nf4conv.sources.adapters.merging import open_merged
from nf4conv.sources.diffusers import DiffusersFolder, is_packed_by_default, open_diffusers
from nf4conv.sources.opening import open_stored
from nf4conv.sources.original_card import read_front_matter
from nf4conv.system.machine import uncollected


@after_two_places(QuantizeOptions)
def quantize(source: str | Path, out: str | Path, options: QuantizeOptions) -> RunReport:
    """Quantizes a checkpoint to 4 bits; in a diffusers pipeline, each submodel by its own rules.

    A run that was interrupted goes on where it stopped: run it again with the same arguments.

    Example:
        >>> report = nf4conv.quantize("./Llama-3.1-8B", "./Llama-3.1-8B-nf4", verify=True)
        >>> print(report.totals.packed, "weights,", report.totals.bits_per_parameter, "bits each")

    Args:
        source: a folder, a .safetensors file, a torch pickle, or "org/name" on the Hugging Face
            Hub.
        out: the folder to write. It must be empty, or hold an interrupted run of the same plan.

    Returns:
        What was packed and kept, sizes, times and memory.

    Raises:
        SourceError: the source cannot be read.
        OptionError: an option has a value that it cannot have.
        PlanError: the request cannot be met for this source.
        OutputError: `out` cannot be written. After this and any other error, `out` does not look
            like a finished checkpoint.
        VerificationError: with `verify`, what was written is not what it should be.
    """
    return convert(source, Path(out), options, make_plan)


@dataclass(frozen=True)
class Plan:
    """Says what quantizing a checkpoint would do, and does it.

    Attributes:
        made: the plan of the checkpoint, or of each submodel of a diffusers pipeline.
        options: those that `execute` goes by.
    """

    made: AnyPlan
    options: QuantizeOptions

    @property
    def rows(self) -> tuple[TensorRow, ...]:
        """Says what becomes of each tensor, and why."""
        return tuple(self.made.rows())

    @property
    def totals(self) -> PlanTotals:
        """Counts tensors, parameters, bytes and files."""
        return self.made.totals

    def execute(self, out: str | Path) -> RunReport:
        """Carries the plan out. Arguments, results and errors are those of `quantize`."""
        return execute(self.made, Path(out), self.options)


@after_one_place(QuantizeOptions)
def plan_quantize(source: str | Path, options: QuantizeOptions) -> Plan:
    """Decides everything about a quantization from headers and config alone.

    No weight is read, and torch is not imported.

    Example:
        >>> plan = nf4conv.plan_quantize("./Llama-3.1-8B", blocksize=128)
        >>> print(plan.totals.bits_per_parameter)
        >>> plan.execute("./Llama-3.1-8B-nf4")

    Args:
        source: a folder, a .safetensors file, a torch pickle, or "org/name" on the Hugging Face
            Hub.

    Returns:
        What becomes of each tensor; `execute` writes it.

    Raises:
        SourceError: the source cannot be read.
        OptionError: an option has a value that it cannot have.
        PlanError: the request cannot be met for this source.
    """
    return Plan(plan_part(planned(source, options, make_plan), options), options)


@uncollected()
def dry_run(source: str | Path, options: QuantizeOptions) -> PlanReport:
    """Describes what quantizing a checkpoint would do."""
    return describe(plan_part(planned(source, options, make_plan), options))


# --- planning -----------------------------------------------------------------------------------


def make_plan(source: str | Path, options: QuantizeOptions) -> AnyPlan:
    """Plans a checkpoint, or each submodel of a diffusers pipeline, from headers and config alone.

    In globs for a pipeline, the name of a submodel and a slash may stand first.
    """
    try:
        plan = plan_checkpoint(source, options, options)
    except DiffusersFolderError as error:
        if options.calibrate is not None:
            raise PlanError(
                f"{source}: --calibrate is for models of transformers, one at a time: for a text "
                f"encoder --subfolder text_encoder; --scales search needs no text"
            ) from error
        pipeline = _plan_pipeline(open_diffusers(source, options), options)
        return replace(pipeline, complaints=(*pipeline.complaints, *advice(pipeline.jobs)))
    quantization.require_searched(source, [plan], options)
    notes = (*advice(plan.jobs), *plan.notes, *unmatched(options, [("", plan.source)]))
    again = partial(make_plan, source, replace(options, progress=None))
    return replace(plan, notes=notes, again=again)


def plan_checkpoint(
    source: str | Path, options: QuantizeOptions, where: SourceOptions
) -> WritingPlan:
    """Plans one checkpoint, or a submodel that is `where` in a pipeline.

    If the result is to be pushed, experts stay in 16 bits unless the options, or a source in 4
    bits, say otherwise: most who find the result on the Hub do not have nf4conv.

    Raises:
        DiffusersFolderError: the source is a diffusers pipeline.
    """
    with uncollected():
        opened = open_merged(source, where, options.lora)
        if options.push_to_hub is not None and options.moe is None:
            experts = Experts.gather(opened.tensors, opened.config or {})
            if experts.packs_by_default():
                options = replace(options, moe="portable")
        front, complaints = read_front_matter(opened.card)
        if options.calibrate is None:
            plan = quantization.plan_source(opened, options)
        else:
            from nf4conv.calibrate.request import plan_calibrated  # few runs need to import it

            plan = plan_calibrated(opened, options)
        return replace(plan, front=front, notes=(*plan.notes, *complaints))


def _plan_pipeline(folder: DiffusersFolder, options: QuantizeOptions) -> DiffusersPlan:
    """Plans a diffusers pipeline: each submodel by its own rules."""
    submodels = {}
    for name, place in folder.submodels.items():
        submodels[name] = _plan_submodel(folder, name, options, place)
    front, complaints = read_front_matter(folder.folder / "README.md")
    parts = [(name, part.source) for name, part in submodels.items()]
    plan = DiffusersPlan(folder, submodels, front, (*complaints, *unmatched(options, parts)))
    if not plan.totals.packed:
        raise PlanError(
            f"{folder.place}: no tensor of this diffusers pipeline would be packed; "
            f"--dry-run shows why each is kept"
        )
    quantization.require_searched(folder.place, list(submodels.values()), options)
    return plan


def _plan_submodel(
    folder: DiffusersFolder, name: str, options: QuantizeOptions, where: SourceOptions
) -> WritingPlan:
    """Plans a submodel; keeps its tensors as they are if nothing in it is packed."""
    mine = diffusers.for_submodel(name, options)
    if is_packed_by_default(name) and (mine.include or not options.include):
        plan = plan_checkpoint(folder.place, mine, where)
        if plan.packs_anything:
            return plan
    return plan_unchanged(open_stored(folder.place, where), mine)
