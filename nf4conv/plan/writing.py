"""Holds everything that is known about an output checkpoint before a weight is read."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from nf4conv.choose.experts import Readers, readers_of
from nf4conv.choose.formats import dominant_dtype
from nf4conv.declaring import deciding
from nf4conv.format.dtypes import DTYPE_NAMES
from nf4conv.format.layout import Format
from nf4conv.format.units import size
from nf4conv.options import RunOptions, WritingOptions
from nf4conv.plan.arrange import arrange
from nf4conv.plan.jobs import CopyJob, Job, PackJob, Plan
from nf4conv.plan.provenance import (
    Provenance,
    count_dtypes,
    groups_of,
    not_packed,
    provenance_of,
)
from nf4conv.plan.rows import PlanTotals, TensorRow
from nf4conv.sources.foreign.floats import Fp8Scales
from nf4conv.sources.original_card import OriginalCard
from nf4conv.sources.record import record_of
from nf4conv.sources.source import Source
from nf4conv.version import __version__

NO_CONFIG: Final = (
    "config.json is missing, so no library knows what to load; put the model's config.json beside "
    "its weights, and run again"
)
"""The note on a source without a config.json."""


@dataclass(frozen=True)
class Part:
    """One of the parts in which several processes make the shards of a plan."""

    name: str  # "2/3" is the second of three
    whole: Plan  # the shards of all parts
    is_watched: bool = False  # True if a driver sees all parts succeed


@dataclass(frozen=True)
class Calibration:
    """Plans the calibration of one checkpoint, as the converter sees it.

    Attributes:
        described: the fields of nf4conv.json that are known before anything is computed.
        transformers: the version of transformers whose code runs the model.
        bytes_to_read: the bytes of the source that are read for it.
        bytes_spared: the source bytes that the run need not read afterwards to write the result: it
            reads the calibrated weights, which are in 4 bits, instead of the original ones.
        carry_out: takes a plan, the output folder, how to use the machine, and what to call with
            the source bytes that have been worked through since the last call. Calibrates what the
            plan says, or goes on with it, and returns the plan that writes it.
    """

    described: Mapping[str, Any]
    transformers: str
    bytes_to_read: int
    bytes_spared: int
    carry_out: Callable[[Any, Path, RunOptions, Callable[[int], None]], Any]


@dataclass(frozen=True)
class WritingPlan:
    """Plans one output checkpoint, quantized or decoded.

    Attributes:
        options: the options that the user gave.
        source: the checkpoint that is read.
        output: the output files, with what becomes of each tensor.
        config: the content of the output's config.json. None if the source has none.
        notes: lines that the user should read.
        front: the front matter of the source's model card, for a result that gets a card.
        part: the part whose shards `output` holds. None if `output` holds all of them.
        again: makes the same plan in another process. None for the submodel of a pipeline.
        calibration: how weights are calibrated. None if they are not.
        calibrated: what came of calibrating, as nf4conv.json says it. None before.
    """

    options: WritingOptions
    source: Source
    output: Plan
    config: Mapping[str, Any] | None
    notes: tuple[str, ...]
    front: OriginalCard = field(default_factory=OriginalCard)
    part: Part | None = None
    again: Callable[[], Any] | None = None
    calibration: Calibration | None = None
    calibrated: Mapping[str, Any] | None = None

    @property
    def parts(self) -> list[Self]:
        """Returns itself, as a pipeline's plan returns those of its submodels."""
        return [self]

    @property
    def jobs(self) -> Iterator[Job]:
        """Returns what is done for each output tensor."""
        return self.output.jobs

    def rows(self) -> list[TensorRow]:
        """Returns a row for each weight that is packed or decoded and each tensor that is kept."""
        rows = []
        for shard in self.output.shards:
            for job in shard.jobs:
                dtype = job.source.dtype if isinstance(job, PackJob) else job.dtype
                row = TensorRow(
                    name=job.name,
                    action=self._action_of(job),
                    reason=job.reason,
                    dtype=DTYPE_NAMES.get(dtype, dtype),
                    shape=job.shape,
                    parameters=job.elements,
                    bytes_before=job.source_bytes if _is_counted(job) else 0,
                    bytes=job.nbytes,
                    file=shard.name,
                )
                rows.append(row)
        return rows

    def _action_of(self, job: Job) -> str:
        """Returns what becomes of a tensor, as TensorRow has it."""
        if isinstance(job, PackJob):
            return "pack" if job.stored is None else "stay"
        if self.options.command == "dequantize":
            if job.source.unmerged is not job.source:
                return "merge"
            if job.source.encoding is not None:
                return "decode"
        return "copy" if job.dtype == job.source.dtype else "cast"

    @cached_property
    def totals(self) -> PlanTotals:
        """Adds up the rows."""
        jobs = [job for job in self.output.jobs if _is_counted(job)]
        counts = Counter(map(self._action_of, jobs))
        return PlanTotals(
            packed=counts["pack"] + counts["stay"],
            stay=counts["stay"],
            decoded=counts["decode"] + counts["merge"],
            copied=counts["copy"] + counts["cast"],
            shards=len(self.output.shards),
            parameters=sum(job.elements for job in self.output.jobs),
            bytes_before=sum(job.source_bytes for job in jobs),
            bytes_after=self.output.largest_size,
        )

    @cached_property
    def config_bytes(self) -> bytes | None:
        """Returns the output's config.json; None when the source has none."""
        if self.config is None:
            return None
        return (json.dumps(self.config, indent=2) + "\n").encode()

    @cached_property
    def record(self) -> dict[str, Any]:
        """Returns the content of nf4conv.json (sources/record.py).

        Reads samples of a source that is on this disk.
        """
        options = deciding(self.options)
        weights = groups_of(self.weights)
        others = count_dtypes(not_packed(self.whole, self.weights))
        record = record_of(self.source, self.options.command, __version__, options, weights, others)
        if self.calibration is not None:
            record["calibration"] = self.calibration.described
        if self.calibrated is not None:
            record["calibrated"] = self.calibrated
        return record

    @cached_property
    def weights(self) -> Mapping[str, Provenance]:
        """Returns what each weight in 4 bits of all parts is, by its name."""
        return provenance_of(self.source, self.whole)

    @cached_property
    def readers(self) -> Readers | None:
        """Says who reads experts that are packed; None if none are, or if every loader does."""
        matrices = (job.matrix for job in self.whole.jobs if isinstance(job, PackJob))
        return readers_of(matrices, self.source.config or {}, self.whole.format.quant_type)

    @property
    def whole(self) -> Plan:
        """Returns the output files of all parts."""
        return self.output if self.part is None else self.part.whole

    def space_needed(self, finished: Collection[str]) -> int:
        """Returns the most bytes that it still takes on disk beside shards that are finished."""
        unfinished = [shard for shard in self.output.shards if shard.name not in finished]
        needed = sum(shard.largest_size for shard in unfinished) + _bytes_streamed(self.source)
        if self.source.made is not None:  # a tokenizer takes a few megabytes
            return needed
        return needed + sum(
            (self.source.folder / name).stat().st_size for name in self.source.auxiliary
        )


