"""How the command line talks: values of options, help in groups, errors as one line, progress."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn

import click
from click.shell_completion import CompletionItem

from nf4conv.errors import Nf4convError, VerificationError
from nf4conv.options import DTYPES
from nf4conv.report.text import printable, size

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{prefix}I": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)
}
_SHORT: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SECONDS_BETWEEN_LINES: Final = 30.0

_COMMANDS: Final = ("inspect", "quantize", "verify", "compare", "evaluate", "dequantize", "env", "completion")
"""In the order of their use."""

_GROUPS: Final = {
    "What is made": "quant_type blocksize double_quant scales quant_storage lora dtype compute_dtype max_shard_size "
    "single_file",
    "Which weights": "include exclude skip_modules quantize_towers moe plan_with non_finite",
    "Checks": "verify source text tokens max_kl card tolerance exact",
    "Publishing": "push_to_hub public base_model",
    "Where it comes from": "revision subfolder variant stream cache_dir local_files_only token",
    "This machine": "device workers buffer_size overwrite checksum",
    "What is shown": "dry_run every as_json json_file report quiet help",
}
"""Options by what they are for, in the order of --help."""


class Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A number of bytes, as transformers and huggingface_hub write it: 5GB is 5·10⁹, 5GiB is 5·2³⁰."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]I?)B?|B)\s*", str(value).upper())
        if match is None:
            hint = f"needs a unit, such as {value}GB" if str(value).isdigit() else "is not a size such as 5GB or 500MB"
            self.fail(f"{value!r} {hint}", param, ctx)
        size = int(float(match[1]) * _UNITS[match[2] or ""])
        if size <= 0:
            self.fail("a size must be positive", param, ctx)
        return size


class Place(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A path or a Hub id, as it was given; a shell completes paths of a "file" or a "dir"."""

    name = "place"

    def __init__(self, completes: str) -> None:
        self._completes = completes

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        # what an unset variable of a shell leaves; as a path it would be the current folder, which --overwrite clears
        if not value:
            self.fail("is empty", param, ctx)
        return str(value)

    def shell_complete(self, _ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self._completes)]


class Dtype(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2
    """A dtype, by its name or the short form of it."""

    def __init__(self) -> None:
        super().__init__(DTYPES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_SHORT.get(value, value), param, ctx)


class Command(click.Command):
    """One whose help shows options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, options in grouped(self, ctx):
            with formatter.section(title):
                formatter.write_dl(
                    [record for option in options if (record := option.get_help_record(ctx)) is not None]
                )


def grouped(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, list[click.Option]]]:
    """The options of a command under the titles that --help shows, in its order."""
    options = [param for param in command.get_params(ctx) if isinstance(param, click.Option)]
    for title, names in _GROUPS.items():
        order = names.split()
        members = sorted((o for o in options if name_of(o) in order), key=lambda option: order.index(name_of(option)))
        if members:
            yield title, members


def name_of(option: click.Option) -> str:
    """Of its parameter; that of --help depends on the release of click."""
    return "help" if "--help" in option.opts else str(option.name)


class Commands(click.Group):
    """Turns every error into one line and an exit code, whether it is meant for the user or a fault."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of use; a command that is not in the list comes last."""
        return sorted(super().list_commands(ctx), key=[*_COMMANDS, *self.commands].index)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except VerificationError as error:
            _fail(str(error), 1)
        except Nf4convError as error:
            _fail(str(error), 2)
        except _Terminated:
            _fail("stopped; the same command resumes", 128 + signal.SIGTERM)
        except KeyboardInterrupt:
            _fail("interrupted; the same command resumes", 128 + signal.SIGINT)
        except BrokenPipeError:
            # the reader of our output has left; nothing is left to be told, not even by the interpreter's exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if os.environ.get("NF4CONV_DEBUG"):
                raise
            _fail(_explained(error, ctx.command_path), 2)


def _explained(error: Exception, command: str) -> str:
    """What to tell of an error that nobody expected."""
    if isinstance(error, OSError):
        return f"{error.filename or command}: {error.strerror or error}"
    if isinstance(error, MemoryError):
        return "out of memory; try fewer --workers, or a smaller --buffer-size"
    found = f"{type(error).__name__}: {error}"
    return f"{found[:300]}: this is a bug of nf4conv, please report it; NF4CONV_DEBUG=1 shows where it is"


class _Terminated(BaseException):
    pass


def raise_terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    """What a signal does to a command."""
    raise _Terminated


def _fail(message: str, code: int) -> NoReturn:
    tell(f"{click.style('Error:', fg='red')} {printable(message)}")
    sys.exit(code)


def tell_notes(notes: tuple[str, ...]) -> None:
    """What the user should know, on stderr."""
    for note in notes:
        tell(f"{click.style('Note:', fg='yellow')} {printable(note)}")


def tell(line: str) -> None:
    """A line on stderr, in colours only where it is a terminal and the user wants them."""
    click.echo(line, err=True, color=False if os.environ.get("NO_COLOR") else None)


@contextmanager
def progress(verb: str, total: int, *, hidden: bool, last: str = "finishing") -> Iterator[Callable[[int], None]]:
    """How far a run is, on stderr: a bar on a terminal, and elsewhere a line now and then; none if it is to be hidden.

    `verb` says what is being done with so many bytes of source in total, `last` what when all of them have been read.
    """
    if hidden or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in ("1", "ON", "YES", "TRUE"):
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        yield _logging(verb, total)
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, leave=False, desc=verb) as bar:

        def advance(count: int) -> None:
            bar.update(count)
            if bar.n >= total:
                bar.set_description(last)

        yield advance


def _logging(verb: str, total: int) -> Callable[[int], None]:
    """Lines in a file, or in the log of a job: how much is done, how fast, and how long the rest takes."""
    lock, started = threading.Lock(), time.monotonic()
    done, last = 0, started

    def advance(count: int) -> None:
        nonlocal done, last
        with lock:
            done, now = done + count, time.monotonic()
            if now - last < _SECONDS_BETWEEN_LINES:
                return
            last, rate = now, done / (now - started)
            shares = f"{size(done)} of {size(total)} ({100 * done / total:.0f} %)"
            tell(f"{verb}: {shares}, {size(rate)}/s, about {(total - done) / max(rate, 1) / 60:.0f} min left")

    return advance
