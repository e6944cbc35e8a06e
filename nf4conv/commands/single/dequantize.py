"""Dequantizing one checkpoint: 4-bit bitsandbytes weights in, plain ones out, which load without bitsandbytes.

The source presents packed weights as the float tensors that they stand for (checkpoint/encoded.py), so all that is left
to do is to store them as such, and to take the quantization out of config.json. Weights that are to stay in 4 bits are
copied as they are, all their tensors into one shard.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nf4conv.checkpoint.config import plain_config, without_quantization
from nf4conv.checkpoint.evidence import Evidence
from nf4conv.checkpoint.header import is_in_4_bits
from nf4conv.checkpoint.merging import open_merged
from nf4conv.checkpoint.module_names import ModuleNames
from nf4conv.checkpoint.plan import FLOAT_TAGS, CopyJob, Job, arrange, dominant_dtype
from nf4conv.checkpoint.selection import Keep, Pack, PackedMatrix, is_wanted, select, with_skip_list
from nf4conv.checkpoint.source import Source, open_source, open_stored
from nf4conv.commands.complete import finished_earlier
from nf4conv.commands.output import WritingPlan, kept_as_stored, notes_on_links, read_front, write_checkpoint
from nf4conv.errors import PlanError
from nf4conv.format.layout import TAGS, Format
from nf4conv.options import DTYPES, DequantizeOptions, QuantizeOptions, RunOptions, SourceOptions
from nf4conv.pipeline.engines import unpacking_engine
from nf4conv.report.results import DequantizeReport
from nf4conv.report.rows import DequantizationTotals, PlanRow, VerificationSummary

_STAYS: Final = "stays in 4 bits"
_KEPT: Final = "not quantized"
_MERGED: Final = "merged with an adapter"


@dataclass(frozen=True)
class DequantizationPlan(WritingPlan):
    """What becomes of a 4-bit checkpoint; it gets no card, because its original's says all there is.

    Unless adapters are merged into it.
    """

    command = "dequantize"
    options: DequantizeOptions

    def row(self, job: Job, file: str) -> PlanRow:
        """A weight that is decoded, or a tensor that is kept; dtypes are those of the output."""
        assert isinstance(job, CopyJob)
        sizes = job.elements, job.source_bytes, job.nbytes
        return PlanRow(job.name, _action(job), job.reason, job.dtype, job.source.shape, *sizes, file)

    def card(self, bytes_after: int, verified: VerificationSummary | None) -> str | None:  # noqa: ARG002
        """The model card of a merged model; None for any other."""
        if not self.source.adapters:
            return None
        from nf4conv.report.card import merged_card  # importing a reader of YAML takes a moment

        return merged_card(self.source, self.whole, self.loading, self.front)

    def totals(self) -> DequantizationTotals:
        jobs = list(self.output.jobs)
        decoded = sum(job.source.encoding is not None for job in jobs)
        return DequantizationTotals(
            decoded=decoded,
            copied=len(jobs) - decoded,
            shards=len(self.output.shards),
            parameters=sum(job.elements for job in jobs),
            bytes_before=sum(job.source_bytes for job in jobs),
            bytes_after=self.output.largest_size,
        )


def _action(job: CopyJob) -> str:
    if job.source.encoding is not None:
        return "decode" if job.source.unmerged is job.source else "merge"
    return "copy" if job.dtype == job.source.dtype else "cast"


def plan_one(source: str | Path, options: DequantizeOptions, where: SourceOptions | None) -> DequantizationPlan:
    """As `plan_dequantization` for one checkpoint; a diffusers pipeline is a DiffusersFolderError."""
    if options.dtype not in (None, *DTYPES):
        raise PlanError(f"--dtype {options.dtype}: expected one of {', '.join(DTYPES)}")
    opened = open_merged(source, where, options.lora)
    packed = [tensor for tensor in opened.tensors if is_in_4_bits(tensor)]
    if not packed and not options.lora:
        raise PlanError(f"{source}: no tensor of this checkpoint is in bitsandbytes' 4 bits")
    wanted = {tensor.name for tensor in packed if is_wanted(tensor.name, options.include, options.exclude)}
    if packed and not wanted:
        raise PlanError(f"{source}: --include and --exclude leave no weight to decode")
    config, still_packed = _new_config(opened, {tensor.name for tensor in packed} - wanted, options)
    groups = list(_groups(opened, still_packed, options))
    dtype = options.dtype or dominant_dtype([job.source for group in groups for job in group])
    output = arrange(groups, Format("nf4", 64, False, dtype), max_shard_size=options.max_shard_size, stem=opened.stem)
    if config is not None and not still_packed:
        config = without_quantization(config) if "_class_name" in config else plain_config(config, dtype)
    front, complaint = read_front(opened) if options.lora else ({}, ())
    notes = (*(opened.notes if options.lora else ()), *notes_on_links(opened), *complaint)
    return DequantizationPlan(options, opened, output, config, notes, front=front)


def plan_submodel(source: str, options: DequantizeOptions, where: SourceOptions, *, decode: bool) -> DequantizationPlan:
    """The plan of a submodel of a diffusers pipeline; one without weights to decode keeps its tensors as they are.

    Arguments and errors as `plan_dequantization`; `where` has the submodel as its subfolder, and `decode` says whether
    anything in it is wanted.
    """
    wanted = (
        tensor
        for tensor in open_source(source, where).tensors
        if is_in_4_bits(tensor) and is_wanted(tensor.name, options.include, options.exclude)
    )
    if decode and any(wanted):
        return plan_one(source, options, where)
    stored = open_stored(source, where)
    format = Format("nf4", 64, False, dominant_dtype(stored.tensors))
    output = kept_as_stored(stored, format, options.max_shard_size)
    return DequantizationPlan(options, stored, output, stored.config, notes_on_links(stored))


def _new_config(
    source: Source, packed: set[str], options: DequantizeOptions
) -> tuple[Mapping[str, Any] | None, frozenset[str]]:
    """The config with a skip list for what stays packed, and what does: what a loader could not tell is decoded too."""
    if source.config is None or not packed:
        return source.config, frozenset(packed)
    if options.dtype is not None:
        raise PlanError("--dtype changes all tensors, but --include or --exclude leaves weights in 4 bits")
    rules = select(source.tensors, source.config, QuantizeOptions()).decisions
    decisions: dict[str, Pack | Keep] = {}
    for tensor in source.tensors:
        rule = rules[tensor.name]
        if tensor.name in packed:
            rows = tensor.shape[0]
            decisions[tensor.name] = Pack((PackedMatrix(tensor.name, (rows, tensor.elements // rows)),), _STAYS)
        elif isinstance(rule, Pack) or is_in_4_bits(tensor):
            decisions[tensor.name] = Keep(_KEPT, is_linear=True)
        else:
            decisions[tensor.name] = rule
    selection = with_skip_list(decisions, ModuleNames.of(source.config), ())
    config = dict(source.config)
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        config["quantization_config"] = dict(quantization) | {"llm_int8_skip_modules": list(selection.skip_modules)}
    still = (name for name, decision in selection.decisions.items() if isinstance(decision, Pack))
    return config, frozenset(still)


def _groups(source: Source, still_packed: frozenset[str], options: DequantizeOptions) -> Iterator[list[CopyJob]]:
    evidence = Evidence.gather(source.tensors, source.config or {})
    for tensor in source.tensors:
        if tensor.name in still_packed and tensor.encoding is not None:
            if tensor.unmerged is not tensor:
                raise PlanError(f"{tensor.name}: --include or --exclude leaves it in 4 bits, but an adapter changes it")
            yield [CopyJob(part, part.dtype, _STAYS) for _, part in tensor.encoding.parts]
            continue
        decoded = tensor.encoding is not None
        dtype = tensor.dtype
        if options.dtype is not None and dtype in FLOAT_TAGS and not evidence.is_float32_by_design(tensor):
            dtype = TAGS[options.dtype]
        # decoded to what it is stored in, not by way of another dtype, which would round twice
        reason = _MERGED if tensor.unmerged is not tensor else "decoded" if decoded else _KEPT
        yield [CopyJob(tensor._replace(dtype=dtype) if decoded else tensor, dtype, reason)]


def write_one(
    plan: DequantizationPlan, out: Path, run: RunOptions, progress: Callable[[int], None]
) -> DequantizeReport:
    """Carry out the plan of one checkpoint."""
    figures, totals = finished_earlier(plan, out, run, progress), plan.totals()
    if figures is None:
        engine = unpacking_engine(plan.output, run, is_cast=plan.options.dtype is not None)
        figures = write_checkpoint(plan, out, run, progress, engine)
    return DequantizeReport(**figures, decoded=totals.decoded, copied=totals.copied, bytes_before=totals.bytes_before)
