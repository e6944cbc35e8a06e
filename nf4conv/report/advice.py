"""Says that a quantization saves little, and why."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from nf4conv.format.units import size
from nf4conv.plan.jobs import Job, PackJob
from nf4conv.plan.rows import bits_per_parameter

_MANY_BITS: Final = 6.0
"""Bits per parameter: half as much again as a checkpoint that has only linear layers."""


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
