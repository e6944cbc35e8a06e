"""`nf4conv quantize`: packs a checkpoint or a diffusers pipeline into bitsandbytes' 4 bits.

plan ▸ open the repository to push to ▸ calibrate ▸ write ▸ commit what was uploaded
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from nf4conv.choose.experts import Experts
from nf4conv.choose.selection import unmatched
from nf4conv.commands.writing import (
    describe,
    tell_what_is_read,
    write_submodels,
)
from nf4conv.declaring import after_one_place, after_two_places
from nf4conv.errors import DiffusersFolderError, PlanError, SourceError, VerificationError
from nf4conv.format.units import size
from nf4conv.options import QuantizeOptions, SourceOptions, VerifyOptions
from nf4conv.output.writer import write_file
from nf4conv.plan import diffusers, quantization
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.parts import in_parts, plan_part
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.plan.rows import PlanTotals, TensorRow
from nf4conv.report.advice import advice
from nf4conv.report.loading import loading_of_plan, push_command
from nf4conv.report.results import PlanReport, RunReport, VerificationSummary
from nf4conv.run.checkpoint import ignore, require_apart, write_checkpoint
from nf4conv.run.device.protocol import NonFiniteError
from nf4conv.run.earlier import found_or_written
from nf4conv.run.parts import finish_without_source
from nf4conv.sources.adapters.merging import open_merged
from nf4conv.sources.diffusers import (
    DiffusersFolder,
    is_packed_by_default,
    open_diffusers,
)
from nf4conv.sources.opening import open_stored
from nf4conv.system.machine import uncollected

if TYPE_CHECKING:
    from nf4conv.output.push import Push

_log: Final = logging.getLogger(__name__)

AnyPlan: TypeAlias = QuantizationPlan | DiffusersPlan[QuantizationPlan]
"""Plan of one checkpoint, or of a diffusers pipeline."""


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
    try:
        plan = make_plan(source, options)
    except SourceError:
        # it is not needed if parts have made all files
        found = finish_without_source(Path(out), "quantize", options)
        if found is None:
            raise
        return found
    return execute(plan, Path(out), options)


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
        return self.made.totals()

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
    return Plan(plan_part(make_plan(source, options), options), options)


def dry_run(source: str | Path, options: QuantizeOptions) -> PlanReport:
    """Describes what quantizing a checkpoint would do."""
    return describe(plan_part(make_plan(source, options), options))


# --- planning -----------------------------------------------------------------------------------


def make_plan(source: str | Path, options: QuantizeOptions) -> AnyPlan:
    """Plans a checkpoint, or each submodel of a diffusers pipeline, from headers and config alone.

    In globs for a pipeline, the name of a submodel and a slash may stand first.
    """
    started = time.perf_counter()
    plan: AnyPlan
    try:
        plan = plan_checkpoint(source, options, options)
    except DiffusersFolderError as error:
        if options.calibrate is not None:
            raise PlanError(
                f"{source}: --calibrate is for models of transformers, one at a time: for a text "
                f"encoder --subfolder text_encoder; --scales search needs no text"
            ) from error
        plan = _plan_pipeline(open_diffusers(source, options), options)
        plan = replace(plan, complaints=(*plan.complaints, *advice(plan.jobs)))
    else:
        quantization.require_searched(source, [plan])
        notes = (*advice(plan.jobs), *plan.notes, *unmatched(options, [("", plan.source)]))
        again = partial(make_plan, source, replace(options, progress=None))
        plan = replace(plan, notes=notes, again=again)
    totals = plan.totals()
    _log.info(
        "planned %d tensors in %.1f s: %d packed, %d of them as they are, %d kept; %d files, %s",
        totals.packed + totals.copied,
        time.perf_counter() - started,
        totals.packed,
        totals.stay,
        totals.copied,
        totals.shards,
        size(totals.bytes_after),
    )
    return plan


def plan_checkpoint(
    source: str | Path, options: QuantizeOptions, where: SourceOptions
) -> QuantizationPlan:
    """Plans one checkpoint, or a submodel that is `where` in a pipeline.

    If the result is to be pushed, experts stay in 16 bits unless the options, or a source in 4
    bits, say otherwise: most who find the result on the Hub do not have nf4conv.

    Raises:
        DiffusersFolderError: the source is a diffusers pipeline.
    """
    from nf4conv.report.card import card_of  # importing YAML takes a moment

    with uncollected():
        opened = open_merged(source, where, options.lora)
        if options.push_to_hub is not None and options.moe is None:
            experts = Experts.gather(opened.tensors, opened.config or {})
            if experts.packs_by_default():
                options = replace(options, moe="portable")
        front, complaints = card_of(opened)
        if options.calibrate is None:
            plan = quantization.plan_source(opened, options)
        else:
            from nf4conv.calibrate.request import plan_calibrated  # few runs need to import it

            plan = plan_calibrated(opened, options)
        return replace(plan, front=front, notes=(*plan.notes, *complaints))


def _plan_pipeline(
    folder: DiffusersFolder, options: QuantizeOptions
) -> DiffusersPlan[QuantizationPlan]:
    """Plans a diffusers pipeline: each submodel by its own rules."""
    from nf4conv.sources.original_card import read_front_matter  # importing YAML takes a moment

    submodels = {}
    for name, place in folder.submodels.items():
        submodels[name] = _plan_submodel(folder, name, options, place)
    front, complaints = read_front_matter(folder.folder / "README.md")
    parts = [(name, part.source) for name, part in submodels.items()]
    plan = DiffusersPlan(folder, submodels, front, (*complaints, *unmatched(options, parts)))
    if not plan.totals().packed:
        raise PlanError(
            f"{folder.place}: no tensor of this diffusers pipeline would be packed; "
            f"--dry-run shows why each is kept"
        )
    quantization.require_searched(folder.place, list(submodels.values()))
    return plan


def _plan_submodel(
    folder: DiffusersFolder, name: str, options: QuantizeOptions, where: SourceOptions
) -> QuantizationPlan:
    """Plans a submodel; keeps its tensors as they are if nothing in it is packed."""
    mine = diffusers.for_submodel(name, options)
    if is_packed_by_default(name) and diffusers.is_included(name, options):
        plan = plan_checkpoint(folder.place, mine, where)
        if plan.packs_anything:
            return replace(plan, is_submodel=True)
    return quantization.plan_unchanged_submodel(open_stored(folder.place, where), mine)


# --- writing ------------------------------------------------------------------------------------


def execute(plan: AnyPlan, out: Path, options: QuantizeOptions) -> RunReport:
    """Carries out a plan, in as many processes as the options say, and uploads the result."""
    started = time.perf_counter()
    options = in_parts(plan, options, out)
    if options.is_spread:
        from nf4conv.commands.spread import carry_out  # few runs need to import it

        return carry_out(plan, execute, out, options)
    plan = plan_part(plan, options)
    tell_what_is_read(plan, options)
    source = plan.folder if isinstance(plan, DiffusersPlan) else plan.source
    require_apart(source.folder, out)
    if isinstance(plan, QuantizationPlan) and not plan.packs_anything:
        raise PlanError(
            f"{plan.source}: no tensor of this checkpoint would be packed; "
            f"--dry-run shows why each is kept"
        )
    with _open_push(options) as repository:
        if isinstance(plan, DiffusersPlan):
            report = _write_pipeline(plan, out, options, repository)
        else:
            offer = None if repository is None else repository.offer
            report = _write_one(plan, out, options, offer)
        if repository is not None:
            report = _pushed(report, repository, out, plan)
    return replace(report, seconds=time.perf_counter() - started)


def _write_one(
    plan: QuantizationPlan,
    out: Path,
    options: QuantizeOptions,
    announce: Callable[[str, Path], None] | None = None,
) -> RunReport:
    """Carries out the plan of one checkpoint; tells `announce` name and path of finished shards."""
    progress = options.progress or ignore

    def write() -> RunReport:
        card = partial(_card, plan)
        if plan.calibration is None:
            return write_checkpoint(plan, out, options, progress, card, announce)
        made = plan.calibration.carry_out(plan, out, options, progress)
        after = replace(options, overwrite=False)
        return write_checkpoint(made, out, after, progress, card, announce)

    try:
        report = found_or_written(plan, out, options, progress, write)
    except NonFiniteError as error:
        from nf4conv.run.tasks.scan import unpackable  # only few runs need to import it

        raise unpackable(error.job, plan.output.format, options, plan.source) from error
    if plan.part is None and report.already_complete and options.verify:
        _verify_again(plan, out, options)
    return _with_commands(report, plan)


def _card(plan: AnyPlan, bytes_after: int, verified: VerificationSummary | None) -> str | None:
    """Writes the model card; None for a submodel."""
    if isinstance(plan, QuantizationPlan) and plan.is_submodel:
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


def _verify_again(plan: QuantizationPlan, out: Path, options: QuantizeOptions) -> None:
    """Compares a result that was complete before with its source, byte by byte.

    Raises:
        VerificationError: it is not what quantizing the source gives.
    """
    from nf4conv.commands.verify import verify_result  # few runs need to import it

    required = VerifyOptions(
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
    plan: DiffusersPlan[QuantizationPlan],
    out: Path,
    options: QuantizeOptions,
    repository: "Push | None",
) -> RunReport:
    """Carries out the plan of a pipeline. On the Hub, folders stand before the names of files."""

    def write(part: QuantizationPlan, folder: Path, options: QuantizeOptions) -> RunReport:
        if repository is None:
            return _write_one(part, folder, options)
        offer = repository.offer
        return _write_one(
            part, folder, options, lambda name, path: offer(f"{folder.name}/{name}", path)
        )

    def card(report: RunReport) -> str | None:
        return _card(plan, report.totals.bytes_after, report.verification)

    return _with_commands(write_submodels(plan, out, options, write, card), plan)


# --- uploading ----------------------------------------------------------------------------------


def _open_push(options: QuantizeOptions) -> "AbstractContextManager[Push | None]":
    """Opens the repository to upload to, so that what is wrong with it is known at once."""
    if options.push_to_hub is None:
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

    The code of the card loads the model from the repository from then on.
    """
    from nf4conv.report.card import with_repository  # importing YAML takes a moment

    first = next(iter(plan.submodels.values())) if isinstance(plan, DiffusersPlan) else plan
    loading = loading_of_plan(plan)
    card = out / "README.md"
    if loading is not None:
        report = replace(report, loading=loading.code(repository.repo))
        if card.is_file():
            for left in out.glob(".README.md.*.partial"):  # by a run that was killed just here
                left.unlink()
            text = with_repository(card.read_text(encoding="utf-8"), loading, repository.repo)
            write_file(card, [text.encode()])
    quant_type = first.output.format.quant_type
    address = repository.commit(out, f"Quantize to {quant_type} with nf4conv")
    return replace(report, pushed=address, push="")
