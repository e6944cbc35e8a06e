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
    """Yields a line if packing saves a third of what is packed, and not of the whole: why not."""
    before = after = packed_before = packed_after = 0
    kept: Counter[str] = Counter()
    for job in jobs:
        before += job.source_bytes
        after += job.nbytes
        if isinstance(job, PackJob):
            packed_before += job.source_bytes
            packed_after += job.nbytes
        else:
            kept[job.reason] += job.nbytes
    if 2 * packed_before > 3 * packed_after and 2 * before < 3 * after:
        ((reason, taken),) = kept.most_common(1)
        yield (
            f"this saves little, {size(before)} → {size(after)}: {size(kept.total())} are not "
            f"packed, {size(taken)} of it {reason}"
        )


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
