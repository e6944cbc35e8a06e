"""Sets rows as a table, and numbers as cells."""

from collections.abc import Iterator, Sequence
from typing import Final

_NARROWEST: Final = 16  # characters that are left of a name, at least


def table(
    head: Sequence[str],
    body: Sequence[Sequence[str]],
    width: int | None,
    *,
    ends_with_text: bool = False,
) -> Iterator[str]:
    """Yields an empty line and the lines of a table; nothing if the table has no rows.

    Names are aligned to the left, figures to the right.

    Args:
        head: the title of each column. The first column holds names.
        body: the cells of each row.
        width: the longest line, in characters. Names are shortened in their middle and lines at
            their end. None to shorten nothing.
        ends_with_text: True if the last column holds sentences, which may be cut off.
    """
    if not body:
        return
    widths = [len(title) for title in head]
    for cells in body:
        for column, cell in enumerate(cells):
            widths[column] = max(widths[column], len(cell))
    if ends_with_text:
        widths[-1] = len(head[-1])
    if width is not None:
        gaps = 2 * (len(widths) - 1)
        room = width - sum(widths[1:]) - gaps
        widths[0] = min(widths[0], max(room, _NARROWEST))
    yield ""
    for cells in (head, *body):
        line = _line(cells, widths, ends_with_text=ends_with_text)
        if width is not None and len(line) > width:
            line = f"{line[: width - 1]}…"
        yield line


def _line(cells: Sequence[str], widths: Sequence[int], *, ends_with_text: bool) -> str:
    line = [_shortened(cells[0], widths[0]).ljust(widths[0])]
    for cell, room in zip(cells[1:], widths[1:], strict=True):
        line.append(cell.rjust(room))
    if ends_with_text:
        line[-1] = cells[-1]
    return "  ".join(line).rstrip()


def _shortened(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    head = (room - 1) // 3
    tail = room - 1 - head
    return f"{text[:head]}…{text[len(text) - tail :]}"


def count_cell(count: int | None) -> str:
    """Returns a count with commas; empty for None."""
    return "" if count is None else f"{count:,}"


def error_cell(error: float | None) -> str:
    """Returns an error with four digits; empty for None."""
    if error is None:
        return ""
    if 1e-3 <= error < 10:
        return f"{error:.4f}"
    return f"{error:.4g}"


def two_digits_cell(number: float | None) -> str:
    """Returns a number of decibels, or of bits, with two digits; empty for None."""
    return "" if number is None else f"{number:.2f}"


def shape_cell(shape: Sequence[int]) -> str:
    """Returns a shape such as "4096x1024"."""
    return "x".join(map(str, shape)) or "scalar"
