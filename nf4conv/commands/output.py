"""From a plan to a finished output folder: what every command that writes a checkpoint does around
its tasks.

space ▸ shard tasks ▸ auxiliary files ▸ index ▸ card, nf4conv.json ▸ config.json: it makes the
folder a checkpoint.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, cast

from nf4conv import __version__
from nf4conv.errors import OutputError, SourceError, VerificationError
from nf4conv.format.layout import Format
from nf4conv.options import DequantizeOptions, QuantizeOptions, RunOptions
from nf4conv.output.shared_folder import SharedFolder
from nf4conv.output.workspace import OutputFolder, Workspace
from nf4conv.output.writer import ShardWriter, let_go
from nf4conv.plan.jobs import (
    CopyJob,
    Job,
    PackJob,
    Plan,
    Shard,
    arrange,
    plan_fingerprint,
    source_files,
)
from nf4conv.report.loading import Loading, loading_of
from nf4conv.report.rows import PlanRow, VerificationSummary
from nf4conv.run.audit import AuditOfWritten
from nf4conv.run.engines import ShardTasks
from nf4conv.run.loop import Engine, Pipeline, Task, interleave, make_pipeline
from nf4conv.run.shards import ShardProgress, ShardTask, streamed
from nf4conv.sources.auxiliary import auxiliary_files
from nf4conv.sources.reader import Reader, digest_of
from nf4conv.sources.record import MAKING, as_bytes, record_of
from nf4conv.sources.source import Source, changed_files, source_changes, source_stamps
from nf4conv.sources.unfinished import PARTS, SHARDS

if TYPE_CHECKING:
    from nf4conv.sources.remote.stream import ShardStream

_SHARDS_AT_A_TIME: Final = 8
"""Measured on Linux: writes to one file do not overlap (2.5 GB/s from 8 threads, tmpfs or disk); to
several files they do (8.5 GB/s to 4, 17 GB/s to 8). More would leave more to be done again after an
interruption.
"""


class Part(NamedTuple):
    """One of the parts in which the shards of a plan are made."""

    name: str  # "2/3" is the second of three
    of: int  # so many parts
    shares: Mapping[str, int]  # the number of the part that makes each shard
    whole: Plan  # the shards of all parts


@dataclass(frozen=True)
class WritingPlan:
    """Everything that is known of an output checkpoint before a weight is read."""

    command: ClassVar[str]
    """By which it was made."""

    options: QuantizeOptions | DequantizeOptions  # what was asked for
    source: Source  # the checkpoint that is read
    output: Plan  # the output files
    config: (
        Mapping[str, Any] | None
    )  # the content of the output's config.json; None when the source has none
    notes: tuple[str, ...]  # what the user should know
    # what the source's card says at its top, for one that gets a card
    front: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    part: Part | None = field(
        default=None, kw_only=True
    )  # of which `output` has the shards; None for all of them
    again: Callable[[], Any] | None = field(
        default=None, kw_only=True
    )  # makes the same plan in another process

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
        """By what it is made, see sources/record.py; a source on this disk is read for it."""
        options, format = asdict(self.options), asdict(self.output.format)
        if self.command == "quantize":  # what was left open is decided
            options = {key: format.get(key, value) for key, value in options.items()}
        return record_of(self.source, self.command, __version__, options)

    @property
    def loading(self) -> Loading | None:
        """How the result is loaded; None if nothing says how."""
        return loading_of(
            self.config, [str(name) for name in self.auxiliary], self.output.format.dtype
        )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Shards, parameters, bytes before and at most after: what totals end with."""
        jobs = list(self.output.jobs)
        elements, before = sum(job.elements for job in jobs), sum(job.source_bytes for job in jobs)
        return len(self.output.shards), elements, before, self.output.largest_size

    def changes_weights(self) -> bool:
        """Whether any weight is packed, or decoded."""
        return any(
            isinstance(job, PackJob) or job.source.encoding is not None for job in self.output.jobs
        )

    @property
    def whole(self) -> Plan:
        """The output files of all parts."""
        return self.output if self.part is None else self.part.whole

    def decided(self) -> dict[str, Any]:
        """What decides the bytes of the result beside the source and the options, as JSON values."""
        return {}

    def card(self, bytes_after: int, verified: VerificationSummary | None) -> str | None:  # noqa: ARG002
        """The output's README.md, given the size of its weight files and an audit's summary; None
        when it gets none.
        """
        return None


