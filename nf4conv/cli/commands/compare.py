"""`nf4conv compare`: compares two checkpoints."""

import sys
from typing import Any

import click

import nf4conv
from nf4conv.cli.chosen import check_source_options, chosen
from nf4conv.cli.display import Display, silence_libraries, terminal_width
from nf4conv.cli.help import Command, examples
from nf4conv.cli.options import (
    exclude_option,
    include_option,
    json_options,
    machine_options,
    quiet_option,
    repository_options,
    tolerance_option,
    verbose_log_option,
)
from nf4conv.cli.parameters import Place
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
@include_option("Compare only tensors whose names match. May be given again.")
@exclude_option("Leave out tensors whose names match. May be given again.")
@tolerance_option("Let no tensor have a larger relative error.  [default: require equal bytes]")
@repository_options
@machine_options
@json_options
@quiet_option("Show no progress and no tables: the exit code tells the result.")
@verbose_log_option
def compare(a: str, b: str, **values: Any) -> None:
    """Compare the tensors of the checkpoints A and B.

    A and B are folders, weight files, or models on the Hub, in any format. Exit codes: 0 all bytes
    are equal, or no tensor differs by more than the tolerance; 1 tensors differ; 2 bad input.
    """
    from nf4conv.report.text.checks import comparison_lines  # importing it holds up --help

    display = chosen(Display, values)
    run = chosen(nf4conv.RunOptions, values)
    options = chosen(nf4conv.CompareOptions, values)
    where = chosen(nf4conv.SourceOptions, values)
    check_source_options(where, a, b)
    if display.quiet:
        silence_libraries()
    plan = nf4conv.plan_comparison(a, b, options, where)
    display.tell_notes(plan.notes)
    with progress("comparing", plan.bytes_to_read, hidden=display.quiet) as advance:
        found = nf4conv.execute_comparison(plan, run, advance)
    display.show(found, comparison_lines(found, terminal_width()))
    sys.exit(0 if found.passed else 1)
