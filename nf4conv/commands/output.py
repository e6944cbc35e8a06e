"""From a plan to a finished output folder: what every command that writes a checkpoint does around its tasks.

space ▸ shard tasks ▸ auxiliary files ▸ index ▸ card, nf4conv.json ▸ config.json: it makes the folder a checkpoint.
"""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from nf4conv import __version__
from nf4conv.checkpoint.auxiliary import auxiliary_files
from nf4conv.checkpoint.making import MAKING, as_bytes, headers_digest, record_of
from nf4conv.checkpoint.plan import CopyJob, Job, PackJob, Plan, Shard, arrange
from nf4conv.checkpoint.reader import Reader
from nf4conv.checkpoint.source import Source, changed_files
from nf4conv.checkpoint.workspace import Workspace
from nf4conv.checkpoint.writer import ShardWriter
from nf4conv.errors import OutputError, SourceError, VerificationError
from nf4conv.format.layout import Format
from nf4conv.options import DequantizeOptions, QuantizeOptions, RunOptions
from nf4conv.pipeline.engines import ShardTasks, make_audit
from nf4conv.pipeline.loop import Engine, Pipeline, Task, interleave, make_pipeline
from nf4conv.pipeline.shards import Audit, ShardProgress, ShardTask, streamed
from nf4conv.report.loading import Loading, loading_of
from nf4conv.report.rows import PlanRow, VerificationSummary

if TYPE_CHECKING:
    from nf4conv.checkpoint.stream import ShardStream

_SHARDS_AT_A_TIME: Final = 8
"""Measured on Linux: writes to one file do not overlap (2.5 GB/s from 8 threads, tmpfs or disk); to several files they
do (8.5 GB/s to 4, 17 GB/s to 8). More would leave more to be done again after an interruption."""


@dataclass(frozen=True)
class WritingPlan:
    """Everything that is known of an output checkpoint before a weight is read."""

    command: ClassVar[str]
    """By which it was made."""

    options: QuantizeOptions | DequantizeOptions  # what was asked for
    source: Source  # the checkpoint that is read
    output: Plan  # the output files
    config: Mapping[str, Any] | None  # the content of the output's config.json; None when the source has none
    notes: tuple[str, ...]  # what the user should know
    # what the source's card says at its top, for one that gets a card
    front: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @cached_property
    def auxiliary(self) -> tuple[PurePosixPath, ...]:
        """Files that are copied beside the weights, relative to the source's folder."""
        source = self.source
        return () if source.config is None else auxiliary_files(source.folder, source.root)

    def rows(self) -> list[PlanRow]:
        """One for each weight that is packed or decoded, and each tensor that is kept."""
        return [self.row(job, shard.name) for shard in self.output.shards for job in shard.jobs]

    def row(self, job: Job, file: str) -> PlanRow:
        """What becomes of one of them, in a file of the output."""
        raise NotImplementedError

    @cached_property
    def config_bytes(self) -> bytes | None:
        """The output's config.json; None when the source has none."""
        return None if self.config is None else (json.dumps(self.config, indent=2) + "\n").encode()

    @cached_property
    def record(self) -> dict[str, Any]:
        """By what it is made, see checkpoint/making.py; a source on this disk is read for it."""
        options, format = asdict(self.options), asdict(self.output.format)
        if self.command == "quantize":  # what was left open is decided
            options = {key: format.get(key, value) for key, value in options.items()}
        return record_of(self.source, self.command, __version__, options)

    @property
    def loading(self) -> Loading | None:
        """How the result is loaded; None if nothing says how."""
        return loading_of(self.config, [str(name) for name in self.auxiliary], self.output.format.dtype)

    def changes_weights(self) -> bool:
        """Whether any weight is packed, or decoded."""
        return any(isinstance(job, PackJob) or job.source.encoding is not None for job in self.output.jobs)

    def decided(self) -> dict[str, Any]:
        """What decides the bytes of the result beside the source and the options, as JSON values."""
        return {}

    def card(self, bytes_after: int, verified: VerificationSummary | None) -> str | None:  # noqa: ARG002
        """The output's README.md, given the size of its weight files and an audit's summary; None when it gets none."""
        return None


def kept_as_stored(submodel: Source, format: Format, max_shard_size: int) -> Plan:
    """The output files of a submodel of a diffusers pipeline in which nothing changes."""
    groups = [[CopyJob(tensor, tensor.dtype, "the submodel stays as it is")] for tensor in submodel.tensors]
    return arrange(groups, format, max_shard_size=max_shard_size, stem=submodel.stem)


def notes_on_links(source: Source) -> tuple[str, ...]:
    """A line for each file that is not copied, because it is not the source's own."""
    strays = () if source.config is None else auxiliary_files(source.folder, source.root, strays=True)
    return tuple(f"{name}: a link that leads out of {source.root}; it is not copied" for name in strays)


