"""`nf4conv dequantize`: a 4-bit bitsandbytes checkpoint or diffusers pipeline in, a plain one out.

The source presents packed weights as the float tensors that they stand for
(sources/encodings/encoded.py), so all that is left to do is to store them as such, and to take the
quantization out of config.json. Weights that are to stay in 4 bits are copied as they are, all
their tensors into one shard.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from nf4conv.choose.evidence import Evidence
from nf4conv.choose.selection import (
    Keep,
    Pack,
    PackedMatrix,
    is_wanted,
    select,
    unmatched,
    with_skip_list,
)
from nf4conv.commands import output
from nf4conv.commands.complete import written
from nf4conv.commands.diffusers import DiffusersPlan, for_submodel, is_included, write_submodels
from nf4conv.commands.output import WritingPlan
from nf4conv.commands.parts import plan_part
from nf4conv.commands.spread import carry_out, is_spread
from nf4conv.errors import DiffusersFolderError, PlanError
from nf4conv.format.layout import TAGS, Format
from nf4conv.models.config import plain_config, without_quantization
from nf4conv.models.module_names import ModuleNames
from nf4conv.options import DTYPES, DequantizeOptions, QuantizeOptions, RunOptions, SourceOptions
from nf4conv.plan.jobs import FLOAT_TAGS, CopyJob, Job, arrange, dominant_dtype
from nf4conv.report.results import DequantizeReport
from nf4conv.report.rows import DequantizationTotals, PlanRow, VerificationSummary
from nf4conv.run.engines import writing_engine
from nf4conv.sources.adapters.merging import open_merged
from nf4conv.sources.diffusers_folder import open_diffusers
from nf4conv.sources.source import Source, open_source, open_stored
from nf4conv.sources.tensors import is_in_4_bits

_STAYS: Final = "stays in 4 bits"
_KEPT: Final = "not quantized"
_MERGED: Final = "merged with an adapter"


@dataclass(frozen=True)
class DequantizationPlan(WritingPlan):
    """What becomes of a 4-bit checkpoint; it gets no card, because its original's says all there
    is.

    Unless adapters are merged into it.
    """

    command = "dequantize"
    options: DequantizeOptions

    def row(self, job: Job, file: str) -> PlanRow:
        """A weight that is decoded, or a tensor that is kept; dtypes are those of the output."""
        assert isinstance(job, CopyJob)
        sizes = job.elements, job.source_bytes, job.nbytes
        return PlanRow(
            job.name, _action(job), job.reason, job.dtype, job.source.shape, *sizes, file
        )

    def card(self, bytes_after: int, verified: VerificationSummary | None) -> str | None:  # noqa: ARG002
        """The model card of a merged model; None for any other."""
        if not self.source.adapters:
            return None
        from nf4conv.report.card import merged_card  # importing a reader of YAML takes a moment

        return merged_card(self.source, self.whole, self.loading, self.front)

    def totals(self) -> DequantizationTotals:
        decoded = [job.source.encoding is not None for job in self.output.jobs]
        return DequantizationTotals(sum(decoded), decoded.count(False), *self.sizes)


AnyDequantizationPlan: TypeAlias = DequantizationPlan | DiffusersPlan[DequantizationPlan]
"""Of one checkpoint, or of a diffusers pipeline."""


def dequantize_checkpoint(
    source: str | Path,
    out: str | Path,
    options: DequantizeOptions | None = None,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    where: SourceOptions | None = None,
) -> DequantizeReport:
    """Decode a 4-bit checkpoint, value for value as bitsandbytes' CUDA library does; a diffusers
    pipeline, too.

    A rerun after an interruption keeps the shards that are finished and ends in the same bytes.

    Args:
        source: a folder, a .safetensors file, or "org/name" on the Hugging Face Hub.
        out: the folder to write; it must be empty, or hold an interrupted run with the same plan.
        options: what to make of the checkpoint.
        run: how to use the machine.
        progress: told how many more source bytes have been read, from any thread.
        where: revision, subfolder and the like.

    Raises:
        SourceError, PlanError: the source cannot be read, or the request cannot be met for it.
        OutputError: `out` cannot be written; as after any error, it does not look like a finished
            checkpoint.
    """
    return execute_dequantization(plan_dequantization(source, options, where), out, run, progress)


def plan_dequantization(
    source: str | Path, options: DequantizeOptions | None = None, where: SourceOptions | None = None
) -> AnyDequantizationPlan:
    """Decide everything about a dequantization from headers, quant states and config; torch is not
    imported.

    Arguments and errors as `dequantize_checkpoint`; a source in which nothing is in 4 bits is a
    PlanError. Globs for a diffusers pipeline may begin with the name of a submodel and a slash.
    """
    options = options or DequantizeOptions()
    try:
        single = _plan_one(source, options, where)
        again = partial(plan_dequantization, source, options, where)
        return replace(
            single, notes=(*single.notes, *unmatched(options, [("", single.source)])), again=again
        )
    except DiffusersFolderError:
        folder = open_diffusers(source, where)
    submodels = {
        name: _plan_submodel(
            folder.place, for_submodel(name, options), place, decode=is_included(name, options)
        )
        for name, place in folder.submodels.items()
    }
    parts = [(name, part.source) for name, part in submodels.items()]
    plan = DiffusersPlan(folder, submodels, complaints=tuple(unmatched(options, parts)))
    if not plan.totals().decoded:
        raise PlanError(
            f"{source}: no submodel of this diffusers pipeline has a weight in 4 bits to decode"
        )
    return plan


def execute_dequantization(
    plan: AnyDequantizationPlan,
    out: str | Path,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> DequantizeReport:
    """Carry out a plan; arguments, result and errors as `dequantize_checkpoint`."""
    started = time.perf_counter()
    run, progress, out = run or RunOptions(), progress or output.ignore, Path(out)
    plan = plan_part(plan, run)
    if is_spread(run):
        return carry_out(plan, execute_dequantization, out, run, progress)
    if isinstance(plan, DequantizationPlan):
        report = _write_one(plan, out, run, progress)
    else:
        output.check_apart(plan.folder.folder, out)
        report = write_submodels(plan, out, run, progress, _write_one, lambda _: None)
    return replace(report, seconds=time.perf_counter() - started)


def _action(job: CopyJob) -> str:
    if job.source.encoding is not None:
        return "decode" if job.source.unmerged is job.source else "merge"
    return "copy" if job.dtype == job.source.dtype else "cast"


def _plan_one(
    source: str | Path, options: DequantizeOptions, where: SourceOptions | None
) -> DequantizationPlan:
    """As `plan_dequantization` for one checkpoint; a diffusers pipeline is a DiffusersFolderError."""
    if options.dtype not in (None, *DTYPES):
        raise PlanError(f"--dtype {options.dtype}: expected one of {', '.join(DTYPES)}")
    opened = open_merged(source, where, options.lora)
    packed = [tensor for tensor in opened.tensors if is_in_4_bits(tensor)]
    if not packed and not options.lora:
        raise PlanError(f"{source}: no tensor of this checkpoint is in bitsandbytes' 4 bits")
    wanted = {
        tensor.name for tensor in packed if is_wanted(tensor.name, options.include, options.exclude)
    }
    if packed and not wanted:
        raise PlanError(f"{source}: --include and --exclude leave no weight to decode")
    config, still_packed = _new_config(opened, {tensor.name for tensor in packed} - wanted, options)
    groups = list(_groups(opened, still_packed, options))
    dtype = options.dtype or dominant_dtype([job.source for group in groups for job in group])
    files = arrange(
        groups,
        Format("nf4", 64, False, dtype),
        max_shard_size=options.max_shard_size,
        stem=opened.stem,
    )
    if config is not None and not still_packed:
        config = (
            without_quantization(config) if "_class_name" in config else plain_config(config, dtype)
        )
    front, complaint = output.read_front(opened) if options.lora else ({}, ())
    notes = (*(opened.notes if options.lora else ()), *output.notes_on_links(opened), *complaint)
    return DequantizationPlan(options, opened, files, config, notes, front=front)


def _plan_submodel(
    source: str, options: DequantizeOptions, where: SourceOptions, *, decode: bool
) -> DequantizationPlan:
    """The plan of a submodel of a diffusers pipeline; one without weights to decode keeps its
    tensors as they are.

    Arguments and errors as `plan_dequantization`; `where` has the submodel as its subfolder, and
    `decode` says whether anything in it is wanted.
    """
    wanted = (
        tensor
        for tensor in open_source(source, where).tensors
        if is_in_4_bits(tensor) and is_wanted(tensor.name, options.include, options.exclude)
    )
    if decode and any(wanted):
        return _plan_one(source, options, where)
    stored = open_stored(source, where)
    format = Format("nf4", 64, False, dominant_dtype(stored.tensors))
    files = output.kept_as_stored(stored, format, options.max_shard_size)
    return DequantizationPlan(options, stored, files, stored.config, output.notes_on_links(stored))


def _new_config(
    source: Source, packed: set[str], options: DequantizeOptions
) -> tuple[Mapping[str, Any] | None, frozenset[str]]:
    """The config with a skip list for what stays packed, and what does: what a loader could not
    tell is decoded too.
    """
    if source.config is None or not packed:
        return source.config, frozenset(packed)
    if options.dtype is not None:
        raise PlanError(
            "--dtype changes all tensors, but --include or --exclude leaves weights in 4 bits"
        )
    rules = select(source.tensors, source.config, QuantizeOptions()).decisions
    decisions: dict[str, Pack | Keep] = {}
    for tensor in source.tensors:
        rule = rules[tensor.name]
        if tensor.name in packed:
            rows = tensor.shape[0]
            decisions[tensor.name] = Pack(
                (PackedMatrix(tensor.name, (rows, tensor.elements // rows)),), _STAYS
            )
        elif isinstance(rule, Pack) or is_in_4_bits(tensor):
            decisions[tensor.name] = Keep(_KEPT, is_linear=True)
        else:
            decisions[tensor.name] = rule
    selection = with_skip_list(decisions, ModuleNames.of(source.config), ())
    config = dict(source.config)
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        config["quantization_config"] = dict(quantization) | {
            "llm_int8_skip_modules": list(selection.skip_modules)
        }
    still = (name for name, decision in selection.decisions.items() if isinstance(decision, Pack))
    return config, frozenset(still)


def _groups(
    source: Source, still_packed: frozenset[str], options: DequantizeOptions
) -> Iterator[list[CopyJob]]:
    evidence = Evidence.gather(source.tensors, source.config or {})
    for tensor in source.tensors:
        if tensor.name in still_packed and tensor.encoding is not None:
            if tensor.unmerged is not tensor:
                raise PlanError(
                    f"{tensor.name}: --include or --exclude leaves it in 4 bits, but an adapter "
                    f"changes it"
                )
            yield [CopyJob(part, part.dtype, _STAYS) for _, part in tensor.encoding.parts]
            continue
        decoded = tensor.encoding is not None
        dtype = tensor.dtype
        if (
            options.dtype is not None
            and dtype in FLOAT_TAGS
            and not evidence.is_float32_by_design(tensor)
        ):
            dtype = TAGS[options.dtype]
        # decoded to what it is stored in, not by way of another dtype, which would round twice
        reason = _MERGED if tensor.unmerged is not tensor else "decoded" if decoded else _KEPT
        yield [CopyJob(tensor._replace(dtype=dtype) if decoded else tensor, dtype, reason)]


def _write_one(
    plan: DequantizationPlan, out: Path, run: RunOptions, progress: Callable[[int], None]
) -> DequantizeReport:
    """Carry out the plan of one checkpoint."""

    def write() -> dict[str, Any]:
        engine = writing_engine(plan.output, run)
        return output.write_checkpoint(plan, out, run, progress, engine)

    figures, totals = written(plan, out, run, progress, write), plan.totals()
    return DequantizeReport(
        **figures, decoded=totals.decoded, copied=totals.copied, bytes_before=totals.bytes_before
    )
