"""Quantizing one checkpoint.

open_source ▸ select ▸ make_plan            headers and config only: this is all a dry run does
Workspace ▸ Pipeline(shard tasks)           every byte of every shard
auxiliary files ▸ index ▸ config.json       config.json last: it is what makes the folder a checkpoint
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from nf4conv.checkpoint.auxiliary import auxiliary_files
from nf4conv.checkpoint.config import checkpoint_dtype, quantized_config
from nf4conv.checkpoint.header import TensorInfo
from nf4conv.checkpoint.plan import TAGS, Format, PackJob, Plan, dominant_dtype, make_plan
from nf4conv.checkpoint.selection import Keep, Pack, Selection, demote, select
from nf4conv.checkpoint.source import Source, open_source, open_stored
from nf4conv.checkpoint.workspace import Workspace
from nf4conv.commands.output import check_apart, plan_fingerprint, source_fingerprint, write_checkpoint
from nf4conv.errors import PlanError, SourceError
from nf4conv.format.codebook import BLOCKSIZES, CODEBOOKS
from nf4conv.options import DTYPES, QuantizeOptions, RunOptions, SourceOptions
from nf4conv.pipeline.engines import make_audit, packing_engine
from nf4conv.pipeline.loop import MemoryUse, Pipeline, make_pipeline
from nf4conv.pipeline.shards import Audit, CastError, NonFiniteError
from nf4conv.report.results import QuantizeReport
from nf4conv.report.rows import PlanRow, QuantizationTotals, VerificationSummary


@dataclass(frozen=True)
class QuantizationPlan:
    """Everything that is known before a byte is read.

    Attributes:
        options: what was asked for.
        source: the checkpoint.
        output: the output files.
        config: the content of the output's config.json; None when the source has none.
        auxiliary: files that are copied beside the weights, relative to the source's folder.
        non_finite: source tensors that are kept because they hold NaN or infinity.
        notes: what the user should know.
        is_submodel: of a diffusers pipeline, whose submodels get no card, and in some of which nothing is packed.
    """

    options: QuantizeOptions
    source: Source
    output: Plan
    config: Mapping[str, Any] | None
    auxiliary: tuple[PurePosixPath, ...]
    non_finite: frozenset[str]
    notes: tuple[str, ...]
    is_submodel: bool = False

    def card(self, bytes_after: int, verified: VerificationSummary | None) -> str | None:
        """The model card; None for a submodel."""
        if self.is_submodel:
            return None
        from nf4conv.report.card import Figures, model_card  # importing a reader of YAML takes a moment

        before = sum(tensor.nbytes for tensor in self.source.tensors)
        return model_card(self.source, self.output, self.config, Figures(before, bytes_after, verified))

    def rows(self) -> list[PlanRow]:
        """One for each weight that is packed and each tensor that is kept."""
        return [
            PlanRow(
                name=job.name,
                action="pack" if isinstance(job, PackJob) else "copy" if job.dtype == job.source.dtype else "cast",
                reason=job.reason,
                dtype=job.source.dtype,
                shape=job.matrix.shape if isinstance(job, PackJob) else job.source.shape,
                bytes_in=job.source_bytes,
                bytes_out=job.nbytes,
                file=shard.name,
            )
            for shard in self.output.shards
            for job in shard.jobs
        ]

    def totals(self) -> QuantizationTotals:
        jobs = list(self.output.jobs)
        packed = sum(isinstance(job, PackJob) for job in jobs)
        return QuantizationTotals(
            packed=packed,
            copied=len(jobs) - packed,
            shards=len(self.output.shards),
            parameters=sum(job.elements for job in jobs),
            bytes_in=sum(job.source_bytes for job in jobs),
            bytes_out=self.output.largest_size,
        )


def plan_one(source: str | Path, options: QuantizeOptions, where: SourceOptions | None) -> QuantizationPlan:
    """Decide everything about the quantization of one checkpoint.

    Raises:
        SourceError, PlanError: as `plan_quantization`; a diffusers pipeline is a DiffusersFolderError.
    """
    _check_options(options)
    with _no_garbage_collection():
        return _plan(open_source(source, where), options, frozenset())


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Planning makes many small objects that all live on: looking for dead ones takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan(opened: Source, options: QuantizeOptions, non_finite: frozenset[str]) -> QuantizationPlan:
    config = opened.config or {}
    selection = _select(opened.tensors, config, options)
    if non_finite:
        selection = demote(selection, sorted(non_finite), config)
    dtype = _dtype(opened, selection, options)
    output = make_plan(
        opened.tensors,
        selection.decisions,
        Format(options.quant_type, options.blocksize, options.double_quant, dtype),
        max_shard_size=options.max_shard_size,
        stem=opened.stem,
    )
    return QuantizationPlan(
        options=options,
        source=opened,
        output=output,
        config=_new_config(opened, selection, output.format, options),
        auxiliary=() if opened.config is None else auxiliary_files(opened.folder),
        non_finite=non_finite,
        notes=opened.notes + selection.lines,
    )


def plan_submodel(source: str, options: QuantizeOptions, where: SourceOptions, *, pack: bool) -> QuantizationPlan:
    """The plan of a submodel of a diffusers pipeline; one in which nothing is packed keeps its tensors as they are.

    Args:
        source: the pipeline's folder, or its name on the Hub.
        options: what to make of it.
        where: its subfolder is the submodel.
        pack: whether anything in it may be packed.

    Raises:
        SourceError, PlanError: as `plan_quantization`.
    """
    if pack:
        planned = plan_one(source, options, where)
        if any(isinstance(job, PackJob) for job in planned.output.jobs):
            return replace(planned, is_submodel=True)
    stored = open_stored(source, where)
    kept = Keep("the submodel stays as it is", keep_dtype=True)
    output = make_plan(
        stored.tensors,
        dict.fromkeys((tensor.name for tensor in stored.tensors), kept),
        Format(options.quant_type, options.blocksize, options.double_quant, "float32"),
        max_shard_size=options.max_shard_size,
        stem=stored.stem,
    )
    auxiliary = () if stored.config is None else auxiliary_files(stored.folder)
    return QuantizationPlan(options, stored, output, stored.config, auxiliary, frozenset(), stored.notes, True)


def _select(tensors: Sequence[TensorInfo], config: Mapping[str, Any], options: QuantizeOptions) -> Selection:
    if options.plan_with == "rules":
        return select(tensors, config, options)
    from nf4conv.commands.skeleton import select_with_transformers  # importing torch takes seconds

    return select_with_transformers(tensors, config, options)


def _check_options(options: QuantizeOptions) -> None:
    for name, value, allowed in (
        ("quant-type", options.quant_type, tuple(CODEBOOKS)),
        ("blocksize", options.blocksize, BLOCKSIZES),
        ("dtype", options.dtype, (None, *DTYPES)),
        ("compute-dtype", options.compute_dtype, (None, *DTYPES)),
    ):
        if value not in allowed:
            raise PlanError(
                f"--{name} {value}: expected one of {', '.join(str(choice) for choice in allowed if choice)}"
            )


def _dtype(source: Source, selection: Selection, options: QuantizeOptions) -> str:
    """What weights are cast to before they are packed, and other tensors stored in."""
    if options.dtype is not None:
        return options.dtype
    dtype = checkpoint_dtype(source.config or {}) or dominant_dtype(source.tensors)
    if dtype not in DTYPES:
        raise PlanError(
            f"{source.folder}/config.json: {dtype} is not a dtype that can be packed; give --dtype {', '.join(DTYPES)}"
        )
    for tensor in source.tensors:
        if tensor.dtype == "F64" and isinstance(selection.decisions[tensor.name], Pack):
            raise PlanError(
                f"{tensor.file}: {tensor.name}: float64 cannot be packed; say what to cast it to: --dtype "
                f"{', '.join(DTYPES)}"
            )
    return dtype


def _new_config(
    source: Source, selection: Selection, format: Format, options: QuantizeOptions
) -> Mapping[str, Any] | None:
    if source.config is None:
        return None
    compute_dtype = options.compute_dtype or (format.dtype if format.dtype != "float32" else "bfloat16")
    return quantized_config(
        source.config,
        quant_type=format.quant_type,
        double_quant=format.double_quant,
        compute_dtype=compute_dtype,
        skip_modules=selection.skip_modules,
        dtype=None if "_class_name" in source.config else format.dtype,  # a key that diffusers does not know
    )


def write_one(
    plan: QuantizationPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    announce: Callable[[str, Path], None] | None = None,
) -> QuantizeReport:
    """Carry out the prepared plan of one checkpoint; `announce` is told each finished shard, by name and path."""
    started = time.perf_counter()
    check_apart(plan.source.folder, out)
    engine, shard_tasks = packing_engine(plan.output, run)
    pipeline = make_pipeline(engine, run, progress)
    baseline = pipeline.memory()
    fingerprint = {
        "command": "quantize",
        **source_fingerprint(plan.source, pipeline, plan.options),
        "tensors kept for NaN or infinity": sorted(plan.non_finite),
        "plan": plan_fingerprint(plan.output),
    }
    with Workspace(out, fingerprint, overwrite=run.overwrite, checksum=run.checksum) as workspace:
        audit = _open_audit(workspace, pipeline, run)
        resumed = len(workspace.finished)
        try:
            write_checkpoint(plan, workspace, pipeline, shard_tasks, announce, audit)
        except NonFiniteError as error:
            raise _describe_non_finite(error.job, plan, run) from error
        report = _report(plan, workspace, pipeline, resumed, started, baseline)
        return report if audit is None else replace(report, verification=audit.summary())


def _open_audit(workspace: Workspace, pipeline: Pipeline[Any], run: RunOptions) -> Audit | None:
    if not run.verify:
        return None
    workspace.forget()  # shards of an earlier run, which nobody has looked at
    return make_audit(pipeline.piece, run.tolerance)


def prepared(plan: QuantizationPlan, run: RunOptions) -> QuantizationPlan:
    """A plan to carry out: as it is, unless weights are to be looked through for NaN and infinity first.

    Raises:
        PlanError: nothing is left to pack.
    """
    if plan.options.non_finite == "keep":
        plan = _without_non_finite(plan, run)
    if not plan.is_submodel and not any(isinstance(job, PackJob) for job in plan.output.jobs):
        raise PlanError(
            f"{plan.source}: no tensor of this checkpoint would be packed; --dry-run shows why each is kept"
        )
    return plan


def _without_non_finite(plan: QuantizationPlan, run: RunOptions) -> QuantizationPlan:
    """The plan with every weight that holds NaN or infinity kept; takes a pass over the weights to find them."""
    from nf4conv.pipeline.with_torch.scan import count_non_finite  # importing torch takes seconds

    found = count_non_finite([job for job in plan.output.jobs if isinstance(job, PackJob)], run, plan.source)
    if not found:
        return plan
    kept = _plan(plan.source, plan.options, frozenset(found))
    notes = tuple(f"{name}: kept unquantized, {count:,} values are NaN or infinite" for name, count in found.items())
    return replace(kept, notes=kept.notes + notes, is_submodel=plan.is_submodel)


def _describe_non_finite(job: PackJob, plan: QuantizationPlan, run: RunOptions) -> SourceError:
    from nf4conv.pipeline.with_torch.scan import count_non_finite  # importing torch takes seconds

    place = f"{job.source.file}: {job.source.name}"
    count = count_non_finite([job], run, plan.source).get(job.source.name, 0)
    if not count:
        return CastError(job.source, TAGS[plan.output.format.dtype])
    return SourceError(
        f"{place}: {count:,} of {job.source.elements:,} values are NaN or infinite; repair the checkpoint, or leave "
        "such tensors unquantized: --non-finite keep"
    )


def _report(
    plan: QuantizationPlan,
    workspace: Workspace,
    pipeline: Pipeline[Any],
    resumed: int,
    started: float,
    baseline: MemoryUse,
) -> QuantizeReport:
    parameters = sum(job.elements for job in plan.output.jobs)
    bytes_after = sum(shard.size for shard in workspace.finished.values())
    return QuantizeReport(
        out=str(workspace.out),
        device=pipeline.device,
        packed=sum(isinstance(job, PackJob) for job in plan.output.jobs),
        copied=sum(not isinstance(job, PackJob) for job in plan.output.jobs),
        parameters=parameters,
        bytes_before=sum(tensor.nbytes for tensor in plan.source.tensors),
        bytes_after=bytes_after,
        bits_per_parameter=8 * bytes_after / max(parameters, 1),
        seconds=time.perf_counter() - started,
        pipeline_seconds=pipeline.elapsed,
        seconds_by_activity=pipeline.seconds_by_activity(),
        host_baseline_bytes=baseline.host,
        host_peak_bytes=pipeline.memory().host,
        device_peak_bytes=pipeline.memory().device,
        shards_resumed=resumed,
        verification=None,
        pushed=None,
        notes=plan.notes,
    )
