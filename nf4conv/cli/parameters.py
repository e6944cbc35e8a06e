"""Makes click's options from the fields that declare them, with the types and the help that click
lacks.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Final, TypeAlias, get_args

import click

from nf4conv.cli.running import show_log
from nf4conv.declaring import GROUPS, Option, options_of, typed
from nf4conv.options import DTYPES

Decorator: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]

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
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?)B?|B)\s*", str(value).upper())
        if match is None:
            if str(value).isdigit():
                self.fail(f"{value!r} needs a unit, such as {value}GB", param, ctx)
            self.fail(f"{value!r} is not a size such as 5GB or 500MB", param, ctx)
        number, letter, is_binary = match.groups(default="")
        unit = (1024 if is_binary else 1000) ** "BKMGT".index(letter or "B")
        size = int(float(number) * unit)
        if size <= 0:
            self.fail("a size must be positive", param, ctx)
        return size


class Place(click.Path):
    """Reads a path, or the name of a model on the Hub, and passes it on unchanged.

    A shell completes it as a path.
    """

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the value. Refuses an empty one.

        An unset variable of a shell leaves an empty value. As a path it would be the current
        folder, which --overwrite clears.
        """
        if not value:
            self.fail("the path is empty; perhaps a shell variable is not set", param, ctx)
        return str(value)


class Dtype(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2
    """Reads a dtype by its name or its short name: bf16, fp16 or fp32."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the full name."""
        return super().convert(_SHORT_DTYPES.get(value, value), param, ctx)


class GroupedOption(click.Option):
    """Is an option that --help shows in a group."""

    def __init__(self, *names: Any, group: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.group = group


def options_from(kind: type[Any]) -> Decorator:
    """Declares the options of a command by the fields of its class of options."""

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        for one in reversed(options_of(kind)):
            if not one.in_python:
                name, attributes = _attributes(one)
                command = click.option(name, cls=GroupedOption, **attributes)(command)
        return command

    return declare


def _attributes(option: Option) -> tuple[str, dict[str, Any]]:
    """Returns an option as it is typed, and what click is to know of it."""
    name = typed(option.name)
    default = option.default
    help = option.help
    attributes: dict[str, Any] = {"group": option.group, "metavar": option.metavar}
    if option.kinds == (bool,) and default is None:
        name = f"{name}/--no-{name[2:]}"
        attributes["default"] = None
    elif option.kinds == (bool,):
        attributes["is_flag"] = True
    elif option.holds_names:
        attributes["multiple"] = True
        help += " May be given again."
    else:
        attributes["type"], metavar = _type_of(option)
        attributes["metavar"] = option.metavar or metavar
        attributes["required"] = default is MISSING
        if default is not MISSING and default is not None:
            attributes["default"] = default
            attributes["show_default"] = not option.unset
    return name, {**attributes, "help": help}


def _type_of(option: Option) -> tuple[Any, str | None]:
    """Returns click's type of an option that has one value, and what stands for that in --help."""
    kind = option.kinds[0]
    choices = get_args(kind)
    if option.is_size:
        return Size(), None
    if {*DTYPES} <= {*choices}:
        return Dtype(choices), "DTYPE"
    if choices and isinstance(choices[0], str):
        return click.Choice(choices), None
    if choices or kind is int:
        return int, "N"
    return (Place() if Path in option.kinds else kind), None


def _shown(*names: str, **attributes: Any) -> Decorator:
    """Declares an option that says what a command shows, which only the command line has."""
    return click.option(*names, cls=GroupedOption, group="What is shown", **attributes)


report_option = _shown(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page to look at, in HTML, to this file.",
)
dry_run_option = _shown(
    "--dry-run", is_flag=True, help="Show what would become of SRC, and write nothing."
)
json_option = _shown(
    "--json", "as_json", is_flag=True, help="Print the result as JSON (docs/options.md)."
)
quiet_option = _shown(
    "-q", "--quiet", is_flag=True, help="Show no progress, and of the result only the exit code."
)
verbose_option = _shown(
    "-v",
    "--verbose",
    is_flag=True,
    callback=show_log,
    help="Say more: what is done and how long it takes, on stderr.",
)


class Command(click.Command):
    """Is a command whose --help shows options in groups."""

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
    members: dict[str, list[click.Option]] = {group: [] for group in GROUPS}
    for parameter in command.get_params(ctx):
        if isinstance(parameter, GroupedOption):
            members[parameter.group].append(parameter)
        elif isinstance(parameter, click.Option):
            members["What is shown"].append(parameter)  # --help, which click adds by itself
    for group, options in members.items():
        if options:
            yield group, options


def examples(*lines: str) -> str:
    """Returns the end of a help text: command lines, to which this adds the program's name.

    A remark stands behind a line as a comment of the shell, so that a line may be copied whole.
    """
    text = "\b\nExamples:"  # \b keeps click from joining the lines
    for line in lines:
        text += f"\n  nf4conv {line}"
    return text
