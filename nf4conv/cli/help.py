"""Shows the options of a command in groups, and examples below them."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import click

from nf4conv.declaring import Group


class GroupedOption(click.Option):
    """Is an option that --help shows in a group."""

    def __init__(self, *names: Any, group: Group, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.group = group


def option(
    *names: str, group: Group, help: str, **attributes: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declares an option of a command, as a decorator.

    Args:
        names: its spellings, and the name of its parameter if that is another.
        group: the group in which --help shows it. A group shows its options in the order in which
            they are declared.
        help: a sentence. A default that click cannot show comes behind it in brackets.
        attributes: what else `click.option` takes.
    """
    return click.option(*names, cls=GroupedOption, group=group, help=help, **attributes)


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
