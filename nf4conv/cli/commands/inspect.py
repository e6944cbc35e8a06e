"""`nf4conv inspect`: shows what a checkpoint holds."""

from typing import Any

import click

import nf4conv
from nf4conv.cli.chosen import check_source_options, chosen
from nf4conv.cli.display import Display, silence_libraries, terminal_width
from nf4conv.cli.help import Command, examples
from nf4conv.cli.options import json_option, verbose_log_option
from nf4conv.cli.parameters import Place, options_from
from nf4conv.declaring import narrowed
from nf4conv.options import InspectOptions, SourceOptions


@click.command(
    cls=Command,
    epilog=examples(
        "inspect ./Llama-3.1-8B-nf4",
        "inspect unsloth/Llama-3.2-1B-bnb-4bit  # reads headers only",
    ),
)
@click.argument("path", metavar="PATH|REPO", type=Place("file"))
@options_from(InspectOptions)
@json_option
@verbose_log_option
def inspect(path: str, **values: Any) -> None:
    """Show what a checkpoint holds, from its headers.

    Lists formats, sizes, bits per parameter, and what is unusual. PATH is a folder or a weight
    file. REPO is a model on the Hugging Face Hub; nf4conv does not download its weights.
    """
    from nf4conv.report.text.contents import inspection_lines  # importing it holds up --help

    display = chosen(Display, values)
    options = chosen(InspectOptions, values)
    check_source_options(options, path)
    silence_libraries()  # what is downloaded here is too small for progress bars
    found = nf4conv.inspect_checkpoint(path, narrowed(options, SourceOptions))
    display.show(found, inspection_lines(found, terminal_width()))
