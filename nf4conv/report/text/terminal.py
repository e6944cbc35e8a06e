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


_COLOURS: Final = {
    "ok ": "green",
    "passed: ": "green",
    "sound: ": "green",
    "within the tolerance: ": "green",
    "note ": "yellow",
    "FAIL ": "red",
    "FAILED: ": "red",
}
"""The colour of each word that a line may begin with to say how something came out."""


def coloured(line: str) -> str:
    """Returns a line with the outcome at its beginning in colour."""
    for word, colour in _COLOURS.items():
        if line.startswith(word):
            outcome = word.rstrip(": ")
            return click.style(outcome, fg=colour) + line[len(outcome) :]
    return line


def show(text: str) -> None:
    """Writes a text to stdout. Colours appear only on a terminal, and not with NO_COLOR."""
    click.echo(text, color=_wants_color())


def tell(line: str) -> None:
    """Writes a line to stderr. Colours appear only on a terminal, and not with NO_COLOR."""
    click.echo(line, err=True, color=_wants_color())


def _wants_color() -> bool | None:
    """Returns False if the user wants none, and None to let click ask the terminal."""
    return False if os.environ.get("NO_COLOR") else None
