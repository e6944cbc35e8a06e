"""`nf4conv finish`: completes an output folder that several runs have filled."""

from typing import Any

import click

import nf4conv
from nf4conv.cli.chosen import chosen
from nf4conv.cli.display import Display
from nf4conv.cli.help import Command, examples
from nf4conv.cli.options import json_option, verbose_log_option
from nf4conv.cli.parameters import Place


@click.command(
    cls=Command,
    epilog=examples("finish ./shared/out  # when all parts are there"),
)
@click.argument("out", metavar="OUT", type=Place("dir"))
@json_option
@verbose_log_option
def finish(out: str, **values: Any) -> None:
    """Make a checkpoint of OUT, which runs with --part have filled.

    OUT is a folder. nf4conv names every missing or damaged file, and the part that makes it. It
    does not need the source, and may be repeated.
    """
    from nf4conv.report.text.runs import finish_lines  # importing it holds up --help

    display = chosen(Display, values)
    found = nf4conv.finish_checkpoint(out)
    display.show(found, finish_lines(found))
