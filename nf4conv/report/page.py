"""A verification as files: everything as JSON, and one page to look at that needs neither network nor script."""

import dataclasses
import html
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Final

from nf4conv.checkpoint.writer import write_result
from nf4conv.report.results import ComparisonReport, VerifyReport
from nf4conv.report.rows import WeightRow, format_name
from nf4conv.report.text import kind_cells, printable, size, weight_cells

_PALE: Final = (236, 244, 250)
_DEEP: Final = (8, 69, 148)
_FAULT: Final = "#b3261e"
_SIZE_COLORS: Final = ("#084594", "#4292c6", "#9ecae1", "#cbd2dc")
_CELL: Final = 20
_LABELS: Final = 190
_BINS: Final = 40
_MOST_FINDINGS: Final = 500
_MOST_WEIGHTS: Final = 20


def write_json(report: VerifyReport | ComparisonReport, path: Path) -> None:
    """Write everything that was found. Numbers that JSON cannot spell become the strings "nan", "inf" and "-inf".

    Raises:
        OutputError: the disk is full or failing.
    """
    content = _spelled({**dataclasses.asdict(report), "verdict": report.verdict})
    write_result(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def _spelled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_page(report: VerifyReport, path: Path) -> None:
    """Write a self-contained HTML page.

    Raises:
        OutputError: the disk is full or failing.
    """
    write_result(path, page(report).encode())


def page(report: VerifyReport) -> str:
    """A report as HTML: verdict, checks, findings, heat maps, distribution, sizes, worst weights, kinds, settings."""
    template = Template(files("nf4conv.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=_text(report.path),
        state="" if report.passed else "failed",
        verdict=_text(report.verdict),
        tiles="".join(_tiles(report)),
        checks=_checks(report),
        findings=_findings(report),
        errors=_errors(report),
        sizes=_sizes(report),
        kinds=_kinds(report),
        settings=_settings(report),
    )


def _text(value: object) -> str:
    return html.escape(printable(str(value)))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str] = ()) -> str:
    """A table of cells that are HTML already."""
    names = [*classes, *[""] * (len(head) - len(classes))]
    body = "".join(
        f"<tr>{''.join(_cell(cell, name) for cell, name in zip(row, names, strict=True))}</tr>" for row in rows
    )
    titles = "".join(_cell(cell, name, "th") for cell, name in zip(head, names, strict=True))
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _cell(content: str, name: str, tag: str = "td") -> str:
    return f'<{tag} class="{name}">{content}</{tag}>' if name else f"<{tag}>{content}</{tag}>"


def _tiles(report: VerifyReport) -> Iterator[str]:
    compared = _compared(report)
    tiles = [
        (f"{len(report.weights):,}", "packed weights"),
        (_count(report.parameters), "parameters"),
        (f"{report.bits_per_parameter:.2f}", "bits per parameter"),
        (size(sum(report.sizes.values())), "in all tensors"),
    ]
    if compared:
        worst = max(row.error for row in compared)
        tiles += [
            (f"{worst:.4f}", "largest relative error"),
            (f"{min(row.snr_db for row in compared if row.snr_db is not None):.1f} dB", "lowest signal to noise"),
        ]
        tiles.append(("yes" if report.identical else "no", "same bytes as quantizing the source"))
    for value, label in tiles:
        yield f"<div><b>{_text(value)}</b><span>{label}</span></div>"


def _count(number: int) -> str:
    for unit, factor in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= factor:
            return f"{number / factor:.2f} {unit}"
    return str(number)


def _compared(report: VerifyReport) -> list[WeightRow]:
    return [row for row in report.weights if row.relative_error is not None]


def _checks(report: VerifyReport) -> str:
    verdicts = {True: '<span class="ok">✓ ok</span>', False: '<span class="bad">✗ FAIL</span>'}
    rows = ((_text(name), verdicts[check.passed], _text(check.meaning)) for name, check in report.checks.items())
    return _table(("check", "", ""), rows, ("", "", "text"))


