"""Makes text fit for a terminal, and writes lines to stderr."""

import os
from collections.abc import Iterable
from typing import Final

import click

_LONGEST_LINE: Final = 2000  # characters; names inside a file may be as long as the file


def printable(text: str) -> str:
    """Returns a text that is safe to print on one line.

    Names inside a file may hold line breaks and terminal codes: they are escaped. A very long text
    is cut.
    """
    if len(text) > _LONGEST_LINE:
        text = f"{text[: _LONGEST_LINE - 1]}…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def tell_notes(notes: Iterable[str]) -> None:
    """Writes what the user should know to stderr."""
    for note in notes:
        tell(f"{click.style('Note:', fg='yellow')} {printable(note)}")


def tell(line: str) -> None:
    """Writes a line to stderr. Colours appear only on a terminal, and not with NO_COLOR."""
    color = False if os.environ.get("NO_COLOR") else None  # None: click asks the terminal
    click.echo(line, err=True, color=color)
