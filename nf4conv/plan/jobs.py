"""Holds the parts of a plan: one job for each output tensor, shards of jobs, and the whole.

Everything that a dry run prints comes from here.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from nf4conv.choose.decisions import PackedMatrix
from nf4conv.format.dtypes import DTYPE_BITS, TAGS
from nf4conv.format.layout import Component, Format, components
from nf4conv.sources.arranged import StackedExperts
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.tensors import TensorInfo

_ENTRY_SYNTAX: Final = len(',:{"dtype":"","shape":[],"data_offsets":[,]}')

_quoted: Final = json.encoder.encode_basestring_ascii
"""Quotes a text as json.dumps does, in a fraction of the time."""


@lru_cache(maxsize=4096)
def _stored_as(format: Format, shape: tuple[int, ...]) -> tuple[tuple[Component, ...], int, int]:
    """Returns the components of a weight, the bytes of all, and the most bytes that they take in a
    header without their names.

    Models have few shapes and many weights.
    """
    parts = components(format, shape)
    header = sum(1 + len(part.suffix) + _entry_size(part.dtype, part.shape) for part in parts)
    return parts, sum(part.nbytes for part in parts), header


@lru_cache(maxsize=4096)
def _entry_size(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the most bytes that an entry of the header takes, without the tensor's name."""
    longest_offsets = 2 * len(str(2**48))
    return len(dtype) + len(str(shape)) + longest_offsets + _ENTRY_SYNTAX


@dataclass(slots=True)
class PackJob:
    """Packs one weight."""

    # tensor that it is read from
    source: TensorInfo
    # part of that tensor, and the name of the weight
    matrix: PackedMatrix
    # why it is packed
    reason: str
    # how it is packed
    format: Format
    # what its components are copied from; None for a weight that has to be packed
    stored: Bitsandbytes4bit | None = None
    # the job that reads a calibrated weight from the checkpoint; None for any other weight. Once
    # the weight has been calibrated, `source` and `stored` are the result
    original: "PackJob | None" = None
    # where each component but the blob begins, from the start of the shard's data
    offsets: list[int] = field(default_factory=list)
    # tensors that the weight becomes; the last is the JSON blob, with its longest length
    components: tuple[Component, ...] = field(init=False)
    # the most bytes of all of them
    nbytes: int = field(init=False)
    # the most bytes that they take in the header
    header_size: int = field(init=False)
    # share of the source tensor's bytes that stand for the weight
    source_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.components, self.nbytes, header = _stored_as(self.format, self.matrix.shape)
        self.header_size = header + len(_quoted(self.name)) * len(self.components)
        self.source_bytes = self.source.nbytes
        if self.matrix.shape != self.source.shape:
            size = self.source_bytes * self.elements
            self.source_bytes = size // max(self.source.elements, 1)

    @property
    def name(self) -> str:
        return self.matrix.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    @property
    def elements(self) -> int:
        return math.prod(self.matrix.shape)

    @property
    def is_cut_out(self) -> bool:
        """Returns True unless the weight's elements are one run of its source's bytes, in order."""
        matrix = self.matrix
        if matrix.transpose or matrix.columns is not None or matrix.step > 1:
            return True
        return self.source.encoding is not None

    @property
    def source_range(self) -> tuple[int, int]:
        """Returns the range of source bytes that hold the weight, with all columns of its rows."""
        if self.matrix.expert is None and self.matrix.rows is None:
            return self.source.start, self.source.stop
        *_, height, width = self.source.shape
        row = width * DTYPE_BITS[self.source.dtype] // 8
        first, last = self.matrix.rows or (0, height)
        start = self.source.start + (self.matrix.expert or 0) * height * row
        return start + first * row, start + last * row