def _findings(report: VerifyReport) -> str:
    if not report.findings:
        return ""
    rows = (
        (
            _text(finding.check),
            '<span class="bad">FAIL</span>' if finding.is_fault else "note",
            _text(finding.line()),
        )
        for finding in report.findings[:_MOST_FINDINGS]
    )
    more = len(report.findings) - _MOST_FINDINGS
    rest = f'<p class="note">and {more:,} more, which the JSON lists</p>' if more > 0 else ""
    content = _table(("check", "", "where and what"), rows, ("", "", "text"))
    return f'<section class="long"><h2>Findings</h2><div class="scroll">{content}</div>{rest}</section>'


def _errors(report: VerifyReport) -> str:
    compared = _compared(report)
    if not compared:
        return '<section><h2>Errors</h2><p class="note">Not compared with a source: give --source.</p></section>'
    maps = "".join(_heat_maps(compared))
    worst = sorted(compared, key=lambda row: -row.error)[:_MOST_WEIGHTS]
    return (
        f'<section class="long"><h2>Relative error by layer and kind of module</h2>{maps}{_legend(compared)}</section>'
        f"<section><h2>Distribution</h2>{_histogram(compared)}</section>"
        f'<section class="long"><h2>Largest errors</h2><div class="scroll">{_worst(worst)}</div></section>'
    )


def _worst(rows: Sequence[WeightRow]) -> str:
    head = ("weight", "format", "relative error", "tolerance", "SNR dB", "max of absmax", "outside")
    return _table(head, map(_weight, rows), ("name",))


def _weight(row: WeightRow) -> tuple[str, ...]:
    name, error, *others = map(html.escape, weight_cells(row))
    format = format_name(row.quant_type, row.double_quant, row.blocksize)
    return name, _text(format), error, f"{row.tolerance:g}", *others


def _heat_maps(rows: Sequence[WeightRow]) -> Iterator[str]:
    """A map for each stack of layers: kinds of modules down, layers across."""
    scale = _Scale.of(rows)
    stacks: defaultdict[str, list[WeightRow]] = defaultdict(list)
    for row in rows:
        stacks[row.stack].append(row)
    for stack, members in sorted(stacks.items(), key=lambda item: -len(item[1])):
        name = stack or "outside of layers"
        yield f'<h3>{_text(name)}</h3><div class="scroll">{_heat_map(members, scale)}</div>'


@dataclasses.dataclass(frozen=True)
class _Scale:
    """Relative errors as colours: pale for the smallest that was found, deep for the largest that is tolerated."""

    low: float
    high: float

    @classmethod
    def of(cls, rows: Sequence[WeightRow]) -> "_Scale":
        errors = [row.error for row in rows if math.isfinite(row.error)]
        return cls(min(errors, default=0.0), max(row.tolerance for row in rows))

    def color(self, error: float, tolerance: float) -> str:
        if not error <= tolerance:
            return _FAULT
        share = min(max((error - self.low) / max(self.high - self.low, 1e-9), 0.0), 1.0)
        return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(_PALE, _DEEP, strict=True))


