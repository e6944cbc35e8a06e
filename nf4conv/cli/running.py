"""Runs a command: what it was given, what it shows and logs, and how its errors end it.

A command writes its result to stdout and everything else to stderr. Exit codes: 0 done,
1 verification failed, 2 wrong usage or bad input.
"""

import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import click

from nf4conv.declaring import typed
from nf4conv.errors import Nf4convError, VerificationError
from nf4conv.options import SourceOptions
from nf4conv.report.text.progress_bar import ProgressBar
from nf4conv.report.text.terminal import printable, tell
from nf4conv.system.signals import (
    INTERRUPTED_EXIT,
    STOPPED_EXIT,
    UNREAD_EXIT,
    discard_stdout,
    is_unread,
)

_LIBRARY: Final = logging.getLogger("nf4conv")
_NO_THREADS: Final = "can't start new thread"  # Python's words
_PRINTS_JSON: Final = "nf4conv.prints_json"
"""Is the key in click's meta under which stands whether the command is to print JSON."""


# --- what a user chose ------------------------------------------------------------------------


def begin(
    kind: type[Any], values: Mapping[str, Any], place: str | Path | None
) -> tuple["Display", dict[str, Any]]:
    """Sorts what a user gave a command, and refuses options that have no effect.

    Args:
        kind: the options of the command.
        values: what was given, or stands for it by default.
        place: the checkpoint that options about a source are about. None if none was given.

    Returns:
        How to show the result, and the keywords of the function that makes it.

    Raises:
        OptionError: an option has a value that it cannot have.
    """
    display = Display(**_fields_of(Display, values))
    given = _fields_of(kind, values)
    _check_source_options(kind(**given), place)
    if display.quiet:
        silence_libraries()
    return display, given


def _fields_of(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that are fields of a class."""
    names = {field.name for field in fields(kind) if field.init}
    return {name: value for name, value in values.items() if name in names}


def _check_source_options(where: SourceOptions, place: str | Path | None) -> None:
    """Refuses options about the Hub or about GGUF files that have no effect on a place."""
    for name in ("revision", "stream", "local_files_only"):
        if getattr(where, name) and place is None:
            raise click.UsageError(f"{typed(name)} means nothing without --source")
        if getattr(where, name) and Path(str(place)).exists():
            raise click.UsageError(
                f"{typed(name)} is about a model on the Hub, not about {place}, which is on this "
                f"disk"
            )
    if where.config_from is None or where.gguf_file is not None or ".gguf" in str(place):
        return
    raise click.UsageError(
        "--config-from means nothing without a GGUF file: name one, or give --gguf-file"
    )


# --- what is shown ----------------------------------------------------------------------------


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

    def show(self, result: Any) -> None:
        """Prints a result as JSON or as lines."""
        if self.as_json:
            from nf4conv.report.as_json import write_json  # importing it holds up --help

            write_json(result, sys.stdout)
            sys.stdout.flush()
        elif not self.quiet:
            from nf4conv.report.text.lines import lines_of  # importing it holds up --help

            for line in lines_of(result, _terminal_width(), every=self.verbose):
                click.echo(line)

    def progress(self) -> ProgressBar:
        """Returns what shows how far the command is, and its notes."""
        return ProgressBar(hidden=self.quiet)


def silence_libraries() -> None:
    """Turns off the progress bars of huggingface_hub and the warnings of nf4conv's log."""
    # huggingface_hub reads this when it is imported
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    library = logging.getLogger("nf4conv")
    if not library.isEnabledFor(logging.INFO):  # as it is with --verbose
        library.setLevel(logging.ERROR)


def _terminal_width() -> int | None:
    """Returns the columns of the terminal; None if stdout is a file or a pipe.

    A file or a program gets names in full.
    """
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return None


class _Lines(logging.Handler):
    """Writes each record as a line, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        seconds = record.relativeCreated / 1000
        line = f"[{seconds:6.1f} s] {printable(record.getMessage())}"
        bars = sys.modules.get("tqdm")
        if bars is None:
            tell(line)
        else:
            bars.tqdm.write(line, file=sys.stderr)


def show_log(context: click.Context, _parameter: click.Parameter, wanted: bool) -> bool:
    """Shows the log as long as a command runs; the callback of --verbose."""
    if not wanted or context.resilient_parsing:
        return wanted
    handler = _Lines()
    before = _LIBRARY.level

    def end() -> None:
        _LIBRARY.removeHandler(handler)
        _LIBRARY.setLevel(before)

    _LIBRARY.addHandler(handler)
    _LIBRARY.setLevel(logging.INFO)
    context.call_on_close(end)
    return wanted


# --- errors -----------------------------------------------------------------------------------


class _Terminated(BaseException):
    """Ends a command that received SIGTERM."""


def raise_terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    """Handles SIGTERM: ends the command that runs."""
    raise _Terminated


class CommandGroup(click.Group):
    """Runs a command and handles its errors, expected and unexpected ones."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Returns the names of the commands in the order in which they were added."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the options, and notes whether the command is to print JSON."""
        ctx.meta[_PRINTS_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command. An error ends the process with one line on stderr and an exit code.

        With --json, an object on stdout says the same. The environment variable NF4CONV_DEBUG lets
        unexpected errors through.
        """
        try:
            return super().invoke(ctx)
        except VerificationError as error:
            _tell_json(ctx, error, 1)
            _fail(str(error), 1)
        except Nf4convError as error:
            _tell_json(ctx, error, 2)
            _fail(str(error), 2)
        except click.UsageError as error:
            _tell_json(ctx, error, 2)
            raise
        except _Terminated:
            _fail("stopped; the same command resumes", STOPPED_EXIT)
        except KeyboardInterrupt:
            _fail("interrupted; the same command resumes", INTERRUPTED_EXIT)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if isinstance(error, OSError) and is_unread(error):  # its reader has left
                discard_stdout()
                sys.exit(UNREAD_EXIT)
            if os.environ.get("NF4CONV_DEBUG"):
                raise
            _fail(_explained(error, ctx.command_path), 2)


def _tell_json(ctx: click.Context, error: Exception, code: int) -> None:
    """Prints an error as a JSON object on stdout, if the command was to print JSON."""
    if not ctx.meta.get(_PRINTS_JSON):
        return
    found: dict[str, object] = {
        "error": error.format_message() if isinstance(error, click.ClickException) else str(error),
        "kind": type(error).__name__,
        "exit_code": code,
    }
    if isinstance(error, Nf4convError):
        found["path"] = None if error.path is None else str(error.path)
        found["tensor"] = error.tensor
    click.echo(json.dumps(found, indent=2))


def _fail(message: str, code: int) -> NoReturn:
    """Prints an error and ends the process."""
    tell(f"Error: {printable(message)}")
    sys.exit(code)


def _explained(error: Exception, command: str) -> str:
    """Returns the message for an error that nobody expected."""
    if isinstance(error, OSError):
        return f"{error.filename or command}: {error.strerror or error}"
    if isinstance(error, MemoryError):
        return "out of memory; try fewer --workers"
    if isinstance(error, RuntimeError) and _NO_THREADS in str(error):
        return (
            "the system starts no more threads; try fewer --workers, or allow more of them "
            "(ulimit -u)"
        )
    found = f"{type(error).__name__}: {error}"
    return (
        f"{found[:300]}: this is a bug in nf4conv, please report it; "
        "NF4CONV_DEBUG=1 shows where it is"
    )
