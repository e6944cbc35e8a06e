"""`nf4conv verify`: verifies a 4-bit checkpoint, or a decoded one."""

import sys
from pathlib import Path
from typing import Any

import click

import nf4conv
from nf4conv.cli.chosen import check_source_options, chosen
from nf4conv.cli.display import Display, silence_libraries, terminal_width
from nf4conv.cli.help import Command, examples, option
from nf4conv.cli.options import json_option, quiet_option, verbose_option
from nf4conv.cli.parameters import Place, options_from
from nf4conv.declaring import Group, narrowed
from nf4conv.options import MachineOptions, SourceOptions
from nf4conv.report.text.progress_bar import progress


@click.command(
    cls=Command,
    epilog=examples(
        "verify ./Llama-3.1-8B-nf4",
        "verify ./Llama-3.1-8B-nf4 --source ./Llama-3.1-8B --report out.html",
        "verify ./Llama-3.1-8B-again --source ./Llama-3.1-8B-Q4_K_M.gguf",
    ),
)
@click.argument("path", metavar="PATH", type=Place("file"))
@options_from(nf4conv.VerifyOptions)
@json_option
@option(
    "--report",
    group=Group.DISPLAY,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page to look at, in HTML, to this file.",
)
@quiet_option("Show no progress and no tables: the exit code tells the result.")
@verbose_option("List every check, and say on stderr what is done and how long it takes.")
def verify(path: str, report: Path | None, **values: Any) -> None:
    """Verify the checkpoint PATH, in 4 bits or decoded.

    PATH is a folder or a .safetensors file, made by any tool. If it was decoded, SRC is decoded
    again, and every bit must be the same. Exit codes: 0 everything is right, 1 something is wrong,
    2 nf4conv could not verify it.
    """
    from nf4conv.report.text.checks import verification_lines  # importing it holds up --help

    display = chosen(Display, values)
    options = chosen(nf4conv.VerifyOptions, values)
    check_source_options(options, *([] if options.source is None else [str(options.source)]))
    if display.quiet:
        silence_libraries()
    where = narrowed(options, SourceOptions)
    run = narrowed(options, MachineOptions)
    plan = nf4conv.plan_verification(path, options.source, options, where)
    with progress("verifying", plan.bytes_to_read, hidden=display.quiet) as advance:
        found = nf4conv.execute_verification(plan, run, advance)
    if report is not None:
        nf4conv.write_page(found, report)
    display.show(found, verification_lines(found, terminal_width(), every=display.verbose))
    sys.exit(found.exit_code)
