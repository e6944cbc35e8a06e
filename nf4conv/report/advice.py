"""Says what is unusual in a result: that it saves little, or that modules are treated unalike."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from nf4conv.format.units import size
from nf4conv.plan.jobs import Job, PackJob
from nf4conv.plan.rows import bits_per_parameter, kind_of, layer_of

_MANY_BITS: Final = 6.0
"""Bits per parameter: half as much again as a checkpoint that has only linear layers."""

_FEWEST: Final = 3  # modules of one kind, of which one can be unlike the others
_MOST_LINES: Final = 8
_MOST_LAYERS: Final = 6  # numbers in a line


def advice(jobs: Iterable[Job]) -> Iterator[str]:
    """Yields a line if a quantization saves little or leaves many bits per parameter, with why.

    There is none if a third is saved and few bits are left, and if the source is in 4 bits already
    and does not grow by a tenth.
    """
    before = after = parameters = 0
    packed_before = packed_parameters = 0
    kept: Counter[str] = Counter()
    for job in jobs:
        size_before, elements = job.source_bytes, job.elements
        before += size_before
        after += job.nbytes
        parameters += elements
        if isinstance(job, PackJob):
            packed_before += size_before
            packed_parameters += elements
            kept[job.reason] += 0
        else:
            kept[job.reason] += job.nbytes
    bits_before = bits_per_parameter(packed_before, packed_parameters)
    bits_after = bits_per_parameter(after, parameters)
    if 3 * after > 2 * before:
        if bits_before <= _MANY_BITS and 10 * after <= 11 * before:
            return
        text = f"this saves only {100 * (before - after) / max(before, 1):.0f} % of {size(before)}"
        if after > before:
            text = f"the result is larger than its source: {size(before)} → {size(after)}"
    elif bits_after > _MANY_BITS and 2 * kept.total() > after:
        text = f"the result has {bits_after:.2f} bits per parameter"
    else:
        return
    if 2 * kept.total() <= after:
        yield f"{text}: what is packed took {bits_before:.1f} bits per weight before"
    else:
        ((reason, taken),) = kept.most_common(1)
        yield f"{text}: {size(kept.total())} are not packed, {size(taken)} of it {reason}"


def unusual(treated: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Yields a line for each kind of tensors of which most are treated alike, and some are not.

    `treated` has the name of each tensor, and in a few words what becomes of it.
    """
    kinds: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, treatment in treated:
        kinds[f"{kind_of(name)}.{name.rpartition('.')[2]}"].append((name, treatment))
    lines: list[str] = []
    for kind, members in kinds.items():
        lines.extend(_unusual_lines(kind, members))
    if len(lines) <= _MOST_LINES:
        return tuple(lines)
    more = len(lines) - _MOST_LINES
    return (*lines[:_MOST_LINES], f"… and {more:,} more kinds of modules are not treated alike")


def _unusual_lines(kind: str, members: list[tuple[str, str]]) -> Iterator[str]:
    """Yields a line for each treatment of a kind that less than half of its tensors have."""
    (common, most), *others = Counter(treatment for _, treatment in members).most_common()
    if len(members) < _FEWEST or 2 * most <= len(members):
        return
    for treatment, count in others:
        layers = [str(layer_of(name)) for name, other in members if other == treatment]
        if len(layers) > _MOST_LAYERS:
            layers = [*layers[:_MOST_LAYERS], "…"]
        yield (
            f"{kind}: {count:,} of {len(members):,} {treatment}, the others {common}: "
            f"{', '.join(layers)}"
        )
