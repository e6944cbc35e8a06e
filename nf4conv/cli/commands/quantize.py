"""`nf4conv quantize`: quantizes a checkpoint."""

from typing import Any

import click

import nf4conv
from nf4conv.cli.chosen import check_source_options, chosen
from nf4conv.cli.display import Display, silence_libraries, terminal_width
from nf4conv.cli.help import Command, examples
from nf4conv.cli.options import writing_display_options
from nf4conv.cli.parameters import Place, options_from
from nf4conv.declaring import narrowed
from nf4conv.options import PushOptions, RunOptions, SourceOptions
from nf4conv.report.text.progress_bar import progress


@click.command(
    cls=Command,
    epilog=examples(
        "quantize ./Llama-3.1-8B ./Llama-3.1-8B-nf4",
        "quantize ./model ./out --quant-type fp4 --dry-run",
        "quantize ./my-model ./out --verify --push-to-hub me/my-model-nf4",
        "quantize meta-llama/Llama-3.1-70B ./out --stream  # keeps no copy",
        "quantize ./DeepSeek-V3 ./shared/out --part 2/8  # 1/8, … elsewhere",
    ),
)
@click.argument("source", metavar="SRC", type=Place("file"))
@click.argument("out", metavar="OUT", type=Place("dir"))
@options_from(nf4conv.QuantizeOptions)
@writing_display_options
def quantize(source: str, out: str, **values: Any) -> None:
    """Quantize the checkpoint SRC into the folder OUT.

    SRC is a folder, a .safetensors or .gguf file, a torch pickle, or a model on the Hugging Face
    Hub. If SRC is quantized by another method, nf4conv decodes it on the way: GGUF, GPTQ, AWQ,
    AutoRound, torchao, Quark, compressed-tensors, FP8, FP4 and 8-bit weights. If SRC is in 4 bits
    of bitsandbytes, nf4conv writes it anew for current loaders: weights in the format asked for, by
    default their own, stay bit for bit. In a diffusers pipeline, nf4conv packs denoisers and text
    encoders; --include 'transformer/*' chooses submodels.
    """
    from nf4conv.report.text.contents import plan_lines  # importing it holds up --help
    from nf4conv.report.text.runs import quantization_lines  # importing it holds up --help

    display = chosen(Display, values)
    options = chosen(nf4conv.QuantizeOptions, values)
    run = narrowed(options, RunOptions)
    where = narrowed(options, SourceOptions)
    push = narrowed(options, PushOptions)
    check_source_options(options, source)
    if display.quiet:
        silence_libraries()
    whole = nf4conv.plan_quantization(source, options, where, push)
    plan = nf4conv.plan_part(whole, run)
    if display.dry_run:
        described = nf4conv.describe_plan(plan)
        display.show(described, plan_lines(described, terminal_width()))
        return
    display.tell_notes(plan.notes)
    totals = plan.totals()
    work = totals.bytes_before
    verb = "quantizing"
    if run.verify:
        work += totals.bytes_before + totals.bytes_after
        verb = "quantizing and verifying"
    last = "finishing"
    if push.push_to_hub is not None:
        last = f"uploading to {push.push_to_hub}"
    calibration = whole.calibration
    with progress(verb, work, hidden=display.quiet, last=last, calibration=calibration) as advance:
        report = nf4conv.execute_quantization(plan, out, run, advance, push)
    display.show(report, quantization_lines(report))
