"""The command line: words → options → one function of the public API → what it returned, printed,
and an exit code.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 verification failed, 2 usage
or bad input.
"""

import dataclasses
import io
import json
import logging
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import click
from click.shell_completion import CompletionItem, get_completion_class

import nf4conv
import nf4conv.report.text as text
from nf4conv.errors import Nf4convError, VerificationError
from nf4conv.options import CHOICES, DTYPES, RunOptions, SourceOptions
from nf4conv.report.text import printable, progress, tell

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{prefix}I": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)
}
_SHORT: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

_TABLES: Final = json.loads(Path(__file__).with_name("cli.json").read_bytes())
"""Options by the fields that they fill: groups in the order of --help, spellings, and what commands
say of those they take; then of each command its arguments, sections of options, help and examples.
"""


class Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A number of bytes, as transformers and huggingface_hub write it: 5GB is 5·10⁹, 5GiB is 5·2³⁰."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]I?)B?|B)\s*", str(value).upper())
        if match is None:
            hint = (
                f"needs a unit, such as {value}GB"
                if str(value).isdigit()
                else "is not a size such as 5GB or 500MB"
            )
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

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        # what an unset variable of a shell leaves; as a path it would be the current folder, which
        # --overwrite clears
        if not value:
            self.fail("is empty", param, ctx)
        return str(value)

    def shell_complete(
        self, _ctx: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self._completes)]


class Dtype(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2
    """A dtype, by its name or the short form of it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_SHORT.get(value, value), param, ctx)


class Command(click.Command):
    """One whose help shows options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, options in grouped(self, ctx):
            with formatter.section(title):
                formatter.write_dl(
                    [
                        record
                        for option in options
                        if (record := option.get_help_record(ctx)) is not None
                    ]
                )


def grouped(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, list[click.Option]]]:
    """The options of a command under the titles that --help shows, in its order."""
    options = [param for param in command.get_params(ctx) if isinstance(param, click.Option)]
    for title, names in _TABLES["groups"].items():
        order = names.split()
        members = sorted(
            (o for o in options if name_of(o) in order),
            key=lambda option: order.index(name_of(option)),
        )
        if members:
            yield title, members


def name_of(option: click.Option) -> str:
    """Of its parameter; that of --help depends on the release of click."""
    return "help" if "--help" in option.opts else str(option.name)


class Commands(click.Group):
    """Turns every error into one line and an exit code, whether it is meant for the user or a
    fault.
    """

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """In the order of use, in which they are defined."""
        return list(self.commands)

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
            # the reader of our output has left; nothing is left to be told, not even by the
            # interpreter's exit
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


def _examples(lines: Sequence[str]) -> str | None:
    return (
        "\n".join(["\b", "Examples:", *(f"  nf4conv {line}" for line in lines)]) if lines else None
    )


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="\n\n".join(_TABLES["commands"]["main"]["help"]),
    epilog=_examples(_TABLES["commands"]["main"]["examples"]),
)
@click.version_option(nf4conv.__version__, "-V", "--version", message="%(version)s")
def main() -> None:
    if (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):  # called by another program than __main__.py
        signal.signal(signal.SIGTERM, raise_terminated)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # an arrow must not fail where only ASCII can be printed


@dataclasses.dataclass(frozen=True)
class _Shown:
    """How the user wants to see a result."""

    as_json: bool = False
    json_file: Path | None = None
    quiet: bool = False
    every: bool = False
    dry_run: bool = False

    def show(self, result: Any, lines: Iterable[str]) -> None:
        """Print it, as JSON or in lines, and write it to a file if that is asked for."""
        if self.json_file is not None:
            nf4conv.write_json(result, self.json_file)
        if self.as_json:
            click.echo(nf4conv.to_json(result), nl=False)
        elif printed := "\n".join(() if self.quiet else map(_wrapped, lines)):
            click.echo(printed)


