"""`nf4conv quantize`: a checkpoint in, a 4-bit bitsandbytes checkpoint out.

open_source ▸ select ▸ make_plan            headers and config only: this is all a dry run does
Workspace ▸ Pipeline(shard tasks)           every byte of every shard
auxiliary files ▸ index ▸ config.json       config.json last: it is what makes the folder a checkpoint
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from nf4conv.checkpoint.auxiliary import auxiliary_files
from nf4conv.checkpoint.config import checkpoint_dtype, quantized_config
from nf4conv.checkpoint.header import TensorInfo
from nf4conv.checkpoint.plan import TAGS, Format, PackJob, Plan, dominant_dtype, make_plan
from nf4conv.checkpoint.selection import Keep, Pack, Selection, SelectionOptions, demote, select
from nf4conv.checkpoint.source import Source, open_source, open_stored
from nf4conv.checkpoint.workspace import Workspace
from nf4conv.codec.codebook import BLOCKSIZES, CODEBOOKS
from nf4conv.errors import PlanError, SourceError
from nf4conv.options import DTYPES, PushOptions, QuantizeOptions, RunOptions, SourceOptions
from nf4conv.output import ShardTasks, check_apart, ignore, plan_fingerprint, source_fingerprint, write_checkpoint
from nf4conv.pipeline import Engine, MemoryUse, Pipeline, make_pipeline
from nf4conv.shards import CastError, NonFiniteError

if TYPE_CHECKING:
    from nf4conv.audit import Audit
    from nf4conv.push import Push


@dataclass(frozen=True)
class QuantizationPlan:
    """Everything that is known before a byte is read.

    Attributes:
        options: what was asked for.
        source: the checkpoint.
        plan: the output files.
        config: the content of the output's config.json; None when the source has none.
        auxiliary: files that are copied beside the weights, relative to the source's folder.
        non_finite: source tensors that are kept because they hold NaN or infinity.
        notes: what the user should know.
        is_component: of a pipeline, whose components get no card, and in some of which nothing is packed.
    """

    options: QuantizeOptions
    source: Source
    plan: Plan
    config: Mapping[str, Any] | None
    auxiliary: tuple[PurePosixPath, ...]
    non_finite: frozenset[str]
    notes: tuple[str, ...]
    is_component: bool = False

    def card(self, bytes_after: int, verified: Mapping[str, Any] | None) -> str | None:
        """The model card; None for a component."""
        if self.is_component:
            return None
        from nf4conv.card import Figures, model_card  # importing a reader of YAML takes a moment

        before = sum(tensor.nbytes for tensor in self.source.tensors)
        return model_card(self.source, self.plan, self.config, Figures(before, bytes_after, verified))

    def rows(self) -> list[dict[str, Any]]:
        """One entry for each weight that is packed and each tensor that is kept: what, why, and bytes in and out."""
        return [
            {
                "name": job.name,
                "action": "pack" if isinstance(job, PackJob) else "copy" if job.dtype == job.source.dtype else "cast",
                "reason": job.reason,
                "dtype": job.source.dtype,
                "shape": list(job.matrix.shape if isinstance(job, PackJob) else job.source.shape),
                "bytes_in": job.source_bytes,
                "bytes_out": job.nbytes,
                "file": shard.name,
            }
            for shard in self.plan.shards
            for job in shard.jobs
        ]

    def totals(self) -> dict[str, Any]:
        """What the rows add up to; the size of the output is exact but for the digits of the nested offsets."""
        jobs = list(self.plan.jobs)
        packed = sum(isinstance(job, PackJob) for job in jobs)
        bytes_in, bytes_out = sum(job.source_bytes for job in jobs), self.plan.largest_size
        parameters = sum(job.elements for job in jobs)
        return {
            "packed": packed,
            "copied": len(jobs) - packed,
            "shards": len(self.plan.shards),
            "parameters": parameters,
            "bytes_in": bytes_in,
            "bytes_out": bytes_out,
            "compression": bytes_in / bytes_out,
            "bits_per_parameter": 8 * bytes_out / max(parameters, 1),
        }


@dataclass(frozen=True)
class QuantizeReport:
    """What a run did.

    Attributes:
        out: the output folder.
        device: where it was computed.
        packed: weights packed.
        copied: tensors kept.
        parameters: elements of all tensors.
        bytes_before: of all tensors of the source.
        bytes_after: of the output's weight files.
        bits_per_parameter: of the output.
        seconds: wall clock of the whole run, once planned.
        pipeline_seconds: of it, from the first read to the last write.
        seconds_by_activity: "read", "encode" and "write", summed over the workers.
        host_baseline_bytes: peak resident memory of the process when the first byte is read.
        host_peak_bytes: the same at the end.
        device_peak_bytes: the most that torch held on the GPU.
        shards_resumed: finished shards of an earlier, interrupted run that were kept.
        verification: counts, largest and median relative error, and a row for each weight, with `verify`; else None.
        pushed: address of the commit on the Hub; None if nothing was to be pushed.
        notes: what the user should know.
    """

    out: str
    device: str
    packed: int
    copied: int
    parameters: int
    bytes_before: int
    bytes_after: int
    bits_per_parameter: float
    seconds: float
    pipeline_seconds: float
    seconds_by_activity: Mapping[str, float]
    host_baseline_bytes: int
    host_peak_bytes: int
    device_peak_bytes: int
    shards_resumed: int
    verification: Mapping[str, Any] | None
    pushed: str | None
    notes: tuple[str, ...]


def plan_quantization(
    source: str | Path, options: QuantizeOptions | None = None, where: SourceOptions | None = None
) -> QuantizationPlan:
    """Decide everything about a quantization from headers and config alone; no weight is read, torch is not imported.

    Args:
        source: a folder, a .safetensors file, a torch pickle, or "org/name" on the Hugging Face Hub.
        options: what to make of it.
        where: revision, subfolder and the like.

    Raises:
        SourceError: the source cannot be read.
        PlanError: the request cannot be met.
    """
    options = options or QuantizeOptions()
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
        selection = demote(selection, dict.fromkeys(sorted(non_finite), "holds NaN or infinity"), config)
    dtype = _dtype(opened, selection, options)
    plan = make_plan(
        opened.tensors,
        selection.decisions,
        Format(options.quant_type, options.blocksize, options.double_quant, dtype),
        max_shard_size=options.max_shard_size,
        stem=opened.stem,
    )
    return QuantizationPlan(
        options=options,
        source=opened,
        plan=plan,
        config=_new_config(opened, selection, plan.format, options),
        auxiliary=() if opened.config is None else auxiliary_files(opened.folder),
        non_finite=non_finite,
        notes=opened.notes + selection.notes,
    )


def plan_component(source: str, options: QuantizeOptions, where: SourceOptions, *, pack: bool) -> QuantizationPlan:
    """The plan of a component of a pipeline; one in which nothing is packed keeps its tensors as they are stored.

    Args:
        source: as for `plan_quantization`.
        options: as for `plan_quantization`.
        where: as for `plan_quantization`; its subfolder is the component.
        pack: whether anything in it may be packed.

    Raises:
        SourceError, PlanError: as `plan_quantization`.
    """
    if pack:
        planned = plan_quantization(source, options, where)
        if any(isinstance(entry, PackJob) for entry in planned.plan.jobs):
            return replace(planned, is_component=True)
    stored = open_stored(source, where)
    kept = Keep("the component stays as it is", keep_dtype=True)
    plan = make_plan(
        stored.tensors,
        dict.fromkeys((tensor.name for tensor in stored.tensors), kept),
        Format(options.quant_type, options.blocksize, options.double_quant, "float32"),
        max_shard_size=options.max_shard_size,
        stem=stored.stem,
    )
    auxiliary = () if stored.config is None else auxiliary_files(stored.folder)
    return QuantizationPlan(options, stored, plan, stored.config, auxiliary, frozenset(), stored.notes, True)


PlanT = TypeVar("PlanT")


def with_second_opinion(plan: PlanT) -> PlanT:
    """A plan by the rules, with a note on what the installed transformers, if there is one, would decide otherwise.

    It takes seconds to ask transformers, so this is for dry runs. The plan of a pipeline stays as it is.
    """
    if not isinstance(plan, QuantizationPlan):
        return plan
    config = plan.source.config
    if plan.options.plan_with != "rules" or config is None or find_spec("transformers") is None:
        return plan
    from nf4conv.skeleton import second_opinion

    return replace(plan, notes=plan.notes + second_opinion(plan.source.tensors, config, _wishes(plan.options)))


def _wishes(options: QuantizeOptions) -> SelectionOptions:
    return SelectionOptions(
        include=options.include,
        exclude=options.exclude,
        skip_modules=options.skip_modules,
        quantize_towers=options.quantize_towers,
        moe=options.moe,
    )


def _select(tensors: Sequence[TensorInfo], config: Mapping[str, Any], options: QuantizeOptions) -> Selection:
    wishes = _wishes(options)
    if options.plan_with == "rules":
        return select(tensors, config, wishes)
    from nf4conv.skeleton import select_with_transformers

    return select_with_transformers(tensors, config, wishes)


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


def quantize_checkpoint(
    source: str | Path,
    out: str | Path,
    options: QuantizeOptions | None = None,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    where: SourceOptions | None = None,
    push: PushOptions | None = None,
) -> QuantizeReport:
    """Quantize a checkpoint to 4 bits.

    Of a pipeline of diffusers, each component by its own rule.

    A rerun after an interruption keeps the shards that are finished and ends in the same bytes.

    Args:
        source: a folder, a .safetensors file, a torch pickle, or "org/name" on the Hugging Face Hub.
        out: the folder to write; it must be empty, or hold an interrupted run of the same job.
        options: what to make of the checkpoint.
        run: how to use the machine.
        progress: told how many more source bytes have been read, from any thread.
        where: revision, subfolder and the like.
        push: a repository on the Hub to push the result to.

    Raises:
        SourceError, PlanError, OutputError: see there; `out` then does not look like a finished checkpoint.
    """
    from nf4conv.components import execute_quantizing, plan_quantizing  # which build on this

    return execute_quantizing(plan_quantizing(source, options, where), out, run, progress, push)


def execute_plan(
    job: QuantizationPlan,
    out: str | Path,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    push: PushOptions | None = None,
) -> QuantizeReport:
    """Carry out a plan; arguments, result and errors as `quantize_checkpoint`."""
    started = time.perf_counter()
    run = run or RunOptions()
    check_apart(job.source.folder, Path(out))
    job = prepared(job, run)
    with open_push(push, run) as repository:
        announce = None if repository is None else repository.offer
        report = _write(job, Path(out), run, progress or ignore, started, announce)
        return report if repository is None else pushed(report, repository, job.plan.format, started)


def execute_component(
    job: QuantizationPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    announce: Callable[[str, Path], None] | None,
) -> QuantizeReport:
    """Carry out the prepared plan of a component of a pipeline; `announce` is told each finished shard by name."""
    started = time.perf_counter()
    check_apart(job.source.folder, out)
    return _write(job, out, run, progress, started, announce)


def open_push(push: PushOptions | None, run: RunOptions) -> "AbstractContextManager[Push | None]":
    """A repository to push to, before anything is computed, so that what is wrong with it is known at once."""
    if push is None or push.push_to_hub is None:
        return nullcontext()
    from nf4conv.push import Push  # importing huggingface_hub takes a while

    return Push(push.push_to_hub, token=push.token, public=push.public, overwrite=run.overwrite)


def pushed(report: QuantizeReport, repository: "Push", format: Format, started: float) -> QuantizeReport:
    """The report of a run whose output is complete on the Hub, too."""
    address = repository.commit(Path(report.out), f"Quantize to {format.quant_type} with nf4conv")
    return replace(report, pushed=address, seconds=time.perf_counter() - started)


def _write(
    job: QuantizationPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    started: float,
    announce: Callable[[str, Path], None] | None,
) -> QuantizeReport:
    engine, shard_tasks = choose_engine(job, run)
    pipeline = make_pipeline(engine, run, progress)
    baseline = pipeline.memory()
    fingerprint = {
        "command": "quantize",
        **source_fingerprint(job.source, pipeline, job.options),
        "tensors kept for NaN or infinity": sorted(job.non_finite),
        "plan": plan_fingerprint(job.plan),
    }
    with Workspace(out, fingerprint, overwrite=run.overwrite, checksum=run.checksum) as workspace:
        audit = _open_audit(workspace, pipeline, run)
        resumed = len(workspace.finished)
        try:
            write_checkpoint(job, workspace, pipeline, shard_tasks, announce, audit)
        except NonFiniteError as error:
            raise _describe_non_finite(error.job, job, run) from error
        report = _report(job, workspace, pipeline, resumed, started, baseline)
        return report if audit is None else replace(report, verification=audit.summary())


def _open_audit(workspace: Workspace, pipeline: Pipeline[Any], run: RunOptions) -> "Audit | None":
    if not run.verify:
        return None
    from nf4conv.audit import Audit

    workspace.forget()  # shards of an earlier run, which nobody has looked at
    return Audit(pipeline.piece, run.tolerance)


def prepared(job: QuantizationPlan, run: RunOptions) -> QuantizationPlan:
    """A plan to carry out: as it is, unless weights are to be looked through for NaN and infinity first.

    Raises:
        PlanError: nothing is left to pack.
    """
    if job.options.non_finite == "keep":
        job = _without_non_finite(job, run)
    if not job.is_component and not any(isinstance(entry, PackJob) for entry in job.plan.jobs):
        raise PlanError(f"{job.source}: no tensor of this checkpoint would be packed; --dry-run shows why each is kept")
    return job


def choose_engine(job: QuantizationPlan, run: RunOptions) -> tuple[Engine[Any], ShardTasks]:
    """How to compute: on a GPU without torch where that is possible, because importing torch takes seconds."""
    from nf4conv.cuda import encode as bare

    if bare.is_plain(job.plan) and not run.verify:  # there are no kernels in a bundle that compare
        from nf4conv.cuda.bundle import Purpose
        from nf4conv.cuda.engine import bare_engine

        format = job.plan.format
        purpose = Purpose("encode", format.dtype, format.quant_type, format.blocksize)
        engine = bare_engine(run.device, purpose)
        if engine is not None:
            return engine, bare.shard_tasks
    from nf4conv.encode import shard_tasks
    from nf4conv.worker import TorchEngine

    return TorchEngine(run.device), shard_tasks


def _without_non_finite(job: QuantizationPlan, run: RunOptions) -> QuantizationPlan:
    """The plan with every weight that holds NaN or infinity kept; takes a pass over the weights to find them."""
    from nf4conv.scan import count_non_finite

    found = count_non_finite([entry for entry in job.plan.jobs if isinstance(entry, PackJob)], run, job.source)
    if not found:
        return job
    kept = _plan(job.source, job.options, frozenset(found))
    notes = tuple(f"{name}: kept unquantized, {count:,} values are NaN or infinite" for name, count in found.items())
    return replace(kept, notes=kept.notes + notes, is_component=job.is_component)


def _describe_non_finite(entry: PackJob, job: QuantizationPlan, run: RunOptions) -> SourceError:
    from nf4conv.scan import count_non_finite

    place = f"{entry.source.file}: {entry.source.name}"
    count = count_non_finite([entry], run, job.source).get(entry.source.name, 0)
    if not count:
        return CastError(entry.source, TAGS[job.plan.format.dtype])
    return SourceError(
        f"{place}: {count:,} of {entry.source.elements:,} values are NaN or infinite; repair the checkpoint, or leave "
        "such tensors unquantized: --non-finite keep"
    )


def _report(
    job: QuantizationPlan,
    workspace: Workspace,
    pipeline: Pipeline[Any],
    resumed: int,
    started: float,
    baseline: MemoryUse,
) -> QuantizeReport:
    parameters = sum(entry.elements for entry in job.plan.jobs)
    bytes_after = sum(shard.size for shard in workspace.finished.values())
    return QuantizeReport(
        out=str(workspace.out),
        device=pipeline.device,
        packed=sum(isinstance(entry, PackJob) for entry in job.plan.jobs),
        copied=sum(not isinstance(entry, PackJob) for entry in job.plan.jobs),
        parameters=parameters,
        bytes_before=sum(tensor.nbytes for tensor in job.source.tensors),
        bytes_after=bytes_after,
        bits_per_parameter=8 * bytes_after / max(parameters, 1),
        seconds=time.perf_counter() - started,
        pipeline_seconds=pipeline.elapsed,
        seconds_by_activity=dict(pipeline.seconds),
        host_baseline_bytes=baseline.host,
        host_peak_bytes=pipeline.memory().host,
        device_peak_bytes=pipeline.memory().device,
        shards_resumed=resumed,
        verification=None,
        pushed=None,
        notes=job.notes,
    )
