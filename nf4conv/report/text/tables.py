"""Sets columns as a table, and numbers as cells."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_NARROWEST: Final = 16  # characters that are left of a name, at least


def table(
    columns: Mapping[str, Sequence[str]], width: int | None, *, ends_with_text: bool = False
) -> Iterator[str]:
    """Yields an empty line and the lines of a table; nothing if the table has no rows.

    Names, in the first column, are aligned to the left, figures to the right. Names are shortened
    in their middle, and lines at their end, to `width` characters, if given. `ends_with_text` tells
    that the last column holds sentences, which may be cut off.
    """
    body = list(zip(*columns.values(), strict=True))
    if not body:
        return
    widths = [max(len(title), *map(len, cells)) for title, cells in columns.items()]
    if ends_with_text:
        widths[-1] = len(list(columns)[-1])
    if width is not None:
        gaps = 2 * (len(widths) - 1)
        widths[0] = min(widths[0], max(width - sum(widths[1:]) - gaps, _NARROWEST))
    yield ""
    for name, *cells in (tuple(columns), *body):
        line = [_shortened(name, widths[0]).ljust(widths[0])]
        line += [cell.rjust(room) for cell, room in zip(cells, widths[1:], strict=True)]
        if ends_with_text:
            line[-1] = cells[-1]
        text = "  ".join(line).rstrip()
        yield text if width is None or len(text) <= width else f"{text[: width - 1]}…"


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
    return f"{error:.4f}" if 1e-3 <= error < 10 else f"{error:.4g}"
