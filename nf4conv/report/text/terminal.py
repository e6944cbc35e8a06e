"""Makes text and tables fit for a terminal, and writes lines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import click

_NARROWEST: Final = 16  # characters that are left of a name in a table, at least
_LONGEST_LINE: Final = 2000  # characters; names inside a file may be as long as the file


def printable(text: str) -> str:
    """Returns a text that is safe to print on one line.

    Names inside a file may hold line breaks and terminal codes: they are escaped. A very long text
    is cut.
    """
    if len(text) > _LONGEST_LINE:
        text = f"{text[: _LONGEST_LINE - 1]}…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def tell(line: str) -> None:
    """Writes a line to stderr."""
    click.echo(line, err=True)


def tell_notes(notes: Iterable[str]) -> None:
    """Writes what the user should know to stderr."""
    for note in notes:
        tell(f"Note: {printable(note)}")


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
        line = [shortened(name, widths[0]).ljust(widths[0])]
        line += [cell.rjust(room) for cell, room in zip(cells, widths[1:], strict=True)]
        if ends_with_text:
            line[-1] = cells[-1]
        text = "  ".join(line).rstrip()
        yield text if width is None or len(text) <= width else f"{text[: width - 1]}…"


def shortened(text: str, room: int) -> str:
    """Cuts out the middle of a text that has more characters than there is room for."""
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
