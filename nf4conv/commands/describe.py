"""--dry-run: what a plan would do, by tensor and by kind of module, and what is unusual in it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nf4conv.commands.dequantize import AnyDequantizationPlan
from nf4conv.commands.quantize import AnyQuantizationPlan
from nf4conv.plan.diffusers import DiffusersPlan
from nf4conv.plan.rows import PlanKind, PlanRow, QuantizationTotals
from nf4conv.report.advice import advice, little_saved
from nf4conv.report.loading import gpu_bytes
from nf4conv.report.places import by_kind, place_of, unusual
from nf4conv.report.results.runs import PlanReport


def describe_plan(plan: AnyQuantizationPlan | AnyDequantizationPlan) -> PlanReport:
    """Describes what carrying out a plan would do."""
    rows = plan.rows()
    totals = plan.totals()
    warning = little_saved(rows) if isinstance(totals, QuantizationTotals) else ""
    notes = [note for note in plan.notes if note != warning]
    notes.extend(_unusual(rows))
    source = plan.folder.place if isinstance(plan, DiffusersPlan) else plan.source
    report = PlanReport(
        command="dequantize",
        source=str(source),
        totals=totals,
        kinds=tuple(_kinds(rows)),
        tensors=tuple(rows),
        config=plan.config,
        gpu_bytes=None,
        advice="",
        notes=tuple(notes),
    )
    if not isinstance(totals, QuantizationTotals):
        return report
    needed = gpu_bytes(totals.bytes_after)
    return replace(report, command="quantize", gpu_bytes=needed, advice=warning or advice(rows))


def _unusual(rows: Sequence[PlanRow]) -> tuple[str, ...]:
    """Finds kinds of modules that are not all treated alike, unless the user wants it so."""
    treated = [(row.name, _treatment(row)) for row in rows if "the user" not in row.reason]
    return unusual(treated)


def _treatment(row: PlanRow) -> str:
    if row.action in ("pack", "stay"):
        return "packed"
    return f"kept ({row.reason})"


def _kinds(rows: Sequence[PlanRow]) -> Iterator[PlanKind]:
    """Sums up the tensors of each kind in each stack of layers of which the same becomes."""
    for stack, kind, members in by_kind(rows, lambda row: place_of(row.name.removesuffix(".bias"))):
        alike: defaultdict[tuple[str, str], list[PlanRow]] = defaultdict(list)
        for row in members:
            alike[row.action, row.reason].append(row)
        for (action, reason), treated in alike.items():
            parameters = 0
            bytes_before = 0
            bytes_after = 0
            for row in treated:
                parameters += row.parameters
                bytes_before += row.bytes_before
                bytes_after += row.bytes_after
            yield PlanKind(
                stack=stack,
                kind=kind,
                action=action,
                reason=reason,
                tensors=len(treated),
                parameters=parameters,
                bytes_before=bytes_before,
                bytes_after=bytes_after,
            )
