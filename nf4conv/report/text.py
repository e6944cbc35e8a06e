"""Results as lines for a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nf4conv.report.results import ComparisonReport, Inspection, VerifyReport
from nf4conv.report.rows import kind_name

_MOST_FINDINGS: Final = 50
_MOST_WEIGHTS: Final = 10
_LONGEST_LINE: Final = 2000
_NARROWEST: Final = 16  # characters that are left of a name, at least
_TITLES: Final = {"place": "kind of module", "bytes": "size", "bits_per_parameter": "bits"}
_MEASURED: Final = {"relative_error": "relative", "largest_relative_error": "worst"}
_FAR: Final = {"relative_error": "relative", "snr_db": "SNR dB"}


def printable(text: str) -> str:
    """Without line breaks and terminal codes, which names inside a file may hold, and not too long for a line."""
    text = text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def size(count: float) -> str:
    """A number of bytes in decimal units."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def verification_lines(report: VerifyReport, width: int | None) -> Iterator[str]:
    """Checks, findings, worst weights, kinds of modules, and the verdict last; tables are no wider than `width`."""
    for name, check in report.checks.items():
        yield f"{'ok  ' if check.passed else 'FAIL'}  {name:12} {check.meaning}"
    if report.findings:
        yield ""
    for finding in report.findings[:_MOST_FINDINGS]:
        yield f"{'FAIL' if finding.is_fault else 'note'}  {finding.check:12} {printable(finding.line())}"
    yield from _more(report.findings)
    compared = [row for row in report.weights if row.relative_error is not None]
    worst = sorted(compared, key=lambda row: -row.error)[:_MOST_WEIGHTS]
    yield from table(
        worst, width, {"name": "largest errors", **_FAR, "largest_error_of_absmax": "max/absmax", "outside": ""}
    )
    yield from table(report.kinds, width, {"place": "", "weights": "", "parameters": "", "bytes": "", **_MEASURED})
    yield ""
    yield from (f"normal for {name} on trained weights: {low:g} to {high:g}" for name, low, high in report.normal)
    yield report.verdict


def comparison_lines(report: ComparisonReport, width: int | None) -> Iterator[str]:
    """What has no counterpart, the largest differences, kinds of modules, and the verdict last."""
    unmeasured = [row for row in report.tensors if not row.passed and row.relative_error is None]
    for row in unmeasured[:_MOST_FINDINGS]:
        described = " → ".join(_cell("shape", shape) for shape in (row.shape_a, row.shape_b) if shape is not None)
        yield f"{row.status:14} {printable(row.name)}  {described}"
    yield from _more(unmeasured)
    differing = sorted((row for row in report.tensors if row.differing), key=lambda row: -(row.relative_error or 0.0))
    titles = {"name": "largest differences", "format_a": "A", "format_b": "B", **_FAR}
    titles |= {"largest_difference": "max |A-B|", "differing": "values"}
    yield from table(differing[:_MOST_WEIGHTS], width, titles)
    counts = dict.fromkeys(("place", "tensors", "identical", "parameters", "differing"), "")
    yield from table(report.kinds, width, {**counts, **_MEASURED})
    yield ""
    yield report.verdict


def _more(found: Sequence[object]) -> Iterator[str]:
    if len(found) > _MOST_FINDINGS:
        yield f"… and {len(found) - _MOST_FINDINGS:,} more; --json lists them all"


def inspection_lines(inspection: Inspection, width: int | None, *, every: bool) -> Iterator[str]:
    """The totals, the kinds of modules, what is unusual; every tensor only if that is asked for."""
    totals, made = inspection.totals, inspection.made
    yield (
        f"{totals.tensors:,} tensors, {totals.packed:,} of them in 4 bits, in {len(inspection.files):,} files: "
        f"{totals.parameters:,} parameters, {size(totals.bytes)}, {totals.bits_per_parameter:.2f} bits each"
    )
    yield f"loading it takes about {size(inspection.gpu_bytes)} of GPU memory, CUDA's own included"
    if inspection.config is not None:
        yield f"config.json: {printable(_described(inspection.config))}"
    if made is not None:
        words = f"made by nf4conv {made.get('version')}, {made.get('command')}, from {made['source'].get('id')}"
        yield printable(words)
    figures = dict.fromkeys(("parameters", "bytes", "bits_per_parameter"), "")
    yield from table(inspection.kinds, width, {"place": "", "tensors": "", "formats": "", **figures})
    if every:
        yield from table(inspection.tensors, width, {"name": "tensor", "format": "", "shape": "", **figures})
    if inspection.notes or inspection.findings:
        yield ""
    yield from (f"Note: {printable(note)}" for note in inspection.notes)
    for finding in inspection.findings[:_MOST_FINDINGS]:
        yield f"{'wrong' if finding.is_fault else 'note'}: {printable(finding.line())}"
    yield from _more(inspection.findings)
    if any(finding.is_fault for finding in inspection.findings):
        yield f"nf4conv quantize {printable(inspection.path)} OUT repairs what can be decoded; --dry-run says what"


def _described(config: Mapping[str, Any]) -> str:
    """The quantization that config.json names; a list, which may have thousands of names, by its length."""
    cells = (f"{len(value):,} names" if isinstance(value, list) else repr(value) for value in config.values())
    return ", ".join(f"{key}={cell}" for key, cell in zip(config, cells, strict=True))


def table(rows: Sequence[Any], width: int | None, columns: Mapping[str, str]) -> Iterator[str]:
    """An empty line, and rows under titles: names and sentences to the left, figures to the right.

    Args:
        rows: if there are none, nothing is printed.
        width: that no line exceeds: the first column is shortened in its middle, lines at their end; None for any.
        columns: attributes of the rows, and their titles; empty for the usual one.
    """
    if not rows:
        return
    head = [title or _TITLES.get(name, name) for name, title in columns.items()]
    body = [
        [_cell(name, kind_name(row) if name == "place" else getattr(row, name)) for name in columns] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    sentences = "fate" in columns
    if width is not None:
        beside = sum(widths[1:-1]) + (len(head[-1]) if sentences else widths[-1]) + 2 * (len(widths) - 1)
        widths[0] = min(widths[0], max(width - beside, _NARROWEST))
    yield ""
    for cells in (head, *body):
        line = [_shortened(cells[0], widths[0]).ljust(widths[0])]
        line += [cell.rjust(room) for cell, room in zip(cells[1:], widths[1:], strict=True)]
        text = "  ".join([*line[:-1], cells[-1] if sentences else line[-1]]).rstrip()
        yield text if width is None or len(text) <= width else f"{text[: width - 1]}…"


def _cell(name: str, value: Any) -> str:
    """A value as text, by what it is: of a shape, of a size, or of any other attribute."""
    if value is None:
        return ""
    if name.startswith("shape"):
        return "x".join(map(str, value)) or "scalar"
    if name.startswith("bytes"):
        return size(value)
    if isinstance(value, float):
        digits = ".2f" if name in ("snr_db", "bits_per_parameter") else ".4f" if 1e-3 <= value < 10 else ".4g"
        return f"{value:{digits}}"
    return (
        f"{value:,}"
        if isinstance(value, int)
        else printable(" ".join(value) if isinstance(value, tuple) else str(value))
    )


def _shortened(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    head = (room - 1) // 3
    return f"{text[:head]}…{text[len(text) - (room - 1 - head) :]}"
