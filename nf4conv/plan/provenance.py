"""Says of each weight in 4 bits of a planned checkpoint what it is, and what it was made from.

nf4conv.json and the model card repeat it. It is read off the jobs, never off the options: a weight
that stays as it is has the scales that it had before, whatever was asked for.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nf4conv.format.dtypes import DTYPE_NAMES, STORAGE_DTYPES
from nf4conv.format.layout import QUANT_STATE_PREFIX, Format, read_quant_state, split_component
from nf4conv.plan.jobs import CopyJob, Job, PackJob, Plan, format_of
from nf4conv.sources.foreign.bitsandbytes import is_in_4_bits
from nf4conv.sources.record import KEPT, PACKED, any_number, recorded_scales
from nf4conv.sources.source import Source, read_together
from nf4conv.sources.tensors import TensorInfo


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
    """Returns what each weight in 4 bits of an output checkpoint is, by its name.

    Reads the quant states of weights whose tensors are copied one by one.
    """
    found = {}
    copies: dict[str, CopyJob] = {}
    states: dict[str, TensorInfo] = {}
    for job in plan.jobs:
        if isinstance(job, PackJob):
            found[job.name] = _of_job(job, plan.format)
            continue
        owner, suffix = split_component(job.name)
        if suffix:
            copies[job.name] = job
        if suffix.startswith(QUANT_STATE_PREFIX):
            states[owner] = job.source
    if states:
        values = {job.name: job for job in plan.jobs if job.name in states}
        found.update(_copied(source, states, values, copies))
    return found


def _of_job(job: PackJob, format: Format) -> Provenance:
    """Returns what the weight of a job is, given the format of the weights that are packed."""
    if job.original is not None:
        calibrated = replace(format, scales="calibrated")
        is_from_4_bits = is_in_4_bits(job.original.source)
        return Provenance(PACKED, job.original.source.made_from, is_from_4_bits, calibrated)
    origin = PACKED if job.stored is None else KEPT
    return Provenance(
        origin=origin,
        made_from=job.source.made_from,
        is_from_4_bits=is_in_4_bits(job.source),
        format=format_of(job, format),
    )


def _copied(
    source: Source,
    states: Mapping[str, TensorInfo],
    values: Mapping[str, Job],
    components: Mapping[str, CopyJob],
) -> Iterator[tuple[str, Provenance]]:
    """Yields name and provenance of weights whose tensors are copied one by one.

    A weight whose quant state cannot be read is left out: nothing can be said of it.
    """
    contents = read_together(source, list(states.values()))
    scales_of = recorded_scales(source.recorded_in)
    for name, state in states.items():
        job = values.get(name)
        if not isinstance(job, CopyJob):
            continue
        is_nested = f"{name}.nested_absmax" in components
        fields, _ = read_quant_state(contents[state.name], is_nested)
        if fields is None:
            continue
        format = Format(
            quant_type=fields.quant_type,
            blocksize=fields.blocksize,
            double_quant=is_nested,
            dtype=fields.dtype,
            quant_storage=STORAGE_DTYPES.get(job.dtype, "uint8"),
            scales=scales_of(name),
        )
        yield name, Provenance(KEPT, f"bitsandbytes {format}", True, format)


def groups_of(weights: Mapping[str, Provenance]) -> list[dict[str, Any]]:
    """Returns the weights of nf4conv.json: groups that were made alike, the largest first.

    The largest group is that of all weights that no other group names. So the file stays small,
    however many weights there are.
    """
    names: defaultdict[Provenance, list[str]] = defaultdict(list)
    for name, provenance in weights.items():
        names[provenance].append(name)
    sizes = Counter({provenance: len(members) for provenance, members in names.items()})
    in_order = sorted(names, key=lambda provenance: (-sizes[provenance], str(provenance)))
    groups = [{**provenance.described(), "count": sizes[provenance]} for provenance in in_order]
    if len(groups) > 1:
        shared = _shared_patterns(names.values())
        for group, provenance in zip(groups[1:], in_order[1:], strict=True):
            group["names"] = _patterns(names[provenance], shared)
    return groups


def _shared_patterns(groups: Iterable[Sequence[str]]) -> set[str]:
    """Returns the patterns that match weights of several groups: names with "*" for numbers."""
    seen: set[str] = set()
    shared: set[str] = set()
    for group in groups:
        patterns = {any_number(name) for name in group}
        shared |= patterns & seen
        seen |= patterns
    return shared


def _patterns(names: Sequence[str], shared: set[str]) -> list[str]:
    """Returns patterns that stand for weights: "*" stands for numbers, unless it is ambiguous."""
    found: dict[str, None] = {}
    for name in names:
        pattern = any_number(name)
        found[name if pattern in shared else pattern] = None
    return sorted(found)


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
