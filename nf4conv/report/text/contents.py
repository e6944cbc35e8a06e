"""Shows what `inspect`, `--dry-run` and `env` found."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nf4conv.format.units import size
from nf4conv.plan.rows import DequantizationTotals, PlanKind, QuantizationTotals
from nf4conv.report.places import kind_name
from nf4conv.report.results.contents import Environment, Inspection
from nf4conv.report.results.runs import PlanReport
from nf4conv.report.rows.inspection import InspectedKind
from nf4conv.report.text.checks import MOST_FINDINGS, calibration_lines, count_the_rest
from nf4conv.report.text.tables import count_cell, table, two_digits_cell
from nf4conv.report.text.terminal import printable
from nf4conv.sources.record import recorded_weights
from nf4conv.version import __version__

_SCALES: Final = {"search": "searched scales", "calibrated": "calibrated"}
"""Words for scales that are not absmax, as users read them."""


def inspection_lines(inspection: Inspection, width: int | None) -> Iterator[str]:
    """Yields the totals, the kinds of modules and what is unusual.

    Args:
        inspection: what `inspect` found.
        width: the longest line of a table, in characters. None for any.
    """
    yield from _inspection_head(inspection)
    yield from _inspected_kinds(inspection.kinds, width)
    if inspection.notes or inspection.findings:
        yield ""
    for note in inspection.notes:
        yield f"Note: {printable(note)}"
    for finding in inspection.findings[:MOST_FINDINGS]:
        outcome = "wrong" if finding.is_fault else "note"
        yield f"{outcome}: {printable(finding.line())}"
    yield from count_the_rest(inspection.findings)
    if any(finding.is_fault for finding in inspection.findings):
        path = printable(shlex.quote(inspection.path))
        yield f"nf4conv quantize {path} OUT repairs what can be decoded; --dry-run says what"


def _inspection_head(inspection: Inspection) -> Iterator[str]:
    """Yields what is said of the whole checkpoint: sizes, config, experts and origin."""
    totals = inspection.totals
    tensors = f"{totals.tensors:,} tensors, {_share_of_few_bits(inspection)}"
    bits = f"{totals.bits_per_parameter:.2f} bits each"
    yield (
        f"{tensors}, in {len(inspection.files):,} files: "
        f"{totals.parameters:,} parameters, {size(totals.bytes)}, {bits}"
    )
    yield _gpu_line(inspection.gpu_bytes)
    if inspection.config is not None:
        yield f"config.json: {printable(_quantization_text(inspection.config))}"
    if inspection.experts:
        yield printable(inspection.experts)
    made = inspection.made
    if made is not None:
        version = made.get("version")
        source = made["source"].get("id")
        yield printable(f"made by nf4conv {version}, {made.get('command')}, from {source}")
        yield from _recorded_weights(made, totals.packed)
        yield from calibration_lines(made)


def _share_of_few_bits(inspection: Inspection) -> str:
    """Returns how many tensors are in bitsandbytes' 4 bits, or else quantized otherwise."""
    packed = inspection.totals.packed
    small = [row for row in inspection.tensors if row.bits_per_parameter < 16]
    if packed == 0 and small:
        return f"{len(small):,} of them in fewer than 16 bits"
    return f"{packed:,} of them in 4 bits"


def _recorded_weights(made: Mapping[str, Any], packed: int) -> Iterator[str]:
    """Yields what nf4conv.json says of the weights; nothing if it speaks of other weights."""
    groups = recorded_weights(made)
    counts = [group.count or 0 for group in groups]
    if sum(counts) != packed or not packed:
        return
    for group, count in zip(groups, counts, strict=True):
        scales = _SCALES.get(group.scales, group.scales)
        yield printable(f"{count:,} weights {group.origin}, from {group.made_from}, {scales}")


def _gpu_line(count: int) -> str:
    return f"loading it takes about {size(count)} of GPU memory, CUDA's own included"


def _quantization_text(config: Mapping[str, Any]) -> str:
    """Returns the quantization that config.json names, on one line."""
    parts = []
    for key, value in config.items():
        if isinstance(value, list):  # the skip list may have thousands of names
            parts.append(f"{key}={len(value):,} names")
        else:
            parts.append(f"{key}={value!r}")
    return ", ".join(parts)


def _inspected_kinds(kinds: Sequence[InspectedKind], width: int | None) -> Iterator[str]:
    cells = [_inspected_kind_cells(kind) for kind in kinds]
    head = ("kind of module", "tensors", "formats", "parameters", "size", "bits")
    yield from table(head, cells, width)


def _inspected_kind_cells(kind: InspectedKind) -> tuple[str, ...]:
    return (
        printable(kind_name(kind)),
        count_cell(kind.tensors),
        printable(" ".join(kind.formats)),
        count_cell(kind.parameters),
        size(kind.bytes),
        two_digits_cell(kind.bits_per_parameter),
    )


def plan_lines(plan: PlanReport, width: int | None) -> Iterator[str]:
    """Yields the totals, what becomes of each kind of module, and what is unusual.

    Args:
        plan: what `--dry-run` found.
        width: the longest line of a table, in characters. None for any.
    """
    yield from _totals_lines(plan.totals)
    if plan.advice:
        yield printable(plan.advice)
    if plan.gpu_bytes is not None:
        yield _gpu_line(plan.gpu_bytes)
    yield from _planned_kinds(plan.kinds, width)
    if plan.notes:
        yield ""
    for note in plan.notes:
        yield f"Note: {printable(note)}"


def _totals_lines(totals: QuantizationTotals | DequantizationTotals) -> Iterator[str]:
    """Yields how many tensors a plan packs or decodes, and how sizes change."""
    sizes = f"{size(totals.bytes_before)} → {size(totals.bytes_after)}"
    if isinstance(totals, QuantizationTotals):
        yield (
            f"{totals.packed:,} weights packed, {totals.copied:,} tensors kept, "
            f"{totals.shards} files"
        )
        yield (
            f"{sizes} ({totals.compression:.2f}x, "
            f"{totals.bits_per_parameter:.2f} bits per parameter)"
        )
    else:
        yield (
            f"{totals.decoded:,} weights decoded, {totals.copied:,} tensors copied, "
            f"{totals.shards} files: {sizes}"
        )


def _planned_kinds(kinds: Sequence[PlanKind], width: int | None) -> Iterator[str]:
    cells = [
        _planned_kind_cells(kind) for kind in sorted(kinds, key=lambda kind: -kind.bytes_before)
    ]
    head = ("kind of module", "tensors", "before", "after", "what becomes of it")
    yield from table(head, cells, width, ends_with_text=True)


def _planned_kind_cells(kind: PlanKind) -> tuple[str, ...]:
    return (
        printable(kind_name(kind)),
        count_cell(kind.tensors),
        size(kind.bytes_before),
        size(kind.bytes_after),
        printable(kind.fate),
    )


def environment_lines(found: Environment) -> Iterator[str]:
    """Yields versions, the machine, and what would compute."""
    rows = {"nf4conv": __version__, "python": found.python}
    for name, version in found.packages.items():
        rows[name] = version or "not installed"
    rows["platform"] = found.platform
    rows["platform lacks"] = "; ".join(found.lacking) or "nothing"
    rows["cores"] = str(found.cores)
    rows["GPUs"] = "; ".join(found.gpus) or "none"
    rows["--device auto"] = found.engine
    rows["4-bit experts"] = found.experts
    for name, folder in found.folders.items():
        rows[f"folder of {name}"] = folder
    for name, value in rows.items():
        yield f"{name:20} {value}"
