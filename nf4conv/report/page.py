"""Writes a verification as one HTML page that needs no network, from page.html.jinja."""

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Final

import jinja2

from nf4conv.format.units import size
from nf4conv.output.writer import write_result
from nf4conv.plan.rows import KindRow, TensorRow, distance, kind_of
from nf4conv.report.results import VerifyReport, folder_name, grouped, where
from nf4conv.report.text.terminal import count_cell, error_cell, printable
from nf4conv.version import __version__

_MOST_LINES: Final = 100  # of a group of findings
_MOST_ROWS: Final = 2000  # of the table of weights
_MOST_DOTS: Final = 500  # of a kind of module
_WIDTH: Final = 1000  # of a picture, in its own units


def write_page(report: VerifyReport, path: Path) -> None:
    """Writes a verification to a file, as a self-contained HTML page.

    Args:
        report: what `verify` returned.
        path: the file. An existing one is replaced.

    Raises:
        OutputError: the disk is full or failing.

    Example:
        >>> report = nf4conv.verify("model-nf4", source="model")
        >>> nf4conv.write_page(report, Path("report.html"))
    """
    write_result(path, page(report).encode())


def page(report: VerifyReport, when: datetime | None = None) -> str:
    """Returns a verification as HTML. It names folders of this machine, but not where they are."""
    rows = sorted(report.weights, key=lambda row: -distance(row.error))
    finite = [row.error for row in rows if row.error is not None and row.error < 1]
    limit = max((row.tolerance or 0.0 for row in rows), default=0.0)
    scale = max([*finite, 1.1 * limit], default=1.0)
    return _template().render(
        report=report,
        name=printable(folder_name(report.path)),
        source=report.source and printable(folder_name(report.source)),
        groups=grouped(report.findings),
        kinds=_pictures(report, scale),
        scale=scale,
        rows=rows[:_MOST_ROWS],
        hidden=len(rows) > _MOST_ROWS,
        most_lines=_MOST_LINES,
        date=(when or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        versions=f"nf4conv {__version__}, torch {version('torch')} and Python {python_version()}",
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "printable": printable,
        "where": where,
        "size": size,
        "count": count_cell,
        "error": error_cell,
    }
    text = Path(__file__).with_name("page.html.jinja").read_text("utf-8")
    return environment.from_string(text)


def _pictures(report: VerifyReport, scale: float) -> Iterator[tuple[KindRow, list[int], int]]:
    """Yields each kind of module with the places of its weights' errors, and of the tolerance."""
    rows: dict[str, list[TensorRow]] = {}
    for row in report.weights:
        if row.error is not None:
            rows.setdefault(kind_of(row.name), []).append(row)
    for kind in report.kinds:
        found = rows.get(kind.kind, [])
        dots = sorted({_place(row.error or 0.0, scale) for row in found})
        limit = max((row.tolerance or 0.0 for row in found), default=0.0)
        yield kind, dots[-_MOST_DOTS:], _place(limit, scale)


def _place(error: float, scale: float) -> int:
    """Returns where an error stands in a picture; NaN and all beyond the scale at its end."""
    share = error / scale
    return round(_WIDTH * share) if share < 1 else _WIDTH - 4
