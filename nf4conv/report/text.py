"""Results as lines for a terminal."""

from collections.abc import Iterator, Sequence
from typing import Final

from nf4conv.report.results import ComparisonReport, Inspection, VerifyReport
from nf4conv.report.rows import ComparedRow, WeightKind, WeightRow, kind_name

_MOST_FINDINGS: Final = 50
_MOST_WEIGHTS: Final = 10


def printable(text: str) -> str:
    """Without line breaks and terminal codes, which names inside a file may hold."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def size(count: float) -> str:
    """A number of bytes in decimal units."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def verification_lines(report: VerifyReport) -> Iterator[str]:
    """Checks, findings, worst weights, kinds of modules, and the verdict last."""
    for name, check in report.checks.items():
        yield f"{'ok  ' if check.passed else 'FAIL'}  {name:12} {check.meaning}"
    if report.findings:
        yield ""
    for finding in report.findings[:_MOST_FINDINGS]:
        yield f"{'FAIL' if finding.is_fault else 'note'}  {finding.check:12} {printable(finding.line())}"
    if len(report.findings) > _MOST_FINDINGS:
        yield f"… and {len(report.findings) - _MOST_FINDINGS:,} more; --json FILE lists them all"
    compared = [row for row in report.weights if row.relative_error is not None]
    if compared:
        worst = sorted(compared, key=lambda row: -(row.relative_error or 0.0))[:_MOST_WEIGHTS]
        yield ""
        yield from table(
            ("largest errors", "relative", "SNR dB", "max/absmax", "outside"),
            [weight_cells(row) for row in worst],
        )
    if report.kinds:
        yield ""
        yield from table(
            ("kind of module", "weights", "parameters", "size", "relative", "worst"),
            [kind_cells(kind) for kind in report.kinds],
        )
    yield ""
    yield report.verdict


def comparison_lines(report: ComparisonReport) -> Iterator[str]:
    """What has no counterpart, the largest differences, kinds of modules, and the verdict last."""
    unmeasured = [row for row in report.tensors if not row.passed and row.relative_error is None]
    for row in unmeasured[:_MOST_FINDINGS]:
        shapes = [shape for shape in (row.shape_a, row.shape_b) if shape is not None]
        described = " → ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)
        yield f"{row.status:14} {printable(row.name)}  {described}"
    if len(unmeasured) > _MOST_FINDINGS:
        yield f"… and {len(unmeasured) - _MOST_FINDINGS:,} more; --json FILE lists them all"
    if unmeasured:
        yield ""
    yield from _differences([row for row in report.tensors if row.differing])
    yield from table(
        ("kind of module", "tensors", "identical", "parameters", "differing", "relative", "worst"),
        [
            (
                printable(kind_name(kind)),
                f"{kind.tensors:,}",
                f"{kind.identical:,}",
                f"{kind.elements:,}",
                f"{kind.differing:,}",
                _figure(kind.relative_error),
                _figure(kind.worst),
            )
            for kind in report.kinds
        ],
    )
    yield ""
    yield report.verdict


def _differences(rows: Sequence[ComparedRow]) -> Iterator[str]:
    if not rows:
        return
    worst = sorted(rows, key=lambda row: -(row.relative_error or 0.0))[:_MOST_WEIGHTS]
    yield from table(
        ("largest differences", "A", "B", "relative", "SNR dB", "max |A-B|", "values"),
        [
            (
                printable(row.name),
                printable(str(row.format_a)),
                printable(str(row.format_b)),
                _figure(row.relative_error),
                f"{row.snr_db:.2f}",
                _figure(row.largest),
                f"{row.differing:,}",
            )
            for row in worst
        ],
    )
    yield ""


def _figure(value: float | None) -> str:
    """A number of any magnitude in four digits."""
    return "" if value is None else f"{value:.4g}"


def weight_cells(row: WeightRow) -> tuple[str, ...]:
    """The name of a weight that was compared, and its figures: relative error, SNR, error by absmax, values outside."""
    figures = f"{row.error:.4f}", f"{row.snr_db:.2f}", f"{row.max_error_of_absmax:.3f}", f"{row.outside:,}"
    return printable(row.name), *figures


def kind_cells(kind: WeightKind) -> tuple[str, ...]:
    """The name of a kind of modules, and its figures: weights, parameters, size, relative error, the worst of these."""
    errors = ("" if value is None else f"{value:.4f}" for value in (kind.relative_error, kind.worst))
    return printable(kind_name(kind)), f"{kind.weights:,}", f"{kind.elements:,}", size(kind.bytes), *errors


def inspection_lines(inspection: Inspection) -> Iterator[str]:
    """Every tensor, the kinds of modules, and the totals last."""
    yield from table(
        ("tensor", "format", "shape", "size", "bits"),
        [
            (
                printable(row.name),
                printable(row.format),
                "x".join(map(str, row.shape)) or "scalar",
                size(row.bytes),
                f"{row.bits_per_parameter:.2f}",
            )
            for row in inspection.tensors
        ],
    )
    yield ""
    yield from table(
        ("kind of module", "tensors", "formats", "parameters", "size", "bits"),
        [
            (
                printable(kind_name(row)),
                f"{row.tensors:,}",
                printable(" ".join(row.formats)),
                f"{row.parameters:,}",
                size(row.bytes),
                f"{row.bits_per_parameter:.2f}",
            )
            for row in inspection.kinds
        ],
    )
    totals, found = inspection.totals, inspection.findings
    yield ""
    for finding in found[:_MOST_FINDINGS]:
        yield f"{'wrong' if finding.is_fault else 'note'}: {printable(finding.line())}"
    if len(found) > _MOST_FINDINGS:
        yield f"and {len(found) - _MOST_FINDINGS:,} more, see --json"
    if any(finding.is_fault for finding in found):
        yield f"nf4conv quantize {printable(inspection.path)} OUT writes it anew for current loaders"
    if inspection.config is not None:
        yield f"config.json: {printable(', '.join(f'{key}={value!r}' for key, value in inspection.config.items()))}"
    yield (
        f"{totals.tensors:,} tensors, {totals.packed:,} of them in 4 bits, in {len(inspection.files):,} files: "
        f"{totals.parameters:,} parameters, {size(totals.bytes)}, {totals.bits_per_parameter:.2f} bits each"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows in columns, the first aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        first, *others = (f"{cell:{'<' if not index else '>'}{widths[index]}}" for index, cell in enumerate(row))
        yield "  ".join((first, *others)).rstrip()
