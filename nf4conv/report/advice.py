"""Says that a quantization saves little, and why."""

from collections import Counter
from collections.abc import Iterable, Iterator

from nf4conv.format.units import size
from nf4conv.plan.jobs import Job, PackJob


def advice(jobs: Iterable[Job]) -> Iterator[str]:
    """Yields a line if a quantization saves less than a third: what is not packed, or was small.

    There is none if the source is in 4 bits already and does not grow by a tenth.
    """
    before = after = packed_before = packed_parameters = 0
    kept: Counter[str] = Counter()
    for job in jobs:
        before += job.source_bytes
        after += job.nbytes
        if isinstance(job, PackJob):
            packed_before += job.source_bytes
            packed_parameters += job.elements
        else:
            kept[job.reason] += job.nbytes
    bits = 8 * packed_before / max(packed_parameters, 1)
    if 3 * after <= 2 * before or (bits <= 6 and 10 * after <= 11 * before):
        return
    text = f"this saves little, {size(before)} → {size(after)}: "
    if 2 * kept.total() <= after:
        yield f"{text}what is packed took {bits:.1f} bits per weight before"
    else:
        ((reason, taken),) = kept.most_common(1)
        yield f"{text}{size(kept.total())} are not packed, {size(taken)} of it {reason}"
