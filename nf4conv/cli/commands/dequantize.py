"""`nf4conv dequantize`: decodes a quantized checkpoint."""

from typing import Any

import click

import nf4conv
from nf4conv.cli.chosen import check_source_options, chosen
from nf4conv.cli.display import Display, silence_libraries, terminal_width
from nf4conv.cli.help import Command, examples
from nf4conv.cli.options import writing_display_options
from nf4conv.cli.parameters import Place, options_from
from nf4conv.declaring import narrowed
from nf4conv.options import RunOptions, SourceOptions
from nf4conv.report.text.progress_bar import progress


@click.command(
    cls=Command,
    epilog=examples(
        "dequantize ./Llama-3.1-8B-nf4 ./Llama-3.1-8B-again",
        "dequantize ./model-4bit ./out --dtype fp16",
        "dequantize ./my-model-nf4 ./merged --lora ./my-adapter --dtype fp16",
        "dequantize ./model-4bit ./out --include '*.layers.0.*'  # only these",
    ),
)
@click.argument("source", metavar="SRC", type=Place("file"))
@click.argument("out", metavar="OUT", type=Place("dir"))
@options_from(nf4conv.DequantizeOptions)
@writing_display_options
def dequantize(source: str, out: str, **values: Any) -> None:
    """Decode the quantized checkpoint SRC into the folder OUT.

    SRC is a folder, a .safetensors or .gguf file, or a model on the Hugging Face Hub. It is
    quantized by bitsandbytes, GGUF, GPTQ, AWQ, AutoRound, torchao, Quark or
    compressed-tensors, or in FP8 or FP4. OUT loads as any 16-bit model, and llama.cpp converts it
    to GGUF.
    """
    from nf4conv.report.text.contents import plan_lines  # importing it holds up --help
    from nf4conv.report.text.runs import dequantization_lines  # importing it holds up --help

    display = chosen(Display, values)
    options = chosen(nf4conv.DequantizeOptions, values)
    run = narrowed(options, RunOptions)
    check_source_options(options, source)
    if display.quiet:
        silence_libraries()
    whole = nf4conv.plan_dequantization(source, options, narrowed(options, SourceOptions))
    plan = nf4conv.plan_part(whole, run)
    if display.dry_run:
        described = nf4conv.describe_plan(plan)
        display.show(described, plan_lines(described, terminal_width()))
        return
    display.tell_notes(plan.notes)
    with progress("decoding", plan.totals().bytes_before, hidden=display.quiet) as advance:
        report = nf4conv.execute_dequantization(plan, out, run, advance)
    display.show(report, dequantization_lines(report))