def _is_counted(job: Job) -> bool:
    """Returns False for scales of a weight that becomes FP8: they are among its parts."""
    return not isinstance(job.source.encoding, Fp8Scales)


def plan_writing(
    options: WritingOptions,
    source: Source,
    groups: Sequence[Sequence[Job]],
    format: Format,
    config: Mapping[str, Any] | None,
    notes: Iterable[str] = (),
) -> WritingPlan:
    """Places the outputs of all jobs; those of a group are in one shard."""
    output = arrange(groups, format, max_shard_size=options.max_shard_size, stem=source.stem)
    notes = list(notes)
    streamed = _bytes_streamed(source)
    if streamed:
        notes.append(
            f"streams: at most {size(streamed)} of the source, two files, are on disk at a time; "
            f"with the result up to {size(streamed + output.largest_size)}"
        )
    return WritingPlan(options, source, output, config, tuple(notes))


def plan_unchanged(source: Source, options: WritingOptions) -> WritingPlan:
    """Plans a submodel of a diffusers pipeline in which nothing changes."""
    reason = "the submodel stays as it is"
    groups = [[CopyJob(tensor, tensor.dtype, reason)] for tensor in source.tensors]
    format = Format("nf4", 64, True, dominant_dtype(source.tensors))  # nothing is packed
    return plan_writing(options, source, groups, format, source.config)


def _bytes_streamed(source: Source) -> int:
    """Returns the most bytes that files take which are fetched while they are needed."""
    sizes = sorted(file.size for file in source.absent.values())
    return sum(sizes[-2:])  # one file in use, one on its way