def kept_as_stored(submodel: Source, format: Format, max_shard_size: int) -> Plan:
    """The output files of a submodel of a diffusers pipeline in which nothing changes."""
    groups = [
        [CopyJob(tensor, tensor.dtype, "the submodel stays as it is")]
        for tensor in submodel.tensors
    ]
    return arrange(groups, format, max_shard_size=max_shard_size, stem=submodel.stem)


def notes_on_links(source: Source) -> tuple[str, ...]:
    """A line for each file that is not copied, because it is not the source's own."""
    strays = (
        () if source.config is None else auxiliary_files(source.folder, source.root, strays=True)
    )
    return tuple(
        f"{name}: a link that leads out of {source.root}; it is not copied" for name in strays
    )


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
    """Whatever decides the bytes of a result, so that an interrupted run is resumed only by its
    like.
    """
    return {
        "command": plan.command,
        "version": __version__,
        "torch": version("torch"),
        "device": device.partition(":")[0],
        "source files": source_stamps(plan.source),
        "source headers": plan.record["source"]["headers_sha256"],
        "source config": plan.source.config,
        "adapters": [[str(adapter), adapter.config] for adapter in plan.source.adapters],
        **{f"--{name.replace('_', '-')}": value for name, value in asdict(plan.options).items()},
        **plan.decided(),
        "plan": plan_fingerprint(plan.whole),
    }