@dataclass(slots=True)
class CopyJob:
    """Keeps one tensor."""

    # the tensor
    source: TensorInfo
    # dtype tag that it is stored in; another than the source's means a cast
    dtype: str
    # why it is not packed
    reason: str
    # where it begins, from the start of the shard's data
    offset: int = 0
    # bytes that it takes there
    nbytes: int = field(init=False)
    # the most bytes that it takes in the header
    header_size: int = field(init=False)
    # bytes that it is read from
    source_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.source_bytes = self.source.nbytes
        self.nbytes = self.source.elements * DTYPE_BITS[self.dtype] // 8
        self.header_size = len(_quoted(self.name)) + _entry_size(self.dtype, self.source.shape)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def is_changed(self) -> bool:
        """Returns True if its values are decoded or cast."""
        return self.source.encoding is not None or self.dtype != self.source.dtype

    @property
    def steps(self) -> tuple[str, ...]:
        """Returns the dtypes that its values go through, beginning with what is stored or decoded.

        A single dtype can hold all values. With several, finite values may become infinite on the
        way.
        """
        encoding = self.source.encoding
        if encoding is None:
            steps = [self.source.dtype, self.dtype]
        elif self.dtype == self.source.dtype and self._holds_what_is_decoded():
            steps = [self.dtype]
        else:
            steps = ["F32", self.source.dtype, self.dtype]
        return tuple(tag for tag, _ in groupby(steps))

    def _holds_what_is_decoded(self) -> bool:
        """Returns True if no value that is decoded is too large for the dtype of the output."""
        encoding = self.source.encoding
        if isinstance(encoding, Bitsandbytes4bit):
            return self.dtype == TAGS[encoding.format.dtype]
        if isinstance(encoding, StackedExperts):
            return all(part.dtype == self.dtype for _, part in encoding.parts)
        return self.dtype != "F16"

    @property
    def elements(self) -> int:
        return self.source.elements


Job: TypeAlias = PackJob | CopyJob


def component_name(job: PackJob, component: Component) -> str:
    """Returns the name of a component of a packed weight."""
    return f"{job.matrix.name}.{component.suffix}" if component.suffix else job.matrix.name


class Entry(NamedTuple):
    """Describes a tensor of a shard, as `sources.header.build_header` takes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """Plans one output file."""

    # file name
    name: str
    # what it holds, in the order in which the source is read
    jobs: tuple[Job, ...]
    # bytes reserved for the header
    header_size: int
    # bytes of data before the first JSON blob
    fixed_size: int
    # the most bytes that the file can have
    largest_size: int

    @property
    def source_bytes(self) -> int:
        """Returns how many bytes of the source are read for it."""
        return sum(job.source_bytes for job in self.jobs)

    def entries(self) -> Iterator[Entry]:
        """Yields every tensor but the JSON blobs."""
        for job in self.jobs:
            if isinstance(job, CopyJob):
                stop = job.offset + job.nbytes
                yield Entry(job.name, job.dtype, job.source.shape, job.offset, stop)
                continue
            for part, offset in zip(job.components, job.offsets, strict=False):  # the blob has none
                name = component_name(job, part)
                yield Entry(name, part.dtype, part.shape, offset, offset + part.nbytes)


@dataclass(frozen=True)
class Plan:
    """Plans what a run writes."""

    # how weights are packed
    format: Format
    # output files
    shards: tuple[Shard, ...]

    @property
    def jobs(self) -> Iterator[Job]:
        """Returns the jobs of all shards."""
        return (job for shard in self.shards for job in shard.jobs)

    def with_jobs(self, changed: Callable[[Job], Job]) -> "Plan":
        """Returns the plan with other jobs in the same places, which take as many bytes."""
        shards = tuple(
            replace(shard, jobs=tuple(changed(job) for job in shard.jobs)) for shard in self.shards
        )
        return replace(self, shards=shards)

    @cached_property
    def bytes_to_read(self) -> int:
        """Counts the source bytes that stand for what is written."""
        return sum(job.source_bytes for job in self.jobs)

    @cached_property
    def largest_size(self) -> int:
        """Returns the most bytes that all shards together can take."""
        return sum(shard.largest_size for shard in self.shards)


def source_files(shards: Iterable[Shard]) -> set[Path]:
    """Returns the source files that shards are made from."""
    found = set()
    for shard in shards:
        for job in shard.jobs:
            found |= job.source.files
    return found