_KINDS: Final[dict[str, Any]] = {
    **{name: click.Choice(allowed) for name, allowed in CHOICES.items()},
    **dict.fromkeys(("dtype", "compute_dtype"), Dtype(DTYPES)),
    **dict.fromkeys(("max_shard_size", "buffer_size"), Size()),
    **dict.fromkeys(("json_file", "report", "text"), click.Path(dir_okay=False, path_type=Path)),
    "source": Place("file"),
    "cache_dir": click.Path(file_okay=False, path_type=Path),
    "blocksize": int,
    "workers": click.IntRange(0, 1024),
    "tokens": click.IntRange(2),
    "tolerance": float,
    "max_kl": click.FloatRange(0),
}
"""What an option takes, by the field that it fills; others are flags, or take any text."""
_HOMES: Final = (
    *(
        _Shown,
        RunOptions,
        SourceOptions,
        nf4conv.PushOptions,
        nf4conv.QuantizeOptions,
        nf4conv.VerifyOptions,
    ),
    nf4conv.EvaluateOptions,
)
_DEFAULTS: Final = {
    field.name: field.default for home in _HOMES for field in dataclasses.fields(home)
} | {
    "max_shard_size": "1GB",
    "buffer_size": "64MB",
}
"""By the field that an option fills; sizes as users write them."""


def _command(function: Callable[..., None]) -> click.Command:
    """The command of a function's name, with the arguments, options, help and examples that
    cli.json says.
    """
    name = function.__name__
    stated = _TABLES["commands"][name]
    for section in stated["takes"]:
        for field, help in _TABLES["options"][section].items():
            function = _option(field, help, field in stated.get("requires", ()))(function)
    for field, (metavar, completes) in reversed(stated["arguments"].items()):
        function = click.argument(field, metavar=metavar, type=Place(completes))(function)
    examples = _examples([f"{name} {line}" for line in stated["examples"]])
    return main.command(name, help="\n\n".join(stated["help"]), epilog=examples)(function)


def _option(name: str, help: str, required: bool) -> Callable[..., Any]:
    default = _DEFAULTS.get(name)
    given: dict[str, Any] = (
        {"required": True} if required else {"default": default}
    )  # None is one, too
    return click.option(
        *_TABLES["spellings"].get(name, [f"--{name.replace('_', '-')}"]),
        name,
        type=_KINDS.get(name),
        metavar=_TABLES["metavars"].get(name),
        is_flag=default is False or None,
        multiple=default == (),
        **given,
        show_default=isinstance(default, str),
        help=f"{help} May be given again." if default == () else help,
    )


@_command
def inspect(path: str, **chosen: Any) -> None:
    shown, where = _read(chosen, [path], SourceOptions)
    _quieten(True)
    found = nf4conv.inspect_checkpoint(path, where)
    shown.show(found, text.inspection_lines(found, _width(), every=shown.every))


@_command
def quantize(source: str, out: str, **chosen: Any) -> None:
    _require("--tolerance", chosen["tolerance"] is not None, "--verify", chosen["verify"])
    _require("--public", chosen["public"], "--push-to-hub", chosen["push_to_hub"] is not None)
    kinds = (RunOptions, nf4conv.QuantizeOptions, SourceOptions, nf4conv.PushOptions)
    shown, run, options, where, push = _read(chosen, [source], *kinds)
    plan = nf4conv.plan_quantization(source, options, where)
    last = "finishing" if push.push_to_hub is None else f"uploading to {push.push_to_hub}"
    execute = partial(nf4conv.execute_quantization, plan, out, run, push=push)
    verb = "quantizing and verifying" if run.verify else "quantizing"
    _carry_out(plan, run, execute, shown, text.quantization_lines, verb, last)


@_command
def verify(path: str, source: str | None, report: Path | None, **chosen: Any) -> None:
    places = [place for place in (source,) if place is not None]
    shown, run, options, where = _read(
        chosen, places, RunOptions, nf4conv.VerifyOptions, SourceOptions
    )
    plan = nf4conv.plan_verification(path, source, options, where)
    with progress("verifying", plan.bytes_to_read, hidden=shown.quiet) as advance:
        found = nf4conv.execute_verification(plan, run, advance)
    if report is not None:
        nf4conv.write_page(found, report)
    shown.show(found, text.verification_lines(found, _width()))
    sys.exit(0 if found.passed else 1)


@_command
def compare(a: str, b: str, **chosen: Any) -> None:
    shown, run, options, where = _read(
        chosen, [a, b], RunOptions, nf4conv.CompareOptions, SourceOptions
    )
    plan = nf4conv.plan_comparison(a, b, options, where)
    text.tell_notes(() if shown.quiet else plan.notes)
    with progress("comparing", plan.bytes_to_read, hidden=shown.quiet) as advance:
        found = nf4conv.execute_comparison(plan, run, advance)
    shown.show(found, text.comparison_lines(found, _width()))
    sys.exit(0 if found.passed else 1)