def ignore(count: int) -> None:
    """Progress that nobody watches."""


def check_apart(source: Path, out: Path) -> None:
    """Refuse by an OutputError an output folder that is the source, lies in it, or holds it."""
    source, out = source.resolve(), out.resolve()
    if out == source or source in out.parents:
        raise OutputError(f"{out}: is inside the source folder; choose another output folder")
    if out in source.parents:
        raise OutputError(f"{out}: holds the source folder; choose another output folder")


def _fingerprint(plan: WritingPlan, device: str) -> dict[str, Any]:
    """Whatever decides the bytes of a result, so that an interrupted run is resumed only by its like."""
    return {
        "command": plan.command,
        "version": __version__,
        "torch": version("torch"),
        "device": device.partition(":")[0],
        "source files": source_stamps(plan.source),
        "source headers": headers_digest(plan.source),
        "source config": plan.source.config,
        "adapters": [[str(adapter), adapter.config] for adapter in plan.source.adapters],
        **{f"--{name.replace('_', '-')}": value for name, value in asdict(plan.options).items()},
        **plan.decided(),
    }


def plan_fingerprint(output: Plan) -> str:
    """What becomes of each tensor, and in which file: one that is decided anew on resuming must be decided alike."""
    digest = hashlib.sha256()
    for shard in output.shards:
        digest.update(repr((shard.name, [(job.name, _kind(job)) for job in shard.jobs])).encode())
    return digest.hexdigest()


def _kind(job: Job) -> str:
    return "copied" if isinstance(job, CopyJob) else "unchanged" if job.stored else "packed"


def source_stamps(source: Source) -> dict[str, list[int]]:
    """Size and time of change of each weight file, by which a changed source is noticed; a commit cannot change."""
    stamps: dict[str, list[int]] = {} if source.fetched is None else {str(source): []}
    return stamps | {_relative(source, file): [stamp.size, stamp.modified] for file, stamp in source.stamps.items()}


def source_changes(source: Source) -> dict[str, int]:
    """When the kernel last saw each weight file change: what came of another is not kept, for bytes may have."""
    return {_relative(source, file): stamp.changed for file, stamp in source.stamps.items()}


def _relative(source: Source, file: Path) -> str:
    return str(file.relative_to(source.folder) if file.is_relative_to(source.folder) else file)


def _require_unchanged(source: Source, what: str) -> None:
    for file in changed_files(source):
        raise SourceError(f"{file}: changed {what}")


def read_front(source: Source) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """What the source's card says at its top, and a line for the user if that cannot be read."""
    from nf4conv.report.card import read_front_matter  # importing a reader of YAML takes a moment

    return read_front_matter(source.folder / "README.md", source.root)


def write_checkpoint(
    plan: WritingPlan,
    out: Path,
    run: RunOptions,
    progress: Callable[[int], None],
    computed_by: tuple[Engine[Any], ShardTasks],
    announce: Callable[[str, Path], None] | None = None,
    *,
    is_audited: bool = False,
) -> dict[str, Any]:
    """Carry out the plan of one checkpoint.

    Args:
        plan: what is to be written.
        out: the output folder, which is a finished checkpoint afterwards.
        run: how to use the machine.
        progress: told how many more source bytes have been read, from any thread.
        computed_by: an engine, and its tasks.
        announce: told of every shard, by name and path, once it is complete; from any thread.
        is_audited: whether everything that is written is looked at; no shard of an earlier run then counts as finished.

    Returns:
        The fields of a RunReport but `copied` and `bytes_before`, and an audit's summary, if there was one, as
        "verification".

    Raises:
        SourceError, OutputError: the source cannot be read, the destination not written.
        VerificationError: what has been written is not what was to be; the folder then does not look finished.
    """
    started = time.perf_counter()
    check_apart(plan.source.folder, out)
    engine, shard_tasks = computed_by
    pipeline = make_pipeline(engine, run, progress)
    before = pipeline.memory()
    _require_unchanged(plan.source, "since it was planned; run again")
    fingerprint, stamps = _fingerprint(plan, engine.device), source_changes(plan.source)
    with Workspace(out, fingerprint, stamps, overwrite=run.overwrite, checksum=run.checksum) as workspace:
        audit = make_audit(pipeline.piece, run.tolerance) if is_audited else None
        if audit is not None:
            workspace.forget()  # shards of an earlier run, which nobody has looked at
        resumed = len(workspace.finished)
        _write(plan, workspace, pipeline, shard_tasks, announce, audit)
        after = pipeline.memory()
        figures = {
            "out": str(out),
            "already_complete": False,
            "device": engine.device,
            "bytes_after": sum(shard.size for shard in workspace.finished.values()),
            "seconds": time.perf_counter() - started,
            "pipeline_seconds": pipeline.elapsed,
            "seconds_by_activity": {activity.value: spent for activity, spent in pipeline.seconds.items()},
            "host_baseline_bytes": before.host,
            "host_peak_bytes": after.host,
            "device_peak_bytes": after.device,
            "shards_resumed": resumed,
            "notes": plan.notes,
        }
    return figures if audit is None else {**figures, "verification": audit.summary()}


