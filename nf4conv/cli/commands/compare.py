"""`nf4conv compare`: compares two checkpoints."""

import sys
from typing import Any

import click

import nf4conv
from nf4conv.cli.chosen import check_source_options, chosen
from nf4conv.cli.display import Display, silence_libraries, terminal_width
from nf4conv.cli.help import Command, examples
from nf4conv.cli.options import json_option, quiet_option, verbose_log_option
from nf4conv.cli.parameters import Place, options_from
from nf4conv.declaring import narrowed
from nf4conv.options import MachineOptions, SourceOptions
from nf4conv.report.text.progress_bar import progress


@click.command(
    cls=Command,
    epilog=examples(
        "compare ./ours-nf4 ./theirs-nf4  # every byte",
        "compare ./model-nf4 ./model-again --tolerance 0  # values",
    ),
)
@click.argument("a", metavar="A", type=Place("file"))
@click.argument("b", metavar="B", type=Place("file"))
@options_from(nf4conv.CompareOptions)
@json_option
@quiet_option("Show no progress and no tables: the exit code tells the result.")
@verbose_log_option
def compare(a: str, b: str, **values: Any) -> None:
    """Compare the tensors of the checkpoints A and B.

    A and B are folders, weight files, or models on the Hub, in any format. Exit codes: 0 all bytes
    are equal, or no tensor differs by more than the tolerance; 1 tensors differ; 2 bad input.
    """
    from nf4conv.report.text.checks import comparison_lines  # importing it holds up --help

    display = chosen(Display, values)
    options = chosen(nf4conv.CompareOptions, values)
    check_source_options(options, a, b)
    if display.quiet:
        silence_libraries()
    plan = nf4conv.plan_comparison(a, b, options, narrowed(options, SourceOptions))
    display.tell_notes(plan.notes)
    run = narrowed(options, MachineOptions)
    with progress("comparing", plan.bytes_to_read, hidden=display.quiet) as advance:
        found = nf4conv.execute_comparison(plan, run, advance)
    display.show(found, comparison_lines(found, terminal_width()))
    sys.exit(0 if found.passed else 1)
