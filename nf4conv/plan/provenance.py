"""Says of each weight in 4 bits of a planned checkpoint what it is, and what it was made from.

nf4conv.json and the model card repeat it. It is read off the jobs, never off the options: a weight
that stays as it is has the scales that it had before, whatever was asked for.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from nf4conv.errors import SourceError
from nf4conv.format.dtypes import DTYPE_NAMES
from nf4conv.format.layout import Format, split_component
from nf4conv.plan.jobs import CopyJob, PackJob, Plan
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit, is_in_4_bits
from nf4conv.sources.opening import present_encoded
from nf4conv.sources.record import KEPT, PACKED, any_number, read_record, recorded_scales
from nf4conv.sources.source import Source


class Provenance(NamedTuple):
    """Says what a weight in 4 bits is, and what it was made from."""

    origin: str  # PACKED or KEPT
    made_from: str  # what the source has, such as "bfloat16" or "bitsandbytes nf4+/64"
    is_from_4_bits: bool  # True if that is in bitsandbytes' 4 bits
    format: Format

    def described(self) -> dict[str, Any]:
        """Returns the fields of nf4conv.json, except number and names of weights."""
        return {
            "origin": self.origin,
            "from": self.made_from,
            "quant_type": self.format.quant_type,
            "blocksize": self.format.blocksize,
            "double_quant": self.format.double_quant,
            "quant_storage": self.format.quant_storage,
            "scales": self.format.scales,
            "dtype": self.format.dtype,
        }


def provenance_of(source: Source, plan: Plan) -> dict[str, Provenance]:
    """Returns what each weight in 4 bits of an output checkpoint is, by its name."""
    found = {}
    is_copied = False
    for job in plan.jobs:
        if isinstance(job, PackJob):
            found[job.name] = _of_job(job)
        elif job.source.encoding is None and split_component(job.name)[1]:
            is_copied = True
    return found or (_of_source(source) if is_copied else {})


def _of_job(job: PackJob) -> Provenance:
    """Returns what the weight of a job is; a calibrated one is packed from what it was before."""
    read = job.original or job
    origin = PACKED if read.stored is None else KEPT
    return Provenance(origin, read.source.made_from, is_in_4_bits(read.source), job.format)


def _of_source(source: Source) -> dict[str, Provenance]:
    """Returns what the weights of a source are whose tensors are copied one by one.

    Nothing can be said of a source whose quant states cannot be read.
    """
    scales_of = recorded_scales(read_record(source.folder))
    found = {}
    with suppress(SourceError):
        for tensor in present_encoded(source).tensors:
            if isinstance(tensor.encoding, Bitsandbytes4bit):
                format = replace(tensor.encoding.format, scales=scales_of(tensor.name))
                found[tensor.name] = Provenance(KEPT, tensor.made_from, True, format)
    return found


def groups_of(weights: Mapping[str, Provenance]) -> list[dict[str, Any]]:
    """Returns the weights of nf4conv.json: groups that were made alike, the largest first.

    The largest group is that of all weights that no other group names. So the file stays small,
    however many weights there are.
    """
    names: defaultdict[Provenance, list[str]] = defaultdict(list)
    for name, provenance in weights.items():
        names[provenance].append(name)
    in_order = sorted(names, key=lambda one: (-len(names[one]), str(one)))
    groups = [{**one.described(), "count": len(names[one])} for one in in_order]
    if len(groups) < 2:
        return groups
    owners: defaultdict[str, set[Provenance]] = defaultdict(set)
    for name, provenance in weights.items():
        owners[any_number(name)].add(provenance)
    for group, provenance in zip(groups[1:], in_order[1:], strict=True):
        found = set()
        for name in names[provenance]:
            pattern = any_number(name)  # "*" stands for numbers, unless it is ambiguous
            found.add(pattern if len(owners[pattern]) == 1 else name)
        group["names"] = sorted(found)
    return groups


def not_packed(plan: Plan, weights: Mapping[str, Provenance]) -> Iterator[CopyJob]:
    """Yields the tensors of an output checkpoint that belong to no weight in 4 bits."""
    for job in plan.jobs:
        if not isinstance(job, CopyJob):
            continue
        owner, _ = split_component(job.name)
        if owner not in weights:
            yield job


def count_dtypes(jobs: Iterable[CopyJob]) -> dict[str, int]:
    """Returns the number of tensors of each dtype, in the order of the dtypes' names."""
    counts = Counter(DTYPE_NAMES.get(job.dtype, job.dtype) for job in jobs)
    return dict(sorted(counts.items()))
