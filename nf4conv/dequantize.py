"""`nf4conv dequantize`: a 4-bit bitsandbytes checkpoint in, a plain one out, which loads without bitsandbytes.

The source presents packed weights as the float tensors that they stand for (checkpoint/encoded.py), so all that is left
to do is to store them as such, and to take the quantization out of config.json. Weights that are to stay in 4 bits are
copied as they are, all their tensors into one shard.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from nf4conv.checkpoint.auxiliary import auxiliary_files
from nf4conv.checkpoint.config import plain_config, without_quantization
from nf4conv.checkpoint.encoded import BITSANDBYTES_4BIT
from nf4conv.checkpoint.evidence import Evidence
from nf4conv.checkpoint.header import TensorInfo
from nf4conv.checkpoint.module_names import ModuleNames
from nf4conv.checkpoint.plan import FLOAT_TAGS, TAGS, CopyJob, Format, Plan, arrange, dominant_dtype
from nf4conv.checkpoint.selection import Keep, Pack, PackedMatrix, SelectionOptions, is_wanted, select, with_skip_list
from nf4conv.checkpoint.source import Source, open_source, open_stored
from nf4conv.checkpoint.workspace import Workspace
from nf4conv.errors import PlanError
from nf4conv.options import DTYPES, DequantizeOptions, RunOptions, SourceOptions
from nf4conv.output import ShardTasks, check_apart, ignore, source_fingerprint, write_checkpoint
from nf4conv.pipeline import Engine, MemoryUse, Pipeline, make_pipeline

DECODED = "decoded"
STAYS = "stays in 4 bits"
KEPT = "not quantized"


@dataclass(frozen=True)
class DequantizationPlan:
    """Everything that is known before a weight is read.

    Attributes:
        options: what was asked for.
        source: the checkpoint.
        plan: the output files.
        config: the content of the output's config.json; None when the source has none.
        auxiliary: files that are copied beside the weights, relative to the source's folder.
        notes: what the user should know.
    """

    options: DequantizeOptions
    source: Source
    plan: Plan
    config: Mapping[str, Any] | None
    auxiliary: tuple[PurePosixPath, ...]
    notes: tuple[str, ...]

    def card(self, bytes_after: int, verified: Mapping[str, Any] | None) -> None:
        """None: the model is not another one than its original, whose card says all there is."""

    def rows(self) -> list[dict[str, Any]]:
        """One entry for each output tensor: what becomes of it, and its bytes before and after."""
        return [
            {
                "name": job.name,
                "action": _action(job),
                "reason": job.reason,
                "dtype": job.dtype,
                "shape": list(job.source.shape),
                "bytes_in": job.source_bytes,
                "bytes_out": job.nbytes,
                "file": shard.name,
            }
            for shard in self.plan.shards
            for job in shard.jobs
            if isinstance(job, CopyJob)
        ]

    def totals(self) -> dict[str, Any]:
        """What the rows add up to; the size of the output is exact."""
        jobs = [job for job in self.plan.jobs if isinstance(job, CopyJob)]
        return {
            "decoded": sum(job.reason == DECODED for job in jobs),
            "copied": sum(job.reason != DECODED for job in jobs),
            "shards": len(self.plan.shards),
            "bytes_in": sum(job.source_bytes for job in jobs),
            "bytes_out": self.plan.largest_size,
        }


def _action(job: CopyJob) -> str:
    if job.source.encoding is not None:
        return "decode"
    return "copy" if job.dtype == job.source.dtype else "cast"


@dataclass(frozen=True)
class DequantizeReport:
    """What a run did.

    Attributes:
        out: the output folder.
        device: where it was computed.
        decoded: weights decoded.
        copied: other tensors, those of weights that stay in 4 bits included.
        bytes_before: of all tensors of the source.
        bytes_after: of the output's weight files.
        seconds: wall clock of the whole run, once planned.
        pipeline_seconds: of it, from the first read to the last write.
        seconds_by_activity: "read", "encode" (here: decode) and "write", summed over the workers.
        host_baseline_bytes: peak resident memory of the process when the first byte is read.
        host_peak_bytes: the same at the end.
        device_peak_bytes: the most held on the GPU.
        shards_resumed: finished shards of an earlier, interrupted run that were kept.
        notes: what the user should know.
    """

    out: str
    device: str
    decoded: int
    copied: int
    bytes_before: int
    bytes_after: int
    seconds: float
    pipeline_seconds: float
    seconds_by_activity: Mapping[str, float]
    host_baseline_bytes: int
    host_peak_bytes: int
    device_peak_bytes: int
    shards_resumed: int
    notes: tuple[str, ...]


def plan_dequantization(
    source: str | Path, options: DequantizeOptions | None = None, where: SourceOptions | None = None
) -> DequantizationPlan:
    """Decide everything about a dequantization from headers, quant states and config; torch is not imported.

    Args:
        source: a folder, a .safetensors file, or "org/name" on the Hugging Face Hub.
        options: what to make of it.
        where: revision, subfolder and the like.

    Raises:
        SourceError: the source cannot be read.
        PlanError: nothing in it is in 4 bits, or the request cannot be met.
    """
    options = options or DequantizeOptions()
    if options.dtype not in (None, *DTYPES):
        raise PlanError(f"--dtype {options.dtype}: expected one of {', '.join(DTYPES)}")
    opened = open_source(source, where)
    packed = [tensor for tensor in opened.tensors if _is_packed(tensor)]
    if not packed:
        raise PlanError(f"{source}: no tensor of this checkpoint is in bitsandbytes' 4 bits")
    wanted = {tensor.name for tensor in packed if is_wanted(tensor.name, options.include, options.exclude)}
    if not wanted:
        raise PlanError(f"{source}: --include and --exclude leave no weight to decode")
    config, still_packed = _new_config(opened, {tensor.name for tensor in packed} - wanted, options)
    groups = list(_groups(opened, still_packed, options))
    dtype = options.dtype or dominant_dtype([job.source for group in groups for job in group])
    plan = arrange(groups, Format("nf4", 64, False, dtype), max_shard_size=options.max_shard_size, stem=opened.stem)
    if config is not None and not still_packed:
        config = without_quantization(config) if "_class_name" in config else plain_config(config, dtype)
    return DequantizationPlan(
        options=options,
        source=opened,
        plan=plan,
        config=config,
        auxiliary=() if opened.config is None else auxiliary_files(opened.folder),
        notes=(),
    )


def plan_dequantized_component(
    source: str, options: DequantizeOptions, where: SourceOptions, *, decode: bool
) -> DequantizationPlan:
    """The plan of a component of a pipeline; one without 4-bit weights to decode keeps its tensors as they are stored.

    Args:
        source: as for `plan_dequantization`.
        options: as for `plan_dequantization`.
        where: as for `plan_dequantization`; its subfolder is the component.
        decode: whether anything in it is wanted.

    Raises:
        SourceError, PlanError: as `plan_dequantization`.
    """
    wanted = (
        tensor
        for tensor in open_source(source, where).tensors
        if _is_packed(tensor) and is_wanted(tensor.name, options.include, options.exclude)
    )
    if decode and any(wanted):
        return plan_dequantization(source, options, where)
    stored = open_stored(source, where)
    groups = [[CopyJob(tensor, tensor.dtype, "the component stays as it is")] for tensor in stored.tensors]
    format = Format("nf4", 64, False, dominant_dtype(stored.tensors))
    plan = arrange(groups, format, max_shard_size=options.max_shard_size, stem=stored.stem)
    auxiliary = () if stored.config is None else auxiliary_files(stored.folder)
    return DequantizationPlan(options, stored, plan, stored.config, auxiliary, stored.notes)


def _is_packed(tensor: TensorInfo) -> bool:
    return tensor.encoding is not None and tensor.encoding.method.startswith(BITSANDBYTES_4BIT)


def _new_config(
    source: Source, packed: set[str], options: DequantizeOptions
) -> tuple[Mapping[str, Any] | None, frozenset[str]]:
    """The config with a skip list for what stays packed, and what does: what a loader could not tell is decoded too."""
    if source.config is None or not packed:
        return source.config, frozenset(packed)
    if options.dtype is not None:
        raise PlanError("--dtype changes all tensors, but --include or --exclude leaves weights in 4 bits")
    rules = select(source.tensors, source.config, SelectionOptions()).decisions
    decisions: dict[str, Pack | Keep] = {}
    for tensor in source.tensors:
        rule = rules[tensor.name]
        if tensor.name in packed:
            rows = tensor.shape[0]
            decisions[tensor.name] = Pack((PackedMatrix(tensor.name, (rows, tensor.elements // rows)),), STAYS)
        elif isinstance(rule, Pack) or _is_packed(tensor):
            decisions[tensor.name] = Keep(KEPT, is_linear=True)
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
            yield [CopyJob(part, part.dtype, STAYS) for _, part in tensor.encoding.parts]
            continue
        decoded = tensor.encoding is not None
        dtype = tensor.dtype
        if options.dtype is not None and dtype in FLOAT_TAGS and not evidence.is_float32_by_design(tensor):
            dtype = TAGS[options.dtype]
        # decoded to what it is stored in, not by way of another dtype, which would round twice
        yield [CopyJob(tensor._replace(dtype=dtype) if decoded else tensor, dtype, DECODED if decoded else KEPT)]


def dequantize_checkpoint(
    source: str | Path,
    out: str | Path,
    options: DequantizeOptions | None = None,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    where: SourceOptions | None = None,
) -> DequantizeReport:
    """Decode a 4-bit checkpoint, value for value as bitsandbytes' CUDA library does.

    Of a pipeline of diffusers, each component by its own rule.

    A rerun after an interruption keeps the shards that are finished and ends in the same bytes.

    Args:
        source: a folder, a .safetensors file, or "org/name" on the Hugging Face Hub.
        out: the folder to write; it must be empty, or hold an interrupted run of the same job.
        options: what to make of the checkpoint.
        run: how to use the machine.
        progress: told how many more source bytes have been read, from any thread.
        where: revision, subfolder and the like.

    Raises:
        SourceError, PlanError, OutputError: see there; `out` then does not look like a finished checkpoint.
    """
    from nf4conv.components import execute_dequantizing, plan_dequantizing  # which build on this

    return execute_dequantizing(plan_dequantizing(source, options, where), out, run, progress)


def execute_dequantization(
    job: DequantizationPlan,
    out: str | Path,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> DequantizeReport:
    """Carry out a plan; arguments, result and errors as `dequantize_checkpoint`."""
    started = time.perf_counter()
    run = run or RunOptions()
    check_apart(job.source.folder, Path(out))
    engine, shard_tasks = choose_engine(job, run)
    pipeline = make_pipeline(engine, run, progress or ignore)
    baseline = pipeline.memory()
    fingerprint = {"command": "dequantize", **source_fingerprint(job.source, pipeline, job.options)}
    with Workspace(Path(out), fingerprint, overwrite=run.overwrite, checksum=run.checksum) as workspace:
        resumed = len(workspace.finished)
        write_checkpoint(job, workspace, pipeline, shard_tasks)
        return replace(
            _report(job, workspace, pipeline, baseline),
            seconds=time.perf_counter() - started,
            shards_resumed=resumed,
        )


def choose_engine(job: DequantizationPlan, run: RunOptions) -> tuple[Engine[Any], ShardTasks]:
    """How to compute: on a GPU without torch where that is possible, because importing torch takes seconds."""
    from nf4conv.cuda import decode as bare

    purpose = None if job.options.dtype is not None else bare.purpose_of(job.plan)
    if purpose is not None:
        from nf4conv.cuda.engine import bare_engine

        engine = bare_engine(run.device, purpose)
        if engine is not None:
            return engine, bare.shard_tasks
    from nf4conv.encode import shard_tasks
    from nf4conv.worker import TorchEngine

    return TorchEngine(run.device), shard_tasks


def _report(
    job: DequantizationPlan, workspace: Workspace, pipeline: Pipeline[Any], baseline: MemoryUse
) -> DequantizeReport:
    totals, memory = job.totals(), pipeline.memory()
    return DequantizeReport(
        out=str(workspace.out),
        device=pipeline.device,
        decoded=totals["decoded"],
        copied=totals["copied"],
        bytes_before=totals["bytes_in"],
        bytes_after=sum(shard.size for shard in workspace.finished.values()),
        seconds=0.0,
        pipeline_seconds=pipeline.elapsed,
        seconds_by_activity=dict(pipeline.seconds),
        host_baseline_bytes=baseline.host,
        host_peak_bytes=memory.host,
        device_peak_bytes=memory.device,
        shards_resumed=0,
        notes=job.notes,
    )