def _write(
    plan: WritingPlan,
    workspace: Workspace,
    pipeline: Pipeline[Any],
    shard_tasks: ShardTasks,
    announce: Callable[[str, Path], None] | None,
    audit: Audit | None,
) -> None:
    """Fill a workspace, which is a finished checkpoint afterwards."""
    workspace.check_space(space_needed(plan, workspace.finished))
    with _open_reader(plan, workspace) as reader, ExitStack() as writers:
        pipeline.run(_tasks(plan, workspace, pipeline, shard_tasks, writers, reader, announce, audit), reader)
    _require_unchanged(plan.source, "while it was read; start anew with --overwrite")
    faults = [] if audit is None else list(audit.faults())
    if faults:
        workspace.forget()
        more = f" (and {len(faults) - 1:,} more)" if len(faults) > 1 else ""
        raise VerificationError(f"{workspace.out}: verification failed: {faults[0]}{more}")
    for name in plan.auxiliary:
        workspace.copy(str(name), plan.source.folder / name)
    if len(plan.output.shards) > 1:
        workspace.write(f"{plan.source.stem}.safetensors.index.json", _index(plan.output, workspace))
    size = sum(shard.size for shard in workspace.finished.values())
    verified = None if audit is None else audit.summary()
    card = plan.card(size, verified)
    if card is not None:
        workspace.write("README.md", card.encode(errors="backslashreplace"))
    measured = {} if verified is None else {"verified": verified.measured()}
    workspace.write(MAKING, as_bytes(plan.record | measured))
    workspace.complete({} if plan.config_bytes is None else {"config.json": plan.config_bytes})


def space_needed(plan: WritingPlan, finished: Collection[str]) -> int:
    """The most bytes that a plan still takes on disk, given the names of its finished shards."""
    shards = sum(shard.largest_size for shard in plan.output.shards if shard.name not in finished)
    fetched = () if plan.source.fetched is None else plan.source.fetched.absent.values()
    on_disk = sum(sorted(file.size for file in fetched)[-2:])  # one in use, one on its way
    return shards + on_disk + sum((plan.source.folder / name).stat().st_size for name in plan.auxiliary)


def _open_reader(plan: WritingPlan, workspace: Workspace) -> Reader:
    """A reader of the source; of one that is streamed, it fetches what unfinished shards need."""
    fetched = plan.source.fetched
    if fetched is None or fetched.repository is None or not fetched.absent:
        return Reader()
    from nf4conv.checkpoint.stream import ShardStream  # importing huggingface_hub takes a while

    shards = [shard for shard in plan.output.shards if shard.name not in workspace.finished]
    return ShardStream(
        fetched.repository,
        fetched.absent,
        order={file: number for number, file in enumerate(plan.source.files)},
        needed={entry.source.file for shard in shards for entry in shard.jobs} & fetched.absent.keys(),
        folder=workspace.downloads,
    )


def _tasks(
    plan: WritingPlan,
    workspace: Workspace,
    pipeline: Pipeline[Any],
    shard_tasks: ShardTasks,
    writers: ExitStack,
    reader: Reader,
    announce: Callable[[str, Path], None] | None,
    audit: Audit | None,
) -> Iterator[Task[Any]]:
    """All tasks, of a few shards in turn: one file takes the writes of one thread at a time."""

    def finish(writer: ShardWriter, name: str, size: int) -> None:
        workspace.record(name, size, writer.crc32)
        if announce is not None:
            announce(name, workspace.out / name)

    def of_shard(shard: Shard) -> Sequence[ShardTask[Any]]:
        writer = workspace.open_shard(shard.name, shard.header_size, shard.fixed_size)
        writers.callback(writer.close)
        progress = ShardProgress(shard, plan.output.format, writer, partial(finish, writer, shard.name), audit)
        return shard_tasks(progress, pipeline.piece)

    names = set(workspace.finished)
    kept = [shard for shard in plan.output.shards if shard.name in names]
    pipeline.advance(sum(entry.source_bytes for shard in kept for entry in shard.jobs))
    if announce is not None:
        for shard in kept:
            announce(shard.name, workspace.out / shard.name)
    shards = (of_shard(shard) for shard in plan.output.shards if shard.name not in names)
    if plan.source.fetched is None or not plan.source.fetched.absent:
        return interleave(shards, _SHARDS_AT_A_TIME)
    return streamed(shards, cast("ShardStream", reader))


def _index(output: Plan, workspace: Workspace) -> bytes:
    total = sum(workspace.finished[shard.name].size - shard.header_size for shard in output.shards)
    weight_map = {name: shard.name for shard in output.shards for name in shard.tensor_names()}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