def _heat_map(rows: Sequence[WeightRow], scale: _Scale) -> str:
    kinds = sorted({row.kind for row in rows})
    layers: list[int | None] = [*sorted({row.layer for row in rows if row.layer is not None})] or [None]
    cells: defaultdict[tuple[str, int | None], list[WeightRow]] = defaultdict(list)
    for row in rows:
        cells[row.kind, row.layer].append(row)
    width, height = _LABELS + _CELL * len(layers) + 8, _CELL * len(kinds) + 22
    parts = [
        f'<text x="{_LABELS - 6}" y="{_CELL * index + 14}" text-anchor="end">{_text(label)}</text>'
        for index, label in enumerate(kind if len(kind) <= 30 else f"…{kind[-29:]}" for kind in kinds)
    ]
    for (kind, layer), members in cells.items():
        worst = max(members, key=lambda row: row.error)
        left, top = _LABELS + _CELL * layers.index(layer), _CELL * kinds.index(kind)
        label = f"{worst.name}: {worst.error:.4f}" + (f" (the largest of {len(members)})" if len(members) > 1 else "")
        parts.append(
            f'<rect x="{left + 1}" y="{top + 1}" width="{_CELL - 2}" height="{_CELL - 2}" rx="3" '
            f'fill="{scale.color(worst.error, worst.tolerance)}"><title>{_text(label)}</title></rect>'
        )
    step = max(1, -(-len(layers) // 16))
    parts += [
        f'<text class="soft" x="{_LABELS + _CELL * index + _CELL // 2}" y="{height - 7}" text-anchor="middle">'
        f"{layer}</text>"
        for index, layer in enumerate(layers)
        if layer is not None and index % step == 0
    ]
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="relative error of each weight">{"".join(parts)}</svg>'
    )


def _legend(rows: Sequence[WeightRow]) -> str:
    scale = _Scale.of(rows)
    pale, deep = (scale.color(error, scale.high) for error in (scale.low, scale.high))
    return (
        f'<p class="note"><span class="key" style="background:{pale}"></span>{scale.low:.4f}, the smallest here &ensp;'
        f'<span class="key" style="background:{deep}"></span>{scale.high:g}, the tolerance &ensp;'
        f'<span class="key" style="background:{_FAULT}"></span>beyond it</p>'
    )


def _histogram(rows: Sequence[WeightRow]) -> str:
    """How many weights have which relative error, with a line at each tolerance."""
    errors = sorted(row.error for row in rows if math.isfinite(row.error))
    tolerances = sorted({row.tolerance for row in rows})
    low, high = min([*errors, *tolerances]) * 0.98, max([*errors, *tolerances]) * 1.02 + 1e-9
    counts = [0] * _BINS
    for error in errors:
        counts[min(int((error - low) / (high - low) * _BINS), _BINS - 1)] += 1
    width, height, base = 640, 170, 140
    tallest = max(counts, default=1) or 1
    step = width / _BINS
    parts = [
        f'<rect x="{index * step + 1:.1f}" y="{base - 120 * count / tallest:.1f}" width="{step - 2:.1f}" '
        f'height="{120 * count / tallest:.1f}" fill="#4292c6"><title>{count:,} weights</title></rect>'
        for index, count in enumerate(counts)
        if count
    ]
    parts.append(f'<line x1="0" y1="{base}" x2="{width}" y2="{base}" stroke="#5b6575"/>')
    for tolerance in tolerances:
        place = (tolerance - low) / (high - low) * width
        parts.append(
            f'<line x1="{place:.1f}" y1="12" x2="{place:.1f}" y2="{base}" stroke="{_FAULT}" stroke-dasharray="4"/>'
        )
        parts.append(f'<text x="{place - 4:.1f}" y="20" text-anchor="end">tolerance {tolerance:g}</text>')
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        label = f"{low + share * (high - low):.3f}"
        parts.append(f'<text class="soft" x="{share * width}" y="{base + 24}" text-anchor="{anchor}">{label}</text>')
    return (
        f'<svg class="fitted" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="distribution of relative errors">{"".join(parts)}</svg>'
        f'<p class="note">{len(errors):,} weights by relative error ‖W − Ŵ‖ / ‖W‖; the tallest bar is {tallest:,}</p>'
    )


def _sizes(report: VerifyReport) -> str:
    total = max(sum(report.sizes.values()), 1)
    shares = list(zip(report.sizes.items(), _SIZE_COLORS, strict=True))
    bar = "".join(
        f'<span style="background:{color};width:{100 * count / total:.3f}%" title="{name}"></span>'
        for (name, count), color in shares
    )
    rows = (
        (f'<span class="key" style="background:{color}"></span>{name}', size(count), f"{100 * count / total:.2f} %")
        for (name, count), color in shares
    )
    return f'<div class="bar">{bar}</div>{_table(("tensors", "size", "share"), rows)}'


def _kinds(report: VerifyReport) -> str:
    head = ("kind", "weights", "parameters", "size", "relative error", "worst")
    return _table(head, (tuple(map(html.escape, kind_cells(row))) for row in report.kinds), ("name",))


def _settings(report: VerifyReport) -> str:
    shown = {
        "checkpoint": report.path,
        "source": report.source or "none",
        **report.settings,
        "seconds": f"{report.seconds:.1f}",
    }
    return _table(("setting", "value"), ((_text(key), _text(value)) for key, value in shown.items()), ("", "text"))
