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
from collections.abc import Iterator, Sequence
from typing import Final

from nf4conv.errors import PlanError
from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.format.layout import Format, split_component
from nf4conv.plan.jobs import CopyJob, Job, PackJob, Plan, Shard
from nf4conv.sources.header import LENGTH_BYTES, METADATA_KEY

_METADATA: Final = json.dumps({METADATA_KEY: {"format": "pt"}})
_LARGEST_HEADER: Final = 50_000_000  # half of what safetensors accepts

_ALIGNMENTS: Final = {dtype: max(bits // 8, 1) for dtype, bits in DTYPE_BITS.items()}
"""Bytes that a tensor's offset must be a multiple of, by its dtype tag."""


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
    for number, jobs in enumerate(contents, start=1):
        suffix = f"-{number:05d}-of-{len(contents):05d}" if len(contents) > 1 else ""
        fixed = place(jobs)
        blobs = sum(job.components[-1].nbytes for job in jobs if isinstance(job, PackJob))
        header = LENGTH_BYTES + len(_METADATA) + sum(job.header_size for job in jobs)
        header += -header % 8
        name = f"{stem}{suffix}.safetensors"
        shards.append(Shard(name, tuple(jobs), header, fixed, header + fixed + blobs))
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


def _split(groups: Sequence[Sequence[Job]], max_shard_size: int) -> Iterator[list[Job]]:
    """Yields the jobs of one shard after the other; a single empty list if there are none."""
    jobs: list[Job] = []
    size = header = 0
    for group in groups:
        size += sum([job.nbytes for job in group])
        header += sum([job.header_size for job in group])
        if jobs and (size > max_shard_size or header > _LARGEST_HEADER):
            yield jobs
            jobs = []
            size = sum([job.nbytes for job in group])
            header = sum([job.header_size for job in group])
        jobs += group
    yield jobs


def place(jobs: Sequence[Job]) -> int:
    """Gives every tensor of a shard its offset, and returns the bytes of all but JSON blobs."""
    copies: defaultdict[int, list[CopyJob]] = defaultdict(list)  # by alignment
    packed: list[PackJob] = []
    for job in jobs:
        if isinstance(job, CopyJob):
            copies[_ALIGNMENTS[job.dtype]].append(job)
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
            if _ALIGNMENTS[components[number].dtype] != alignment:
                continue
            for job in packed:
                job.offsets[number] = position
                position += job.components[number].nbytes
    return position
