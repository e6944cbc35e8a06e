"""Says before a run what it reads, and that a quantization saves little, and why."""

from collections import Counter
from collections.abc import Iterable, Iterator

from nf4conv.format.units import size
from nf4conv.options import DequantizeOptions, WritingOptions
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.jobs import Job, PackJob
from nf4conv.plan.writing import WritingPlan
from nf4conv.report.text.progress_bar import Step, begin


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


def tell_what_is_read(plan: WritingPlan | DiffusersPlan, options: WritingOptions) -> None:
    """Tells who watches a run its notes, and the steps that read bytes."""
    if options.progress is None:
        return
    totals = plan.totals
    work = totals.bytes_before
    if isinstance(options, DequantizeOptions):
        begin(options.progress, [Step("decoding", work)], plan.notes)
        return
    verb = "quantizing"
    if options.verify:
        work += totals.bytes_before + totals.bytes_after
        verb = "quantizing and verifying"
    last = "finishing"
    if options.push_to_hub is not None:
        last = f"uploading to {options.push_to_hub}"
    steps = []
    if isinstance(plan, WritingPlan) and plan.calibration is not None:
        steps.append(Step("calibrating", plan.calibration.bytes_to_read, "calibrating"))
        work -= plan.calibration.bytes_spared
    begin(options.progress, [*steps, Step(verb, work, last)], plan.notes)
