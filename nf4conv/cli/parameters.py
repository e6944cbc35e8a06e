"""Makes click's options from the fields that declare them, with the types and the help that click
lacks.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from nf4conv.cli.running import show_log
from nf4conv.declaring import Declared, Group, Option, options_of, typed
from nf4conv.options import DTYPES

Decorator: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]

# Bytes in a unit, without the B at its end.
_UNITS: Final = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
_SHORT_DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """Reads a number of bytes with a unit, as transformers and huggingface_hub do.

    5GB is 5·10⁹ bytes, 5GiB is 5·2³⁰.
    """

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Returns the number of bytes. Refuses a number without a unit, and 0."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]I?)B?|B)\s*", str(value).upper())
        if match is None:
            if str(value).isdigit():
                self.fail(f"{value!r} needs a unit, such as {value}GB", param, ctx)
            self.fail(f"{value!r} is not a size such as 5GB or 500MB", param, ctx)
        number, unit = match.groups(default="")
        size = int(float(number) * _UNITS[unit])
        if size <= 0:
            self.fail("a size must be positive", param, ctx)
        return size


class Place(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """Reads a path, or the name of a model on the Hub, and passes it on unchanged.

    A shell completes it as the path of a "file" or of a folder ("dir").
    """

    name = "place"

    def __init__(self, completes: str) -> None:
        self._completes = completes

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Returns the value. Refuses an empty one.

        An unset variable of a shell leaves an empty value. As a path it would be the current
        folder, which --overwrite clears.
        """
        if not value:
            self.fail("the path is empty; perhaps a shell variable is not set", param, ctx)
        return str(value)

    def shell_complete(
        self, _ctx: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Asks the shell to complete a path."""
        return [CompletionItem(incomplete, type=self._completes)]


class Dtype(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2
    """Reads a dtype by its name or its short name: bf16, fp16 or fp32."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the full name."""
        return super().convert(_SHORT_DTYPES.get(value, value), param, ctx)


class GroupedOption(click.Option):
    """Is an option that --help shows in a group."""

    def __init__(self, *names: Any, group: Group, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.group = group


def option(*names: str, group: Group, help: str, **attributes: Any) -> Decorator:
    """Declares an option of a command, as a decorator.

    Args:
        names: its spellings, and the name of its parameter if that is another.
        group: the group in which --help shows it. A group shows its options in the order in which
            they are declared.
        help: a sentence. A default that click cannot show comes behind it in brackets.
        attributes: what else `click.option` takes.
    """
    return click.option(*names, cls=GroupedOption, group=group, help=help, **attributes)


def options_from(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declares the options of a command by the fields of its class of options."""

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        for one in reversed(options_of(kind)):
            if not one.said.in_python:
                command = _option(one)(command)
        return command

    return declare


def _option(declared: Declared) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declares an option by its field."""
    name = typed(declared.name)
    said = declared.said
    default = declared.default
    help = said.help
    if said.unset:
        help += f"  [default: {said.unset}]"
    attributes: dict[str, Any] = {"metavar": said.metavar}
    if declared.kind is bool and default is None:
        name = f"{name}/--no-{name[2:]}"
        attributes["default"] = None
    elif declared.kind is bool:
        attributes["is_flag"] = True
    elif declared.holds_names:
        attributes["multiple"] = True
        help += " May be given again."
    else:
        attributes["type"] = _type_of(declared.kind, said)
        attributes["required"] = default is MISSING
        if default is not MISSING and default is not None:
            attributes["default"] = default
            attributes["show_default"] = not said.is_size
            if said.is_size:
                help += f"  [default: {_spelled(default)}]"
    return option(name, group=said.group, help=help, **attributes)


def _type_of(kind: Any, said: Option) -> Any:
    """Returns click's type of an option that has one value."""
    choices = get_args(kind)
    if said.is_size:
        return Size()
    if choices[: len(DTYPES)] == DTYPES:
        return Dtype(choices)
    if get_origin(kind) is Literal and isinstance(choices[0], str):
        return click.Choice(choices)
    if get_origin(kind) is Literal:
        return int
    return Place("file") if Path in choices else kind


def _spelled(size: int) -> str:
    """Returns a number of bytes as a user types it."""
    unit, letter = (10**9, "G") if size >= 10**9 else (10**6, "M")
    return f"{size // unit}{letter}B"


def display_options(*, quiet: str = "", verbose: str = "", dry_run: bool = False) -> Decorator:
    """Declares the options that say what a command shows, which only the command line has.

    Args:
        quiet: the help of --quiet; empty for a command without it.
        verbose: the help of --verbose; empty for a command without it.
        dry_run: True for a command that has --dry-run.
    """
    options = [
        option(
            "--json",
            "as_json",
            group=Group.DISPLAY,
            is_flag=True,
            help="Print the result as JSON (docs/options.md).",
        )
    ]
    if dry_run:
        help = "Show what would become of SRC, and write nothing."
        options.insert(0, option("--dry-run", group=Group.DISPLAY, is_flag=True, help=help))
    if quiet:
        options.append(option("-q", "--quiet", group=Group.DISPLAY, is_flag=True, help=quiet))
    if verbose:
        options.append(
            option(
                "-v",
                "--verbose",
                group=Group.DISPLAY,
                is_flag=True,
                callback=show_log,
                help=verbose,
            )
        )

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        for one in reversed(options):
            command = one(command)
        return command

    return declare


_OPTIONS_OF_OTHERS: Final = {
    "--force": "--overwrite deletes what is in OUT",
    "-f": "--overwrite deletes what is in OUT",
    "--yes": "--overwrite deletes what is in OUT",
    "-o": "OUT is the second argument",
    "--output": "OUT is the second argument",
    "--output-dir": "OUT is the second argument",
    "--output_dir": "OUT is the second argument",
    "--out": "OUT is the second argument",
    "--outfile": "OUT is the second argument",
    "--model": "SRC is the first argument",
    "--model-id": "SRC is the first argument",
    "--outtype": "--quant-type nf4 or fp4 is the data type",
    "--load-in-4bit": "packing to 4 bits is what this does; --quant-type is the data type",
    "--load_in_4bit": "packing to 4 bits is what this does; --quant-type is the data type",
    "--bnb-4bit-quant-type": "--quant-type nf4 or fp4",
    "--bnb_4bit_quant_type": "--quant-type nf4 or fp4",
    "--bnb_4bit_use_double_quant": "double quantization is on; --no-double-quant turns it off",
    "--gpu": "--device cuda",
    "--bits": "weights are packed to 4 bits; --quant-type nf4 or fp4 is the data type",
    "--load-in-8bit": "weights are packed to 4 bits; --quant-type is the data type",
    "--load_in_8bit": "weights are packed to 4 bits; --quant-type is the data type",
    "--group-size": "--blocksize is the number of elements that share a scale",
    "--torch-dtype": "--dtype",
    "--torch_dtype": "--dtype",
    "--trust-remote-code": "code of a repository is never run",
    "--trust_remote_code": "code of a repository is never run",
}
"""Tells what to use here in place of an option of another tool, which users type by habit."""


class Command(click.Command):
    """Is a command whose --help shows options in groups, and which knows options of other tools."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the options; an error about one of another tool says what stands here for it."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            instead = _OPTIONS_OF_OTHERS.get(error.option_name)
            if instead is None:
                raise
            raise click.UsageError(
                f"No such option '{error.option_name}': {instead}.", ctx
            ) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options that are not hidden, group after group."""
        for title, options in grouped(self, ctx):
            records = []
            for one in options:
                record = one.get_help_record(ctx)
                if record is not None:
                    records.append(record)
            with formatter.section(title):
                formatter.write_dl(records)


def grouped(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, list[click.Option]]]:
    """Yields the title of each group that a command has, and the group's options."""
    members: dict[Group, list[click.Option]] = {group: [] for group in Group}
    for parameter in command.get_params(ctx):
        if isinstance(parameter, GroupedOption):
            members[parameter.group].append(parameter)
        elif isinstance(parameter, click.Option):
            members[Group.DISPLAY].append(parameter)  # --help, which click adds by itself
    for group, options in members.items():
        if options:
            yield group.value, options


def examples(*lines: str) -> str:
    """Returns the end of a help text: command lines, to which this adds the program's name.

    A remark stands behind a line as a comment of the shell, so that a line may be copied whole.
    """
    text = "\b\nExamples:"  # \b keeps click from joining the lines
    for line in lines:
        text += f"\n  nf4conv {line}"
    return text
