"""`nf4conv inspect`: shows what a checkpoint holds."""

from typing import Any

import click

import nf4conv
from nf4conv.cli.chosen import check_source_options, chosen
from nf4conv.cli.display import Display, silence_libraries, terminal_width
from nf4conv.cli.help import Command, examples
from nf4conv.cli.options import all_option, json_options, repository_options, verbose_log_option
from nf4conv.cli.parameters import Place


@click.command(
    cls=Command,
    epilog=examples(
        "inspect ./Llama-3.1-8B-nf4",
        "inspect unsloth/Llama-3.2-1B-bnb-4bit  # reads headers only",
    ),
)
@click.argument("path", metavar="PATH|REPO", type=Place("file"))
@repository_options
@all_option("List every tensor.")
@json_options
@verbose_log_option
def inspect(path: str, **values: Any) -> None:
    """Show what a checkpoint holds, from its headers.

    Lists formats, sizes, bits per parameter, and what is unusual. PATH is a folder or a weight
    file. REPO is a model on the Hugging Face Hub; nf4conv does not download its weights.
    """
    from nf4conv.report.text.contents import inspection_lines  # importing it holds up --help

    display = chosen(Display, values)
    where = chosen(nf4conv.SourceOptions, values)
    check_source_options(where, path)
    silence_libraries()  # what is downloaded here is too small for progress bars
    found = nf4conv.inspect_checkpoint(path, where)
    display.show(found, inspection_lines(found, terminal_width(), every=display.every))
