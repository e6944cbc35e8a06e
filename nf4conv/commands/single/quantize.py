"""Quantizing one checkpoint.

open_source ▸ select ▸ make_plan            headers and config only: this is all a dry run does
Workspace ▸ Pipeline(shard tasks)           every byte of every shard
auxiliary files ▸ index ▸ config.json       config.json last: it is what makes the folder a checkpoint
"""

import gc
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nf4conv.choose.selection import Keep, Pack, Selection, demote, select
from nf4conv.choose.unchanged import Stored, common_format, copied_from, small_parts, stored_format
from nf4conv.commands.complete import written
from nf4conv.commands.output import (
    WritingPlan,
    kept_as_stored,
    notes_on_links,
    read_front,
    write_checkpoint,
)
from nf4conv.errors import OutputError, PlanError, SourceError
from nf4conv.format.codebook import BLOCKSIZES
from nf4conv.format.layout import DTYPE_NAMES, ITEMSIZES, TAGS, Format
from nf4conv.models.config import checkpoint_dtype, quantized_config
from nf4conv.options import CHOICES, DTYPES, PushOptions, QuantizeOptions, RunOptions, SourceOptions
from nf4conv.plan.jobs import Job, PackJob, dominant_dtype, make_plan
from nf4conv.report.loading import advice, gpu_bytes
from nf4conv.report.results import QuantizeReport
from nf4conv.report.rows import PlanRow, QuantizationTotals, VerificationSummary
from nf4conv.run.engines import writing_engine
from nf4conv.run.shards import CastError, NonFiniteError
from nf4conv.sources.adapters.merging import open_merged
from nf4conv.sources.encodings.encoded import quantization_of
from nf4conv.sources.original_names import with_original_names, within_blocks
from nf4conv.sources.record import recorded_scales
from nf4conv.sources.source import Source, open_stored, read_together
from nf4conv.sources.tensors import TensorInfo


@dataclass(frozen=True)
class QuantizationPlan(WritingPlan):
    """What becomes of a checkpoint that is quantized."""

    command = "quantize"
    options: QuantizeOptions
    # source tensors that are kept because they hold NaN, infinity, or too much
    non_finite: frozenset[str] = frozenset()
    # of a diffusers pipeline, whose submodels get no card, and in some of which nothing is packed
    is_submodel: bool = False

    def decided(self) -> dict[str, Any]:
        """What was found while planning, which must be found again on resuming."""
        return {"tensors kept for NaN or infinity": sorted(self.non_finite)}

    def card(self, bytes_after: int, verified: VerificationSummary | None) -> str | None:
        """The model card; None for a submodel."""
        if self.is_submodel or self.options.single_file:
            return None
        from nf4conv.report.card import (  # importing a reader of YAML takes a moment
            Figures,
            model_card,
        )

        before = sum(tensor.nbytes for tensor in self.source.tensors)
        figures = Figures(before, bytes_after, verified)
        return model_card(
            self.source,
            self.whole,
            self.config,
            self.front,
            figures,
            self.loading,
            self.options.base_model,
        )

    def row(self, job: Job, file: str) -> PlanRow:
        """A weight that is packed, or a tensor that is kept; dtypes are those of the source."""
        shape = job.matrix.shape if isinstance(job, PackJob) else job.source.shape
        sizes = job.elements, job.source_bytes, job.nbytes
        return PlanRow(job.name, _action(job), job.reason, job.source.dtype, shape, *sizes, file)

    def totals(self) -> QuantizationTotals:
        packed = [isinstance(job, PackJob) for job in self.output.jobs]
        return QuantizationTotals(sum(packed), packed.count(False), *self.sizes)


def _action(job: Job) -> str:
    if isinstance(job, PackJob):
        return "stay" if job.stored else "pack"
    return "copy" if job.dtype == job.source.dtype else "cast"


def plan_one(
    source: str | Path, options: QuantizeOptions, where: SourceOptions | None
) -> QuantizationPlan:
    """As `plan_quantization` for one checkpoint; a diffusers pipeline is a DiffusersFolderError."""
    _check_options(options)
    was_enabled = gc.isenabled()
    # planning makes many small objects that live on: looking for dead ones takes a quarter of the
    # time
    gc.disable()
    try:
        opened = open_merged(source, where, options.lora)
        if options.single_file:
            opened = with_original_names(opened)
            options = within_blocks(opened, options)
        return _plan(opened, options, frozenset())
    finally:
        if was_enabled:
            gc.enable()


def _plan(opened: Source, options: QuantizeOptions, non_finite: frozenset[str]) -> QuantizationPlan:
    selection = _select(opened.tensors, opened.config or {}, options)
    if non_finite:
        selection = demote(selection, sorted(non_finite), opened.config or {})
    format = _format(opened, _dtype(opened, selection, options), options)
    selection = _storable(opened, selection, format)
    if options.single_file:  # what is not packed is often float32 for a reason, such as a VAE
        kept = {name: part for name, part in selection.decisions.items() if isinstance(part, Keep)}
        as_stored = {name: part._replace(keep_dtype=True) for name, part in kept.items()}
        selection = replace(selection, decisions={**selection.decisions, **as_stored})
    unchanged = _unchanged(opened, selection, format, options)
    output = make_plan(
        opened.tensors,
        selection.decisions,
        format,
        max_shard_size=options.max_shard_size,
        stem=opened.stem,
        unchanged=unchanged,
    )
    config = _new_config(opened, selection, format, options)
    front, complaint = read_front(opened)
    notes = (
        *opened.notes,
        *selection.lines,
        *_remarks(unchanged),
        *notes_on_links(opened),
        *complaint,
    )
    return QuantizationPlan(options, opened, output, config, notes, non_finite, front=front)