def _require_unchanged(source: Source, what: str, files: Collection[Path] | None = None) -> None:
    """Refuse by a SourceError a source that has changed, or of its weight files only some."""
    others = () if files is None else {*source.files} - {*files}
    for file in changed_files(
        {file: stamp for file, stamp in source.stamps.items() if file not in others}
    ):
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
        is_audited: whether everything that is written is looked at; no shard of an earlier run then
            counts as finished.

    Returns:
        The fields of a RunReport but `copied` and `bytes_before`, and an audit's summary, if there
        was one, as "verification".

    Raises:
        SourceError, OutputError: the source cannot be read, the destination not written.
        VerificationError: what has been written is not what was to be; the folder then does not
            look finished.
    """
    started = time.perf_counter()
    check_apart(plan.source.folder, out)
    engine, shard_tasks = computed_by
    pipeline = make_pipeline(engine, run, progress)
    before = pipeline.memory()
    make = partial(AuditOfWritten, pipeline.piece, run.tolerance) if is_audited else None
    opened: Workspace | SharedFolder
    if plan.part is None:
        _require_unchanged(plan.source, "since it was planned; run again")
        fingerprint, stamps = _fingerprint(plan, engine.device), source_changes(plan.source)
        opened = Workspace(out, fingerprint, stamps, overwrite=run.overwrite, checksum=run.checksum)
    else:
        opened = SharedFolder(out)
    with opened as folder:
        if plan.part is not None and isinstance(folder, SharedFolder):
            folder.join(
                _described(plan, plan.part, run, engine.device), plan.source.folder, plan.output
            )
        elif is_audited and isinstance(folder, Workspace):
            folder.forget()  # shards of an earlier run, which nobody has looked at
        resumed = len(folder.finished)
        verified = _Run(
            plan, folder, pipeline, shard_tasks, announce or (lambda *_: None), make
        ).write()
        after = pipeline.memory()
        figures = {
            "out": str(out),
            "already_complete": False,
            "part": None if plan.part is None else plan.part.name,
            "device": engine.device,
            "bytes_after": sum(shard.size for shard in folder.finished.values()),
            "seconds": time.perf_counter() - started,
            "pipeline_seconds": pipeline.elapsed,
            "seconds_by_activity": {
                activity.value: spent for activity, spent in pipeline.seconds.items()
            },
            "host_baseline_bytes": before.host,
            "host_peak_bytes": after.host,
            "device_peak_bytes": after.device,
            "shards_resumed": resumed,
            "notes": plan.notes,
        }
    return figures if verified is None else {**figures, "verification": verified}


def _described(plan: WritingPlan, part: Part, run: RunOptions, device: str) -> dict[str, Any]:
    """What all parts make, as JSON values: all that they are held to, and that `finish` must know
    of the source.
    """
    source, config = plan.source, plan.config_bytes
    return {
        **_fingerprint(plan, device),
        **{f"--{name}": getattr(run, name) for name in ("checksum", "verify", "tolerance")},
        **{f"source {name}": value for name, value in plan.record["source"].items()},
        "source files": {
            name: stamp[:1] for name, stamp in source_stamps(source).items()
        },  # sizes, but no times
        **dict.fromkeys(("adapters", "--lora")),  # which may be paths
        PARTS: part.of,
        SHARDS: part.shares,
        "auxiliary": {str(name): digest_of(source.folder / name) for name in plan.auxiliary},
        "stem": source.stem,
        "config.json": None if config is None else config.decode(),
        "model card": plan.card(0, None),
        "bytes": sum(tensor.nbytes for tensor in source.tensors),
        "parameters": sum(job.elements for job in part.whole.jobs),
        MAKING: plan.record,
    }


@dataclass(frozen=True)
class _Run:
    """What fills a folder."""

    plan: WritingPlan
    folder: Workspace | SharedFolder
    pipeline: Pipeline[Any]
    shard_tasks: ShardTasks
    announce: Callable[[str, Path], None]
    make_audit: Callable[[], AuditOfWritten] | None  # of a shard

    def write(self) -> VerificationSummary | None:
        """Fill the folder, which then is a finished checkpoint if it is not filled in parts; an
        audit's summary.
        """
        plan, folder = self.plan, self.folder
        folder.check_space(space_needed(plan, folder.finished))
        with _open_reader(plan, folder) as reader, ExitStack() as writers:
            self.pipeline.run(self._tasks(writers, reader), reader)
        verified = None if self.make_audit is None else verification_of(folder)
        if isinstance(folder, Workspace):
            _require_unchanged(plan.source, "while it was read; start anew with --overwrite")
            for name in plan.auxiliary:
                folder.copy(str(name), plan.source.folder / name)
            files = {
                name: shard.name for shard in plan.output.shards for name in shard.tensor_names()
            }
            size = sum(shard.size for shard in folder.finished.values())
            index = index_of(
                plan.source.stem,
                size - sum(shard.header_size for shard in plan.output.shards),
                files,
            )
            complete(
                folder, index, plan.card(size, verified), plan.record, verified, plan.config_bytes
            )
        return verified

    def _tasks(self, writers: ExitStack, reader: Reader) -> Iterator[Task[Any]]:
        """All tasks, of a few shards in turn: one file takes the writes of one thread at a time."""
        finished = [
            shard for shard in self.plan.output.shards if shard.name in self.folder.finished
        ]
        self.pipeline.advance(sum(entry.source_bytes for shard in finished for entry in shard.jobs))
        for shard in finished:
            self.announce(shard.name, self.folder.out / shard.name)
        names = {shard.name for shard in finished}
        shards = (
            self._of_shard(shard, writers)
            for shard in self.plan.output.shards
            if shard.name not in names
        )
        if self.plan.source.fetched is None or not self.plan.source.fetched.absent:
            return interleave(shards, _SHARDS_AT_A_TIME)
        return streamed(shards, cast("ShardStream", reader))

    def _of_shard(self, shard: Shard, writers: ExitStack) -> Sequence[ShardTask[Any]]:
        writer = self.folder.open_shard(shard.name, shard.header_size, shard.fixed_size)
        writers.callback(writer.close)
        audit = None if self.make_audit is None else self.make_audit()
        finished = partial(self._finish, shard, writer, audit)
        progress = ShardProgress(shard, self.plan.output.format, writer, finished, audit)
        return self.shard_tasks(progress, self.pipeline.piece)

    def _finish(
        self, shard: Shard, writer: ShardWriter, audit: AuditOfWritten | None, size: int
    ) -> None:
        if faults := [] if audit is None else list(audit.faults()):
            more = f" (and {len(faults) - 1:,} more)" if len(faults) > 1 else ""
            raise VerificationError(f"{self.folder.out}: verification failed: {faults[0]}{more}")
        if isinstance(
            self.folder, SharedFolder
        ):  # a later part cannot tell whether this has changed
            _require_unchanged(
                self.plan.source, "while it was read; start anew without OUT", source_files([shard])
            )
        read = sum(job.source_bytes for job in shard.jobs)
        self.folder.record(
            shard.name, size, writer.crc32, read, None if audit is None else asdict(audit.summary())
        )
        self.announce(shard.name, self.folder.out / shard.name)
        if (
            self.plan.output.largest_size
            > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
        ):
            let_go(
                self.folder.out / shard.name
            )  # whoever reads it next would not find all of it in memory anyway


def verification_of(folder: OutputFolder) -> VerificationSummary:
    """The summary of all audits of finished shards."""
    return VerificationSummary.joined(
        [file.verified for file in folder.finished.values() if file.verified is not None]
    )


def complete(
    folder: OutputFolder,
    index: Mapping[str, bytes],
    card: str | None,
    record: Mapping[str, Any],
    verified: VerificationSummary | None,
    config: bytes | None,
) -> None:
    """Write what stands beside the weights and what is copied, config.json last."""
    readme = {} if card is None else {"README.md": card.encode(errors="backslashreplace")}
    measured = {} if verified is None else {"verified": verified.measured()}
    for name, content in {**index, **readme, MAKING: as_bytes({**record, **measured})}.items():
        folder.write(name, content)
    folder.complete({} if config is None else {"config.json": config})


def space_needed(plan: WritingPlan, finished: Collection[str]) -> int:
    """The most bytes that a plan still takes on disk, given the names of its finished shards."""
    shards = sum(shard.largest_size for shard in plan.output.shards if shard.name not in finished)
    fetched = () if plan.source.fetched is None else plan.source.fetched.absent.values()
    on_disk = sum(sorted(file.size for file in fetched)[-2:])  # one in use, one on its way
    return (
        shards
        + on_disk
        + sum((plan.source.folder / name).stat().st_size for name in plan.auxiliary)
    )


def _open_reader(plan: WritingPlan, folder: OutputFolder) -> Reader:
    """A reader of the source; of one that is streamed, it fetches what unfinished shards need.

    Of a file that other parts need too, each part asks for its own tensors.
    """
    fetched = plan.source.fetched
    if fetched is None or fetched.repository is None or not fetched.absent:
        return Reader()
    from nf4conv.sources.remote.stream import ShardStream  # importing huggingface_hub takes a while

    shards = [shard for shard in plan.output.shards if shard.name not in folder.finished]
    mine = {shard.name for shard in plan.output.shards}
    others = [shard for shard in plan.whole.shards if shard.name not in mine]
    return ShardStream(
        fetched.repository,
        fetched.absent,
        order={file: number for number, file in enumerate(plan.source.files)},
        needed=(source_files(shards) - source_files(others)) & fetched.absent.keys(),
        folder=folder.downloads,
    )


def index_of(stem: str, total: int, files: Mapping[str, str]) -> dict[str, bytes]:
    """The index, by its name, given the bytes of all tensors and the file of each; none for a
    single file.
    """
    if len({*files.values()}) <= 1:
        return {}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    return {
        f"{stem}.safetensors.index.json": (
            json.dumps(index, indent=2, ensure_ascii=False) + "\n"
        ).encode()
    }
