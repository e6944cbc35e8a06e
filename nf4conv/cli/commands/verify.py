"""`nf4conv verify`: verifies a 4-bit checkpoint, or a decoded one."""

import sys
from pathlib import Path
from typing import Any

import click

import nf4conv
from nf4conv.cli.chosen import check_lora_experts, check_source_options, chosen
from nf4conv.cli.display import Display, silence_libraries, terminal_width
from nf4conv.cli.help import Command, Group, examples, option
from nf4conv.cli.options import (
    FILE,
    json_options,
    lora_experts_option,
    lora_option,
    machine_options,
    quiet_option,
    repository_options,
    source_option,
    tolerance_option,
    verbose_option,
)
from nf4conv.cli.parameters import Place
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
@lora_option(
    "Merge this adapter into SRC before the comparison. May be given again.", group=Group.CHECKS
)
@lora_experts_option(group=Group.CHECKS)
@source_option("Compare every value with this checkpoint, from which PATH was made.")
@tolerance_option(
    "With --source, let no weight in 4 bits have a larger relative error; one that dequantize "
    "decoded must be equal.  [default: 0.112 for NF4 in blocks of 64]"
)
@option(
    "--exact",
    group=Group.CHECKS,
    is_flag=True,
    help="With --source, require the bytes that quantizing SRC gives, in config and files too.",
)
@repository_options
@machine_options
@json_options
@option(
    "--report",
    group=Group.DISPLAY,
    type=FILE,
    help="Write a page to look at, in HTML, to this file.",
)
@quiet_option("Show no progress and no tables: the exit code tells the result.")
@verbose_option("List every check, and say on stderr what is done and how long it takes.")
def verify(path: str, source: str | None, report: Path | None, **values: Any) -> None:
    """Verify the checkpoint PATH, in 4 bits or decoded.

    PATH is a folder or a .safetensors file, made by any tool. If it was decoded, SRC is decoded
    again, and every bit must be the same. Exit codes: 0 everything is right, 1 something is wrong,
    2 nf4conv could not verify it.
    """
    from nf4conv.report.text.checks import verification_lines  # importing it holds up --help

    display = chosen(Display, values)
    run = chosen(nf4conv.RunOptions, values)
    options = chosen(nf4conv.VerifyOptions, values)
    where = chosen(nf4conv.SourceOptions, values)
    check_lora_experts(options.lora, options.lora_experts)
    if source is None:
        check_source_options(where)
    else:
        check_source_options(where, source)
    if display.quiet:
        silence_libraries()
    plan = nf4conv.plan_verification(path, source, options, where)
    with progress("verifying", plan.bytes_to_read, hidden=display.quiet) as advance:
        found = nf4conv.execute_verification(plan, run, advance)
    if report is not None:
        nf4conv.write_page(found, report)
    display.show(found, verification_lines(found, terminal_width(), every=display.verbose))
    sys.exit(0 if found.passed else 1)
