"""`nf4conv evaluate`: compares the predictions of two models."""

import sys
from typing import Any

import click

import nf4conv
from nf4conv.cli.chosen import check_source_options, chosen, given_to
from nf4conv.cli.display import Display, silence_libraries, terminal_width
from nf4conv.cli.help import Command, examples
from nf4conv.cli.options import json_option, quiet_option, verbose_log_option
from nf4conv.cli.parameters import Place, options_from
from nf4conv.options import EvaluateOptions
from nf4conv.report.text.progress_bar import Ticking


@click.command(
    cls=Command,
    epilog=examples(
        "evaluate ./my-model-nf4 --source ./my-model",
        "evaluate ./model-nf4 ./searched --source ./model",
    ),
)
@click.argument("outs", metavar="OUT...", type=Place("dir"), nargs=-1, required=True)
@options_from(EvaluateOptions)
@json_option
@quiet_option("Show no progress and no table: the exit code tells the result.")
@verbose_log_option
def evaluate(outs: tuple[str, ...], **values: Any) -> None:
    """Compare what the models OUT and SRC predict on the same text.

    With several OUTs, nf4conv shows them side by side: how far each is from SRC, and its size.
    All may be on the Hub; nf4conv takes OUT from its main branch. Needs pip install
    'nf4conv[evaluate]'. Exit codes: 0 done, 1 past --max-kl, 2 nf4conv cannot use a model or the
    tokens.
    """
    from tqdm import tqdm  # this import takes a moment, for which --help must not wait

    from nf4conv.report.text.evaluations import evaluation_lines  # importing it holds up --help

    display = chosen(Display, values)
    given = given_to(EvaluateOptions, values)
    options = EvaluateOptions(**given)
    check_source_options(options, str(options.source))
    hide_bar = None  # tqdm then hides the bar if stderr is not a terminal
    if display.quiet:
        silence_libraries()
        hide_bar = True
    bar = tqdm(
        desc="evaluating",
        total=1,
        bar_format="{l_bar}{bar}| {elapsed}<{remaining}",
        leave=False,
        disable=hide_bar,
    )
    with bar, Ticking(bar, "evaluating"):
        found = nf4conv.evaluate(outs, **given, progress=bar.update)
    result = found.evaluations[0] if len(outs) == 1 else found
    display.show(result, evaluation_lines(found, terminal_width()))
    sys.exit(0 if found.passed else 1)
