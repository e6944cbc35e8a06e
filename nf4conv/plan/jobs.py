"""The complete list of output tensors, their shards, offsets and sizes: a pure function of headers
and decisions.

No data is read. Everything a dry run prints comes from here, and every byte that the pipeline
writes has its place here, except the JSON blobs: the decimals of nested_offset vary in number. So
in each shard

    header, padded to its longest possible size
    tensors of 8-, 4-, 2- and 1-byte elements, in that order: everything is aligned without a hole
    the JSON blobs, packed tight when all their lengths are known

Within an alignment, tensors of one kind stand together in the order of the jobs, so that the
outputs of neighbouring small tensors are neighbours too and can be written together.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

from nf4conv.choose.decisions import Keep, Pack, PackedMatrix
from nf4conv.choose.unchanged import Stored
from nf4conv.errors import PlanError
from nf4conv.format.layout import DTYPE_NAMES, TAGS, Component, Format, components
from nf4conv.sources.header import LENGTH_BYTES, METADATA_KEY
from nf4conv.sources.tensors import DTYPE_BITS, Bitsandbytes4bit, TensorInfo

FLOAT_TAGS: Final = ("F32", "F16", "BF16", "F64")

_LARGEST_HEADER: Final = 50_000_000  # half of what safetensors accepts
_NBYTES: Final = attrgetter("nbytes")
_SPELL: Final = (
    json.encoder.encode_basestring_ascii
)  # of a text, as json.dumps, in a fraction of the time
_ALIGNMENTS: Final = {dtype: max(bits // 8, 1) for dtype, bits in DTYPE_BITS.items()}
_ENTRY_SYNTAX: Final = len(',:{"dtype":"","shape":[],"data_offsets":[,]}')


class Footprint(NamedTuple):
    """What weights of one shape take: worked out once, since models have few shapes and many
    weights.
    """

    # the tensors a weight becomes; the JSON blob, which is the last, with its longest length
    components: tuple[Component, ...]
    sizes: tuple[int, ...]  # bytes of each
    # (-alignment, kind, which one) of each but the blob: tensors of one kind stand together in a
    # shard, in this order
    kinds: tuple[tuple[int, str, int], ...]
    total: int  # bytes of all
    header: int  # the most that they take in a header, names left out


@lru_cache(maxsize=4096)
def footprint(format: Format, shape: tuple[int, ...]) -> Footprint:
    parts = components(format, shape)
    sizes = tuple(part.nbytes for part in parts)
    header = sum(1 + len(part.suffix) + _entry_size(part.dtype, part.shape) for part in parts)
    kinds = tuple(
        (-_ALIGNMENTS[part.dtype], f"packed {part.suffix}", place)
        for place, part in enumerate(parts[:-1])
    )
    return Footprint(parts, sizes, kinds, sum(sizes), header)


@dataclass(slots=True)
class PackJob:
    """One weight to be packed."""

    source: TensorInfo  # the tensor it is read from
    matrix: PackedMatrix  # which part of it, under which name
    reason: str  # why it is packed
    footprint: Footprint  # the tensors it becomes
    # what its components are copied from, if the source has them (choose/unchanged.py)
    stored: Stored | None = None
    # where each component begins, from the start of the shard's data; of the blob only once it is
    # known
    offsets: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.matrix.name

    @property
    def components(self) -> tuple[Component, ...]:
        return self.footprint.components

    @property
    def nbytes(self) -> int:
        return self.footprint.total

    @property
    def elements(self) -> int:
        return math.prod(self.matrix.shape)

    @property
    def source_bytes(self) -> int:
        return self.source.nbytes * self.elements // max(self.source.elements, 1)

    @property
    def is_cut_out(self) -> bool:
        """Whether the weight's elements are not one run of its source's bytes, in order."""
        return (
            self.matrix.transpose
            or self.matrix.columns is not None
            or self.source.encoding is not None
        )

    @property
    def source_range(self) -> tuple[int, int]:
        """The bytes of the source file that hold the weight, with all columns of its rows."""
        *_, height, width = self.source.shape
        row = width * DTYPE_BITS[self.source.dtype] // 8
        first, last = self.matrix.rows or (0, height)
        start = self.source.start + (self.matrix.expert or 0) * height * row
        return start + first * row, start + last * row


@dataclass(slots=True)
class CopyJob:
    """One tensor that is kept."""

    source: TensorInfo  # the tensor
    dtype: str  # dtype tag it is stored in; another than the source's means a cast
    reason: str  # why it is not packed
    offset: int = 0  # where it begins, from the start of the shard's data
    nbytes: int = field(init=False)  # how many it takes there

    def __post_init__(self) -> None:
        self.nbytes = self.source.elements * DTYPE_BITS[self.dtype] // 8

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def is_changed(self) -> bool:
        """Whether its values are decoded or cast."""
        return self.source.encoding is not None or self.dtype != self.source.dtype

    @property
    def steps(self) -> tuple[str, ...]:
        """The dtypes that its values go through, from what they are stored in, or decoded to.

        A single one holds whatever is decoded. Otherwise finite values may become infinite on the
        way.
        """
        tags, encoding = [self.source.dtype, self.dtype], self.source.encoding
        if encoding is not None:
            if isinstance(encoding, Bitsandbytes4bit):
                holds_all = self.dtype == encoding.dtype
            else:
                holds_all = self.dtype != "F16"
            if not holds_all or self.dtype != self.source.dtype:
                tags.insert(0, "F32")
        return tuple(tag for tag, _ in groupby(tags))

    @property
    def elements(self) -> int:
        return self.source.elements

    @property
    def source_bytes(self) -> int:
        return self.source.nbytes


Job = PackJob | CopyJob


@dataclass(frozen=True)
class Shard:
    """One output file."""

    name: str  # file name
    jobs: tuple[Job, ...]  # what it holds, in the order in which the source is read
    header_size: int  # bytes reserved for the header
    fixed_size: int  # bytes of data before the first JSON blob
    blobs_size: int  # the most that the JSON blobs can take

    @property
    def largest_size(self) -> int:
        """The most bytes that the file can have."""
        return self.header_size + self.fixed_size + self.blobs_size

    def tensor_names(self) -> Iterator[str]:
        for job in self.jobs:
            if isinstance(job, CopyJob):
                yield job.name
            else:
                yield from (component_name(job, part) for part in job.components)

    def entries(self) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
        """(name, dtype, shape, start, stop) of every tensor but the JSON blobs, as `build_header`
        takes them.
        """
        for job in self.jobs:
            if isinstance(job, CopyJob):
                yield job.name, job.dtype, job.source.shape, job.offset, job.offset + job.nbytes
            else:
                for part, offset in zip(
                    job.components, job.offsets, strict=False
                ):  # the blob has no offset yet
                    yield (
                        component_name(job, part),
                        part.dtype,
                        part.shape,
                        offset,
                        offset + part.nbytes,
                    )


@dataclass(frozen=True)
class Plan:
    """What a run will write."""

    format: Format  # how weights are packed
    shards: tuple[Shard, ...]  # the output files

    @property
    def jobs(self) -> Iterator[Job]:
        return (job for shard in self.shards for job in shard.jobs)

    @cached_property
    def largest_size(self) -> int:
        """The most bytes that all shards together can take."""
        return sum(shard.largest_size for shard in self.shards)


def component_name(job: PackJob, component: Component) -> str:
    return f"{job.matrix.name}.{component.suffix}" if component.suffix else job.matrix.name


def source_files(shards: Iterable[Shard]) -> set[Path]:
    """The source files that shards are made from; of encoded tensors, those of their largest parts."""
    return {job.source.file for shard in shards for job in shard.jobs}


def plan_fingerprint(output: Plan) -> str:
    """What becomes of each tensor, and in which file: one that is decided anew on resuming must be
    decided alike.
    """
    digest = hashlib.sha256()
    for shard in output.shards:
        digest.update(repr((shard.name, [(job.name, _kind(job)) for job in shard.jobs])).encode())
    return digest.hexdigest()


def _kind(job: Job) -> str:
    return "copied" if isinstance(job, CopyJob) else "unchanged" if job.stored else "packed"


def make_plan(
    tensors: Sequence[TensorInfo],
    decisions: Mapping[str, Pack | Keep],
    format: Format,
    *,
    max_shard_size: int,
    stem: str = "model",
    unchanged: Mapping[str, Stored | str] | None = None,
) -> Plan:
    """Place every output tensor, given what becomes of each tensor of the source, by name.

    The tensors come in the order in which they are to be read. `unchanged` says what weights that
    are in 4 bits already are copied from, by name, or why they are packed anew. The other arguments
    and errors are as of `arrange`; a tensor that cannot be packed as decided is a PlanError, too.
    """
    known = unchanged or {}
    jobs = [
        job
        for tensor in tensors
        for job in _jobs(tensor, decisions[tensor.name], format, known.get(tensor.name))
    ]
    return arrange([[job] for job in jobs], format, max_shard_size=max_shard_size, stem=stem)


def arrange(
    groups: Sequence[Sequence[Job]], format: Format, *, max_shard_size: int, stem: str = "model"
) -> Plan:
    """Divide jobs into shards and place them; a PlanError if two outputs would have one name.

    The outputs of a group must be in one shard; groups and their jobs come in the order in which
    they are to be read. A single group of more bytes than `max_shard_size` gets a shard of its own.
    `stem` is the base name of the files.
    """
    _check_names([job for group in groups for job in group])
    shards = list(
        _split(groups, max_shard_size)
    )  # of each its jobs, and the most that they take in the header
    numbers = (
        [f"-{number:05d}-of-{len(shards):05d}" for number in range(1, len(shards) + 1)]
        if shards[1:]
        else [""]
    )
    placed = (
        _place(f"{stem}{number}.safetensors", *shard)
        for number, shard in zip(numbers, shards, strict=True)
    )
    return Plan(format, tuple(placed))


def _jobs(
    tensor: TensorInfo, decision: Pack | Keep, format: Format, stored: Stored | str | None
) -> Sequence[Job]:
    reason = (
        decision.reason
        if tensor.unmerged is tensor
        else f"{decision.reason}, merged with an adapter"
    )
    if isinstance(decision, Keep):
        cast = tensor.dtype in FLOAT_TAGS and not decision.keep_dtype
        return (CopyJob(tensor, TAGS[format.dtype] if cast else tensor.dtype, reason),)
    if tensor.dtype not in FLOAT_TAGS:
        raise PlanError(
            f"{tensor.file}: {tensor.name}: {tensor.dtype} cannot be packed; expected a float dtype"
        )
    if isinstance(stored, Stored):
        [matrix] = decision.matrices
        own = replace(format, dtype=DTYPE_NAMES[tensor.dtype])
        return (PackJob(tensor, matrix, "stays as it is", footprint(own, matrix.shape), stored),)
    why = reason if stored is None else f"{reason}, packed anew: {stored}"
    return [
        PackJob(tensor, matrix, why, footprint(format, matrix.shape))
        for matrix in decision.matrices
    ]


def _check_names(jobs: Sequence[Job]) -> None:
    seen: dict[str, Job] = {}
    for job in jobs:
        if seen.setdefault(job.name, job) is not job:
            raise PlanError(
                f"{job.source.file}: {job.name}: two output tensors would have this name"
            )
    for name, job in seen.items():
        weight, found, suffix = name.rpartition(".weight.")
        packed = seen.get(f"{weight}.weight") if found else None
        if isinstance(packed, PackJob) and suffix in [part.suffix for part in packed.components]:
            raise PlanError(
                f"{job.source.file}: {name}: a tensor of the packed {packed.name} would have this "
                f"name"
            )


def _split(groups: Sequence[Sequence[Job]], max_shard_size: int) -> Iterator[tuple[list[Job], int]]:
    shard: list[Job] = []
    size = header = 0
    for group in groups:
        group_size, group_header = sum(map(_NBYTES, group)), sum(map(_header_size, group))
        if shard and (
            size + group_size > max_shard_size or header + group_header > _LARGEST_HEADER
        ):
            yield shard, header
            shard, size, header = [], 0, 0
        shard += group
        size += group_size
        header += group_header
    yield shard, header


@lru_cache(maxsize=4096)
def _entry_size(dtype: str, shape: tuple[int, ...]) -> int:
    """The most that an entry of the header takes, its name left out."""
    return len(dtype) + len(str(shape)) + 2 * len(str(2**48)) + _ENTRY_SYNTAX


def _header_size(job: Job) -> int:
    """The most that a job's tensors take in the header."""
    name = len(_SPELL(job.name))
    if isinstance(job, CopyJob):
        return name + _entry_size(job.dtype, job.source.shape)
    return name * len(job.components) + job.footprint.header


def _place(name: str, jobs: list[Job], entries: int) -> Shard:
    copies: defaultdict[int, list[CopyJob]] = defaultdict(list)  # by -alignment
    packed: list[PackJob] = []
    for job in jobs:
        if isinstance(job, CopyJob):
            copies[-_ALIGNMENTS[job.dtype]].append(job)
        else:
            packed.append(job)
            job.offsets = [0] * len(job.footprint.kinds)
    # those of one weight are those of all, for the format is one
    kinds = [
        *((alignment, "copy", 0) for alignment in copies),
        *(packed[0].footprint.kinds if packed else ()),
    ]
    position = 0
    for alignment, kind, index in sorted(kinds):
        for copy in copies[alignment] if kind == "copy" else ():
            copy.offset = position
            position += copy.nbytes
        for job in packed if kind != "copy" else ():
            job.offsets[index] = position
            position += job.footprint.sizes[index]
    blobs_size = sum(job.footprint.sizes[-1] for job in packed)
    metadata = len(json.dumps({METADATA_KEY: {"format": "pt"}}))
    header = LENGTH_BYTES + metadata + entries
    return Shard(name, tuple(jobs), header + -header % 8, position, blobs_size)
