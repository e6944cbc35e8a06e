"""Turns every error into one line on stderr and an exit code."""

import json
import os
import sys
from types import FrameType
from typing import Any, Final, NoReturn

import click

from nf4conv.errors import Nf4convError, VerificationError
from nf4conv.report.text.terminal import printable, tell
from nf4conv.system.signals import (
    INTERRUPTED_EXIT,
    STOPPED_EXIT,
    UNREAD_EXIT,
    discard_stdout,
    is_unread,
)

_NO_THREADS: Final = "can't start new thread"  # Python's words

PRINTS_JSON: Final = "nf4conv.prints_json"
"""Is the key in click's meta under which stands whether the command is to print JSON."""


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
        ctx.meta[PRINTS_JSON] = "--json" in args
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
            if isinstance(error, OSError) and is_unread(error):
                _leave_quietly()
            if os.environ.get("NF4CONV_DEBUG"):
                raise
            _fail(_explained(error, ctx.command_path), 2)


def _tell_json(ctx: click.Context, error: Exception, code: int) -> None:
    """Prints an error as a JSON object on stdout, if the command was to print JSON."""
    if not ctx.meta.get(PRINTS_JSON):
        return
    found: dict[str, object] = {
        "error": _message_of(error),
        "kind": type(error).__name__,
        "exit_code": code,
    }
    if isinstance(error, Nf4convError):
        found["path"] = None if error.path is None else str(error.path)
        found["tensor"] = error.tensor
    click.echo(json.dumps(found, indent=2))


def _message_of(error: Exception) -> str:
    """Returns what an error says."""
    if isinstance(error, click.ClickException):
        return error.format_message()
    return str(error)


def _fail(message: str, code: int) -> NoReturn:
    """Prints an error and ends the process."""
    tell(f"{click.style('Error:', fg='red')} {printable(message)}")
    sys.exit(code)


def _leave_quietly() -> NoReturn:
    """Ends the process after the program that reads our output has left."""
    discard_stdout()
    sys.exit(UNREAD_EXIT)


def _explained(error: Exception, command: str) -> str:
    """Returns the message for an error that nobody expected."""
    if isinstance(error, OSError):
        return f"{error.filename or command}: {error.strerror or error}"
    if isinstance(error, MemoryError):
        return "out of memory; try fewer --workers, or a smaller --buffer-size"
    if isinstance(error, RuntimeError) and _NO_THREADS in str(error):
        return (
            "the system starts no more threads; try fewer --workers, or allow more of them "
            "(ulimit -u)"
        )
    if isinstance(error, ValueError) and str(error).startswith("embedded null"):
        return "a name holds a zero character, which no file's name can"
    found = f"{type(error).__name__}: {error}"
    return (
        f"{found[:300]}: this is a bug in nf4conv, please report it; "
        "NF4CONV_DEBUG=1 shows where it is"
    )
