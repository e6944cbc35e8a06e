"""--dry-run: what a plan would do, by tensor and by kind of module, and what is unusual in it."""

from nf4conv.commands.dequantize import AnyDequantizationPlan
from nf4conv.commands.quantize import AnyQuantizationPlan
from nf4conv.options import QuantizeOptions
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.rows import TensorRow, summed
from nf4conv.plan.writing import WritingPlan
from nf4conv.report.advice import advice, unusual
from nf4conv.report.loading import gpu_bytes
from nf4conv.report.results import PlanReport
from nf4conv.system.machine import uncollected


@uncollected()
def describe_plan(plan: AnyQuantizationPlan | AnyDequantizationPlan) -> PlanReport:
    """Describes what carrying out a plan would do."""
    rows = plan.rows()
    totals = plan.totals()
    first: WritingPlan
    if isinstance(plan, DiffusersPlan):
        first = next(iter(plan.submodels.values()))
        source = str(plan.folder.place)
    else:
        first = plan
        source = str(plan.source)
    is_packing = isinstance(first.options, QuantizeOptions)
    line = advice(plan.jobs) if is_packing else ""
    # modules that the user wants to be treated otherwise are not unusual
    treated = [(row.name, _treatment(row)) for row in rows if "the user" not in row.reason]
    return PlanReport(
        command=first.command,
        source=source,
        totals=totals,
        kinds=summed(rows),
        tensors=tuple(rows),
        config=plan.config,
        gpu_bytes=gpu_bytes(totals.bytes_after) if is_packing else None,
        advice=line,
        notes=(*(note for note in plan.notes if note != line), *unusual(treated)),
    )


def _treatment(row: TensorRow) -> str:
    if row.action in ("pack", "stay"):
        return "packed"
    return f"kept ({row.reason})"
