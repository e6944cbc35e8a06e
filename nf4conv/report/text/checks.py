"""Shows what `verify` found."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from nf4conv.format.units import size
from nf4conv.report.places import experts_together, kind_name
from nf4conv.report.results.checks import VerifyReport
from nf4conv.report.rows.weights import WeightKind, WeightRow
from nf4conv.report.text.tables import count_cell, error_cell, table, two_digits_cell
from nf4conv.report.text.terminal import printable
from nf4conv.sources.record import recorded_blocks

MOST_FINDINGS: Final = 50  # lines
_MOST_WEIGHTS: Final = 10  # rows of a table


def verification_lines(
    report: VerifyReport, width: int | None, *, every: bool = False
) -> Iterator[str]:
    """Yields what is wrong, and the verdict.

    Args:
        report: what `verify` found.
        width: the longest line of a table, in characters. None for any.
        every: True yields all checks too, the worst weights, the kinds of modules, and what errors
            are normal.
    """
    if every:
        yield from _checks(report)
    for finding in report.findings[:MOST_FINDINGS]:
        outcome = "FAIL" if finding.is_fault else "note"
        yield f"{outcome}  {finding.check:12} {printable(finding.line())}"
    yield from count_the_rest(report.findings)
    if every:
        yield from _worst_weights(report.weights, width)
        yield from _weight_kinds(report.kinds, width)
        yield ""
        for name, low, high in report.normal:
            yield f"normal for {name} on trained weights: {low:g} to {high:g}"
    if report.made is not None and any(row.scales == "calibrated" for row in report.weights):
        yield from calibration_lines(report.made)
    yield report.verdict


def calibration_lines(made: Mapping[str, Any]) -> Iterator[str]:
    """Yields which text calibrated the weights, and what it gained; nothing without calibration.

    Args:
        made: the content of nf4conv.json, whoever wrote it.
    """
    gains = [gain for block in recorded_blocks(made) for gain in block.gains.values()]
    asked = made.get("calibration")
    if not gains or not isinstance(asked, dict):
        return
    texts = asked.get("texts")
    names = [
        f"{text.get('name')} ({text.get('sha256')!s:.12})"
        for text in (texts if isinstance(texts, list) else ())
        if isinstance(text, dict)
    ]
    tokens = asked.get("tokens")
    count = f"{tokens:,}" if type(tokens) is int else "some"
    made_by = made["calibrated"].get("made_by")
    versions = made_by.items() if isinstance(made_by, dict) else ()
    yield printable(
        f"calibrated by {count} tokens of {', '.join(names)}: "
        f"{', '.join(f'{what} {which}' for what, which in versions)}"
    )
    kept = sum(1 for gain in gains if gain == 1)
    weighted = ""
    if "outputs" in str(asked.get("knows")):
        weighted = ", weighted by what predictions depend on,"
    yield (
        f"errors of layer outputs{weighted} are {sum(gains) / len(gains):.2f} of those of searched "
        f"scales on other windows; {kept:,} of {len(gains):,} weights keep the search"
    )


def _checks(report: VerifyReport) -> Iterator[str]:
    for name, check in report.checks.items():
        outcome = "ok  " if check.passed else "FAIL"
        yield f"{outcome}  {name:12} {check.meaning}"
    if report.findings:
        yield ""


def _worst_weights(rows: Sequence[WeightRow], width: int | None) -> Iterator[str]:
    compared = [row for row in rows if row.relative_error is not None]
    compared.sort(key=lambda row: -row.error)
    groups = experts_together(compared, lambda row: row.name)
    cells = [_weight_cells(name, groups[name]) for name in islice(groups, _MOST_WEIGHTS)]
    head = ("largest errors", "relative", "SNR dB", "max/absmax", "outside")
    yield from table(head, cells, width)


def _weight_cells(name: str, rows: Sequence[WeightRow]) -> tuple[str, ...]:
    """Returns the cells of a weight, or of experts with the range of their errors.

    Args:
        name: the name of the weight, or the one that all of them share.
        rows: the weights, that of the largest error first.
    """
    worst = rows[0]
    relative = error_cell(worst.error)
    if len(rows) > 1:
        name = f"{name} ({len(rows):,})"
        relative = _range_cell(rows[-1].error, worst.error)
    absmax = [
        row.largest_error_of_absmax for row in rows if row.largest_error_of_absmax is not None
    ]
    outside = [row.outside for row in rows if row.outside is not None]
    return (
        printable(name),
        relative,
        two_digits_cell(worst.snr_db),
        error_cell(max(absmax, default=None)),
        count_cell(sum(outside) if outside else None),
    )


def _range_cell(smallest: float, largest: float) -> str:
    return f"{error_cell(smallest)} … {error_cell(largest)}"


def _weight_kinds(kinds: Sequence[WeightKind], width: int | None) -> Iterator[str]:
    cells = [_weight_kind_cells(kind) for kind in kinds]
    head = ("kind of module", "weights", "parameters", "size", "relative", "worst")
    yield from table(head, cells, width)


def _weight_kind_cells(kind: WeightKind) -> tuple[str, ...]:
    return (
        printable(kind_name(kind)),
        count_cell(kind.weights),
        count_cell(kind.parameters),
        size(kind.bytes),
        error_cell(kind.relative_error),
        error_cell(kind.largest_relative_error),
    )


def count_the_rest(found: Sequence[object]) -> Iterator[str]:
    """Yields a line that counts what is left of a list after the most that is shown."""
    if len(found) > MOST_FINDINGS:
        yield f"… and {len(found) - MOST_FINDINGS:,} more; --json lists them all"
