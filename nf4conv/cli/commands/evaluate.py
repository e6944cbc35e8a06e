"""`nf4conv evaluate`: compares the predictions of two models."""

import sys
from typing import Any

import click

import nf4conv
from nf4conv.cli.chosen import check_source_options, chosen
from nf4conv.cli.display import Display, silence_libraries, terminal_width
from nf4conv.cli.help import Command, Group, examples, option
from nf4conv.cli.options import (
    FILE,
    device_option,
    json_options,
    model_options,
    quiet_option,
    source_option,
    verbose_log_option,
)
from nf4conv.cli.parameters import NonNegative, Place, WholeNumber
from nf4conv.report.text.progress_bar import Ticking


@click.command(
    cls=Command,
    epilog=examples(
        "evaluate ./my-model-nf4 --source ./my-model",
        "evaluate ./model-nf4 ./searched --source ./model --plot plot.svg",
    ),
)
@click.argument("outs", metavar="OUT...", type=Place("dir"), nargs=-1, required=True)
@source_option("Compare OUT with this model, from which it was made.", required=True)
@option(
    "--text",
    group=Group.CHECKS,
    type=FILE,
    help="Let all models read this text, or these token ids (.npy).  "
    "[default: Python's own reference]",
)
@option(
    "--tokens",
    group=Group.CHECKS,
    type=WholeNumber(2),
    metavar="N",
    help="Read this number of tokens.  [default: 16384, or fewer, to write no more than 2 GiB]",
)
@option(
    "--max-kl",
    group=Group.CHECKS,
    type=NonNegative(),
    metavar="NATS",
    help="Let the mean divergence be no larger, in nats.",
)
@option(
    "--card",
    group=Group.CHECKS,
    is_flag=True,
    help="Write the figures into OUT/README.md, and update its line in SHA256SUMS. With several "
    "OUTs also a plot beside it.",
)
@option(
    "--plot",
    group=Group.CHECKS,
    type=FILE,
    help="Draw divergence against bits per weight into this file, as SVG.",
)
@model_options
@device_option("Compute on this device: auto, cpu, cuda or cuda:N.")
@json_options
@quiet_option("Show no progress and no table: the exit code tells the result.")
@verbose_log_option
def evaluate(outs: tuple[str, ...], source: str, device: str, **values: Any) -> None:
    """Compare what the models OUT and SRC predict on the same text.

    With several OUTs, nf4conv shows them side by side: how far each is from SRC, and its size.
    All may be on the Hub; nf4conv takes OUT from its main branch. Needs pip install
    'nf4conv[evaluate]'. Exit codes: 0 done, 1 past --max-kl, 2 nf4conv cannot use a model or the
    tokens.
    """
    from tqdm import tqdm  # this import takes a moment, for which --help must not wait

    from nf4conv.report.text.evaluations import evaluation_lines  # importing it holds up --help

    display = chosen(Display, values)
    options = chosen(nf4conv.EvaluateOptions, values)
    where = chosen(nf4conv.SourceOptions, values)
    check_source_options(where, source)
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
        found = nf4conv.evaluate_checkpoints(outs, source, options, device, where, bar.update)
    result = found.evaluations[0] if len(outs) == 1 else found
    display.show(result, evaluation_lines(found, terminal_width()))
    sys.exit(0 if found.passed else 1)
