"""Places every output tensor: divides jobs into shards and gives each its offset.

No data is read. Every byte that a run writes has its place here, except the JSON blobs: the
decimals of nested_offset vary in number. So each shard holds

    the header, padded to its longest possible size
    tensors of 8-, 4-, 2- and 1-byte elements, in that order: everything is aligned without a hole
    the JSON blobs, packed tight when all their lengths are known

Within an alignment, copies come first, and then one component of all weights after the other, by
its suffix. So the outputs of neighbouring small tensors are neighbours too, and can be written
together.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from nf4conv.choose.decisions import Keep, Pack
from nf4conv.errors import PlanError
from nf4conv.format.dtypes import DTYPE_NAMES, FLOAT_TAGS, TAGS
from nf4conv.format.layout import Format, split_component
from nf4conv.plan.jobs import (
    ALIGNMENTS,
    CopyJob,
    Job,
    PackJob,
    Plan,
    Shard,
    entry_size,
)
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.header import LENGTH_BYTES, METADATA_KEY
from nf4conv.sources.tensors import TensorInfo

_LARGEST_HEADER: Final = 50_000_000  # half of what safetensors accepts

_quoted: Final = json.encoder.encode_basestring_ascii
"""Quotes a text as json.dumps does, in a fraction of the time."""


def make_plan(
    tensors: Sequence[TensorInfo],
    decisions: Mapping[str, Pack | Keep],
    format: Format,
    *,
    max_shard_size: int,
    stem: str = "model",
    unchanged: Mapping[str, Bitsandbytes4bit | str] | None = None,
) -> Plan:
    """Places every output tensor, given what becomes of each tensor of the source."""
    known = unchanged or {}
    groups: list[list[Job]] = []
    for tensor in tensors:
        jobs = _jobs(tensor, decisions[tensor.name], format, known.get(tensor.name))
        groups += [[job] for job in jobs]
    return arrange(groups, format, max_shard_size=max_shard_size, stem=stem)


def _jobs(
    tensor: TensorInfo, decision: Pack | Keep, format: Format, stored: Bitsandbytes4bit | str | None
) -> list[Job]:
    """Returns what is to be done for one tensor of the source."""
    reason = decision.reason
    if tensor.unmerged is not tensor:
        reason = f"{reason}, merged with an adapter"
    if isinstance(decision, Keep):
        is_cast = tensor.dtype in FLOAT_TAGS and not decision.keep_dtype
        return [CopyJob(tensor, TAGS[format.dtype] if is_cast else tensor.dtype, reason)]
    if tensor.dtype not in FLOAT_TAGS:
        raise PlanError.about(
            tensor.file, tensor.name, f"{tensor.dtype} cannot be packed; expected a float dtype"
        )
    if isinstance(stored, Bitsandbytes4bit):
        [matrix] = decision.matrices
        own = replace(format, dtype=DTYPE_NAMES[tensor.dtype], scales=stored.scales)
        return [PackJob(tensor, matrix, "stays as it is", own, stored)]
    if stored is not None:
        reason = f"{reason}, packed anew: {stored}"
    return [PackJob(tensor, matrix, reason, format) for matrix in decision.matrices]


def arrange(
    groups: Sequence[Sequence[Job]], format: Format, *, max_shard_size: int, stem: str = "model"
) -> Plan:
    """Divides jobs into shards and places them.

    The outputs of a group are in one shard. A group of more than `max_shard_size` bytes has one of
    its own.
    """
    _check_names([job for group in groups for job in group])
    contents = list(_split(groups, max_shard_size))
    shards = []
    for number, content in enumerate(contents, start=1):
        suffix = f"-{number:05d}-of-{len(contents):05d}" if len(contents) > 1 else ""
        shards.append(_place(f"{stem}{suffix}.safetensors", content))
    return Plan(format, tuple(shards))


def _check_names(jobs: Sequence[Job]) -> None:
    """Raises a PlanError if two output tensors would have one name."""
    seen: dict[str, Job] = {}
    for job in jobs:
        if seen.setdefault(job.name, job) is not job:
            raise PlanError.about(
                job.source.file, job.name, "two output tensors would have this name"
            )
    for name, job in seen.items():
        if ".weight." not in name:
            continue
        weight, _ = split_component(name)
        if weight != name and isinstance(seen.get(weight), PackJob):
            raise PlanError.about(
                job.source.file, name, f"a tensor of the packed {weight} would have this name"
            )


@dataclass
class _Content:
    """Gathers what one shard holds."""

    jobs: list[Job] = field(default_factory=list)
    # bytes of data
    size: int = 0
    # the most bytes that the entries of the header take
    header: int = 0


def _split(groups: Sequence[Sequence[Job]], max_shard_size: int) -> Iterator[_Content]:
    """Yields the content of one shard after the other; a single empty one if there are no jobs."""
    content = _Content()
    for group in groups:
        size = sum([job.nbytes for job in group])
        header = sum([_header_size(job) for job in group])
        is_full = content.size + size > max_shard_size or content.header + header > _LARGEST_HEADER
        if content.jobs and is_full:
            yield content
            content = _Content()
        content.jobs += group
        content.size += size
        content.header += header
    yield content


def _header_size(job: Job) -> int:
    """Returns the most bytes that a job's tensors take in the header."""
    name = len(_quoted(job.name))
    if isinstance(job, CopyJob):
        return name + entry_size(job.dtype, job.source.shape)
    return name * len(job.components) + job.footprint.header


def _place(name: str, content: _Content) -> Shard:
    position = place(content.jobs)
    packed = [job for job in content.jobs if isinstance(job, PackJob)]
    blobs_size = sum(job.components[-1].nbytes for job in packed)
    header = LENGTH_BYTES + len(json.dumps({METADATA_KEY: {"format": "pt"}})) + content.header
    header += -header % 8
    return Shard(name, tuple(content.jobs), header, position, blobs_size)


def place(jobs: Sequence[Job]) -> int:
    """Gives every tensor of a shard its offset, and returns the bytes of all but JSON blobs."""
    copies: defaultdict[int, list[CopyJob]] = defaultdict(list)  # by alignment
    packed: list[PackJob] = []
    for job in jobs:
        if isinstance(job, CopyJob):
            copies[ALIGNMENTS[job.dtype]].append(job)
        else:
            packed.append(job)
            job.offsets = [0] * (len(job.components) - 1)
    # those of all weights, for they share a format
    components = packed[0].components[:-1] if packed else ()
    numbers = sorted(range(len(components)), key=lambda number: components[number].suffix)
    position = 0
    for alignment in (8, 4, 2, 1):
        for copy in copies[alignment]:
            copy.offset = position
            position += copy.nbytes
        for number in numbers:
            if ALIGNMENTS[components[number].dtype] != alignment:
                continue
            for job in packed:
                job.offsets[number] = position
                position += job.components[number].nbytes
    return position
