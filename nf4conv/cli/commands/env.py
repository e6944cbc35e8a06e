"""`nf4conv env`: shows versions and the compute engine."""

from typing import Any

import click

import nf4conv
from nf4conv.cli.chosen import chosen
from nf4conv.cli.display import Display
from nf4conv.cli.help import Command, examples
from nf4conv.cli.options import json_option


@click.command(cls=Command, epilog=examples("env", "env --json"))
@json_option
def env(**values: Any) -> None:
    """Show versions, and what nf4conv would compute with.

    A bug report should contain this.
    """
    from nf4conv.report.text.contents import environment_lines  # importing it holds up --help

    display = chosen(Display, values)
    found = nf4conv.environment()
    display.show(found, environment_lines(found))