def _format(source: Source | None, dtype: str, options: QuantizeOptions) -> Format:
    """What is asked for; what is not asked for is as in the source, if that is in 4 bits."""
    stored = common_format(source.tensors) if source is not None else None
    default = stored or Format("nf4", 64, True, dtype)
    scales = (
        recorded_scales(source.folder)
        if source is not None and stored is not None
        else default.scales
    )
    return Format(
        options.quant_type or default.quant_type,
        options.blocksize or default.blocksize,
        default.double_quant if options.double_quant is None else options.double_quant,
        dtype,
        options.quant_storage or default.quant_storage,
        options.scales or scales,
    )


def _storable(source: Source, selection: Selection, format: Format) -> Selection:
    """The selection without weights whose bytes do not divide into what they are to be stored as."""
    size = ITEMSIZES[format.storage_tag]
    odd = [
        name
        for name, decision in (selection.decisions.items() if size > 1 else ())
        if isinstance(decision, Pack)
        and any(-(-math.prod(part.shape) // 2) % size for part in decision.matrices)
    ]
    why = f"its packed bytes do not divide into {format.quant_storage}"
    return demote(selection, odd, source.config or {}, why) if odd else selection


def _unchanged(
    source: Source, selection: Selection, format: Format, options: QuantizeOptions
) -> dict[str, Stored | str]:
    """Of the weights that are to be packed, and are in 4 bits already: what they are copied from,
    or why not.
    """
    packed = [
        (tensor, mine)
        for tensor in source.tensors
        if isinstance(selection.decisions[tensor.name], Pack)
        and (mine := stored_format(tensor)) is not None
    ]
    alike = (tensor for tensor, mine in packed if mine.decodes_like(format))
    small = read_together(source, [part for tensor in alike for part in small_parts(tensor)])
    is_searched = recorded_scales(source.folder) == "search"
    found: dict[str, Stored | str] = {}
    for tensor, _ in packed:
        dtype = DTYPE_NAMES[tensor.dtype]
        if options.dtype not in (None, dtype):
            found[tensor.name] = f"stored as {dtype}"
        elif is_searched and format.scales == "absmax":
            found[tensor.name] = "stored with searched scales"
        else:
            found[tensor.name] = copied_from(tensor, format, lambda part: small[part.name])
    return found


def _remarks(unchanged: Mapping[str, Stored | str]) -> Iterator[str]:
    anew = {name: why for name, why in unchanged.items() if isinstance(why, str)}
    if unchanged:
        yield f"of {len(unchanged):,} weights in 4 bits {len(unchanged) - len(anew):,} stay as they are, bit for bit"
    for name, why in list(anew.items())[:1]:
        yield f"{len(anew):,} weights are packed anew, such as {name}: {why}"


def plan_submodel(
    source: str, options: QuantizeOptions, where: SourceOptions, *, pack: bool
) -> QuantizationPlan:
    """The plan of a submodel of a diffusers pipeline; one in which nothing is packed keeps its
    tensors as they are.

    Arguments and errors as `plan_quantization`; `where` has the submodel as its subfolder, and
    `pack` says whether anything in it may be packed.
    """
    if pack:
        planned = plan_one(source, options, where)
        if any(isinstance(job, PackJob) for job in planned.output.jobs):
            return replace(planned, is_submodel=True)
    stored = open_stored(source, where)
    format = _format(None, "float32", options)
    output = kept_as_stored(stored, format, options.max_shard_size)
    return QuantizationPlan(
        options, stored, output, stored.config, notes_on_links(stored), is_submodel=True
    )


def _select(
    tensors: Sequence[TensorInfo], config: Mapping[str, Any], options: QuantizeOptions
) -> Selection:
    if options.plan_with == "rules":
        return select(tensors, config, options)
    from nf4conv.choose.skeleton import select_with_transformers  # importing torch takes seconds

    return select_with_transformers(tensors, config, options)


def _check_options(options: QuantizeOptions) -> None:
    for name, allowed in (*CHOICES.items(), ("blocksize", BLOCKSIZES)):
        value = getattr(options, name)
        if value is not None and value not in allowed:
            choices = ", ".join(map(str, allowed))
            raise PlanError(f"--{name.replace('_', '-')} {value}: expected one of {choices}")


def _dtype(source: Source, selection: Selection, options: QuantizeOptions) -> str:
    """What weights are cast to before they are packed, and other tensors stored in."""
    if options.dtype is not None:
        return options.dtype
    dtype = checkpoint_dtype(source.config or {}) or dominant_dtype(source.tensors)
    if dtype not in DTYPES:
        raise PlanError(
            f"{source.folder}/config.json: {dtype} is not a dtype that can be packed; give "
            f"--dtype {', '.join(DTYPES)}"
        )
    for tensor in source.tensors:
        if tensor.dtype == "F64" and isinstance(selection.decisions[tensor.name], Pack):
            raise PlanError(
                f"{tensor.file}: {tensor.name}: float64 cannot be packed; say what to cast it to: "
                f"--dtype "
                f"{', '.join(DTYPES)}"
            )
    return dtype


def _new_config(
    source: Source, selection: Selection, format: Format, options: QuantizeOptions
) -> Mapping[str, Any] | None:
    if source.config is None:
        return None
    before = (quantization_of(source.config) or {}).get("bnb_4bit_compute_dtype")
    default = (
        before if before in DTYPES else format.dtype if format.dtype != "float32" else "bfloat16"
    )
    return quantized_config(
        source.config,
        format,
        compute_dtype=options.compute_dtype or str(default),
        skip_modules=selection.skip_modules,
        dtype=None
        if "_class_name" in source.config
        else format.dtype,  # a key that diffusers does not know
    )


def write_one(
    plan: QuantizationPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    announce: Callable[[str, Path], None] | None = None,
) -> QuantizeReport:
    """Carry out the prepared plan of one checkpoint; `announce` is told each finished shard, by
    name and path.
    """

    def write() -> dict[str, Any]:
        engine = writing_engine(plan.output, run)
        return write_checkpoint(plan, out, run, progress, engine, announce, is_audited=run.verify)

    try:
        figures = written(plan, out, run, progress, write)
    except NonFiniteError as error:
        raise _describe_non_finite(error.job, plan, run) from error
    totals, loading = plan.totals(), plan.loading
    return QuantizeReport(
        **figures,
        packed=totals.packed,
        copied=totals.copied,
        parameters=totals.parameters,
        bytes_before=totals.bytes_before
        if plan.part
        else sum(tensor.nbytes for tensor in plan.source.tensors),
        bits_per_parameter=8 * figures["bytes_after"] / max(totals.parameters, 1),
        gpu_bytes=gpu_bytes(figures["bytes_after"]),
        loading="" if loading is None else loading.call(str(out)),
        advice=advice(plan.rows()),
    )


def write_one_file(
    plan: QuantizationPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    push: PushOptions | None,
) -> QuantizeReport:
    """Carry out a plan by way of a folder beside the file, which an interrupted run leaves to be
    resumed.
    """
    if run.checksum or (push is not None and push.push_to_hub is not None):
        raise PlanError("--single-file: --push-to-hub and --checksum are for folders")
    if out.suffix != ".safetensors":
        raise PlanError(f"{out}: --single-file writes one file, such as OUT.safetensors")
    if out.exists() and not run.overwrite:
        raise OutputError(f"{out}: exists; choose another file, or --overwrite")
    folder = out.with_name(f"{out.name}.unfinished")
    report = write_one(plan, folder, run, progress)
    (folder / plan.output.shards[0].name).replace(out)
    shutil.rmtree(folder)
    return replace(report, out=str(out))


def prepared(plan: QuantizationPlan, run: RunOptions) -> QuantizationPlan:
    """A plan to carry out: as it is, unless weights are to be looked through for NaN and infinity
    first.

    A PlanError says that nothing is left to pack.
    """
    if plan.options.non_finite == "keep":
        plan = _without_non_finite(plan, run)
    if not plan.is_submodel and not any(isinstance(job, PackJob) for job in plan.whole.jobs):
        raise PlanError(
            f"{plan.source}: no tensor of this checkpoint would be packed; --dry-run shows why "
            f"each is kept"
        )
    return plan


def _without_non_finite(plan: QuantizationPlan, run: RunOptions) -> QuantizationPlan:
    """The plan with every weight that holds NaN or infinity kept; takes a pass over the weights to
    find them.
    """
    from nf4conv.run.with_torch.scan import find_unpackable  # importing torch takes seconds

    jobs = [job for job in plan.output.jobs if isinstance(job, PackJob)]
    found = find_unpackable(jobs, plan.output.format, run, plan.source)
    if not found:
        return plan
    kept = _plan(plan.source, plan.options, frozenset(found))
    notes = tuple(
        f"{name}: kept unquantized, {count:,} values are {what}"
        for name, (count, what) in found.items()
    )
    return replace(kept, notes=kept.notes + notes, is_submodel=plan.is_submodel)


def _describe_non_finite(job: PackJob, plan: QuantizationPlan, run: RunOptions) -> SourceError:
    from nf4conv.run.with_torch.scan import find_unpackable  # importing torch takes seconds

    found = find_unpackable([job], plan.output.format, run, plan.source).get(job.source.name)
    if found is None:
        return CastError(job.source, TAGS[plan.output.format.dtype])
    return SourceError(
        f"{job.source.file}: {job.source.name}: {found[0]:,} of {job.source.elements:,} values "
        f"are {found[1]}; "
        "repair the checkpoint, or leave such tensors unquantized: --non-finite keep"
    )