@_command
def evaluate(out: str, source: str, device: str, **chosen: Any) -> None:
    from tqdm import tqdm

    shown, options, where = _read(chosen, [source], nf4conv.EvaluateOptions, SourceOptions)
    look = {
        "bar_format": "{l_bar}{bar}| {elapsed}<{remaining}",
        "leave": False,
        "disable": shown.quiet or None,
    }
    with tqdm(desc="evaluating", total=1, **look) as bar:
        found = nf4conv.evaluate_checkpoint(out, source, options, device, where, bar.update)
    shown.show(found, (f"{name:<20}{value}" for name, value in found.rows().items()))
    sys.exit(0 if found.passed else 1)


@_command
def dequantize(source: str, out: str, **chosen: Any) -> None:
    shown, run, options, where = _read(
        chosen, [source], RunOptions, nf4conv.DequantizeOptions, SourceOptions
    )
    plan = nf4conv.plan_dequantization(source, options, where)
    execute = partial(nf4conv.execute_dequantization, plan, out, run)
    _carry_out(plan, run, execute, shown, text.dequantization_lines, "decoding", "finishing")


@_command
def finish(out: str, **chosen: Any) -> None:
    found = nf4conv.finish_checkpoint(out)
    _Shown(**chosen).show(found, text.finish_lines(found))


@_command
def env(**chosen: Any) -> None:
    found = nf4conv.environment()
    _Shown(**chosen).show(found, text.environment_lines(found))


@_command
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    program = get_completion_class(shell)
    assert program is not None
    click.echo(program(main, {}, "nf4conv", "_NF4CONV_COMPLETE").source())


def _require(option: str, given: bool, other: str, is_there: bool) -> None:
    """Refuse an option that would be ignored."""
    if given and not is_there:
        raise click.UsageError(f"{option} means nothing without {other}")


def _read(chosen: dict[str, Any], places: Sequence[str], *kinds: type[Any]) -> list[Any]:
    """How to show the result, and the chosen values of each kind of options; a command need not
    have all of them.

    Options about the Hub are refused where nothing is there.
    """
    _require("--all", chosen.get("every", False), "--dry-run", chosen.get("dry_run", True))
    for option in ("revision", "stream", "local_files_only"):
        if chosen.get(option) and all(Path(place).exists() for place in places):
            where = (
                f"{' and '.join(places)}, which is on this disk"
                if places
                else "nothing without --source"
            )
            raise click.UsageError(
                f"--{option.replace('_', '-')} is about a model on the Hub, not about {where}"
            )
    _quieten(chosen.get("quiet", False))
    return [_split(_Shown, chosen), *(_split(kind, chosen) for kind in kinds)]


def _split(kind: type[Any], chosen: dict[str, Any]) -> Any:
    return kind(
        **{
            field.name: chosen[field.name]
            for field in dataclasses.fields(kind)
            if field.name in chosen
        }
    )


def _carry_out(
    plan: Any,
    run: RunOptions,
    execute: Callable[..., Any],
    shown: _Shown,
    lines: Callable[[Any], Iterable[str]],
    verb: str,
    last: str,
) -> None:
    """Show what a plan would do, or do it and show that."""
    plan = nf4conv.plan_part(plan, run)
    if shown.dry_run:
        described = nf4conv.describe_plan(plan)
        shown.show(described, text.plan_lines(described, _width(), every=shown.every))
        return
    text.tell_notes(() if shown.quiet else plan.notes)
    totals = plan.totals()
    again = totals.bytes_before + totals.bytes_after if run.verify else 0
    with progress(verb, totals.bytes_before + again, hidden=shown.quiet, last=last) as advance:
        report = execute(progress=advance)
    shown.show(report, lines(report))


def _quieten(quiet: bool) -> None:
    if quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = (
            "1"  # which huggingface_hub reads when it is imported
        )
        logging.getLogger("nf4conv").setLevel(logging.ERROR)


def _width() -> int | None:
    """Of the terminal; None where stdout is none, so that a file or a program gets whole names."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _wrapped(line: str) -> str:
    """A sentence in lines of the terminal; what is there to be copied stays whole, as do rows of
    tables, which fit.
    """
    width = _width()
    if width is None or line.startswith(("load:", "push:")):
        return line
    return textwrap.fill(
        line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
