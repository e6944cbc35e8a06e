"""Shows results, notes and progress the way the user asked for."""

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import click

import nf4conv
from nf4conv.report.text.terminal import coloured, show, tell_notes

if TYPE_CHECKING:  # importing all of them would take a moment of every command
    Result: TypeAlias = (
        nf4conv.PlanReport
        | nf4conv.QuantizeReport
        | nf4conv.DequantizeReport
        | nf4conv.FinishReport
        | nf4conv.VerifyReport
        | nf4conv.Evaluation
        | nf4conv.Evaluations
        | nf4conv.Inspection
        | nf4conv.Environment
    )


@dataclass(frozen=True)
class Display:
    """Shows what a command found, the way the user asked for.

    Attributes:
        as_json: True prints the result as JSON.
        quiet: True prints no progress, no notes and no lines about the result.
        verbose: True lists every check, and tells on stderr what is done.
        dry_run: True shows the plan and does not carry it out.
    """

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise click.UsageError("--quiet and --verbose contradict each other")

    def show(self, result: "Result", lines: Iterable[str]) -> None:
        """Prints a result as JSON or as `lines`."""
        if self.as_json:
            click.echo(nf4conv.to_json(result), nl=False)
        elif not self.quiet:
            text = "\n".join(coloured(_wrapped(line)) for line in lines)
            if text:
                show(text)

    def tell_notes(self, notes: tuple[str, ...]) -> None:
        """Prints notes on stderr."""
        if not self.quiet:
            tell_notes(notes)


def silence_libraries() -> None:
    """Turns off the progress bars of huggingface_hub and the warnings of nf4conv's log."""
    # huggingface_hub reads this when it is imported
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    library = logging.getLogger("nf4conv")
    if not library.isEnabledFor(logging.INFO):  # as it is with --verbose
        library.setLevel(logging.ERROR)


def terminal_width() -> int | None:
    """Returns the columns of the terminal; None if stdout is a file or a pipe.

    A file or a program gets names in full.
    """
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return None


def _wrapped(line: str) -> str:
    """Breaks a sentence into lines of the terminal.

    Lines that a user copies stay whole. Rows of tables fit already.
    """
    width = terminal_width()
    if width is None or line.startswith(("install:", "load:", "push:")):
        return line
    return textwrap.fill(
        line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
