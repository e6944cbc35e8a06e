"""--dry-run: what a plan would do, tensor by tensor, by kind of module, and what is unusual about
it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from nf4conv.commands.dequantize import AnyDequantizationPlan
from nf4conv.commands.quantize import AnyQuantizationPlan, second_opinion
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.rows import PlanKind, PlanRow, QuantizationTotals
from nf4conv.report.loading import advice, gpu_bytes
from nf4conv.report.places import by_kind, place_of, unusual
from nf4conv.report.results import PlanReport


def describe_plan(plan: AnyQuantizationPlan | AnyDequantizationPlan) -> PlanReport:
    """What carrying out a plan of `plan_quantization` or `plan_dequantization` would do.

    An installed transformers is asked what it would decide otherwise, which takes seconds.
    """
    rows, totals = plan.rows(), plan.totals()
    is_quantization = isinstance(totals, QuantizationTotals)
    asked: Any = plan
    return PlanReport(
        command="quantize" if is_quantization else "dequantize",
        source=str(plan.folder.place if isinstance(plan, DiffusersPlan) else plan.source),
        totals=totals,
        kinds=tuple(_kinds(rows)),
        tensors=tuple(rows),
        config=plan.config,
        gpu_bytes=gpu_bytes(totals.bytes_after) if is_quantization else None,
        advice=advice(rows) if is_quantization else "",
        notes=(
            *plan.notes,
            *(second_opinion(asked) if is_quantization else ()),
            *unusual((row.name, _treatment(row)) for row in rows if "the user" not in row.reason),
        ),
    )


def _treatment(row: PlanRow) -> str:
    return "packed" if row.action in ("pack", "stay") else f"kept ({row.reason})"


def _kinds(rows: Sequence[PlanRow]) -> Iterator[PlanKind]:
    for stack, kind, members in by_kind(rows, lambda row: place_of(row.name.removesuffix(".bias"))):
        for action, reason in dict.fromkeys((row.action, row.reason) for row in members):
            alike = [row for row in members if (row.action, row.reason) == (action, reason)]
            sums = (
                sum(getattr(row, key) for row in alike)
                for key in ("parameters", "bytes_before", "bytes_after")
            )
            yield PlanKind(stack, kind, action, reason, len(alike), *sums)
