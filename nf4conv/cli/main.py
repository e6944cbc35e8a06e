"""Defines the program `nf4conv`: each command calls one function and prints what it returned."""

import io
import sys
from pathlib import Path
from typing import Any

import click

import nf4conv
from nf4conv.cli.parameters import (
    Command,
    Place,
    dry_run_option,
    examples,
    json_option,
    options_from,
    quiet_option,
    report_option,
    verbose_option,
)
from nf4conv.cli.running import (
    CommandGroup,
    Display,
    begin,
    raise_terminated,
    silence_libraries,
)
from nf4conv.options import (
    DequantizeOptions,
    EvaluateOptions,
    InspectOptions,
    QuantizeOptions,
    VerifyOptions,
)
from nf4conv.system.signals import handle_stop


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples(
        "inspect ./Llama-3.1-8B-nf4",
        "quantize ./Llama-3.1-8B ./Llama-3.1-8B-nf4",
        "verify ./Llama-3.1-8B-nf4 --source ./Llama-3.1-8B",
        "dequantize ./Llama-3.1-8B-nf4 ./Llama-3.1-8B-again",
    ),
)
@click.version_option(nf4conv.__version__, "-V", "--version", message="nf4conv %(version)s")
def main() -> None:
    """Decode any released 4- and 8-bit checkpoint to bfloat16, streaming and bit-exact; pack any
    checkpoint to bitsandbytes NF4 or FP4.

    nf4conv needs little memory and no GPU. It writes the same bytes as the formats' own libraries,
    and as bitsandbytes' CUDA kernels.
    """
    # __main__.py has set a handler already; other programs that call this function have not.
    handle_stop(raise_terminated)
    # Where stdout takes only ASCII, an arrow is printed as \u2192 and does not fail the run.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@main.command(
    cls=Command,
    epilog=examples(
        "inspect ./Llama-3.1-8B-nf4",
        "inspect unsloth/Llama-3.2-1B-bnb-4bit  # reads headers only",
    ),
)
@click.argument("path", metavar="PATH|REPO", type=Place())
@options_from(InspectOptions)
@json_option
@verbose_option
def inspect(path: str, **values: Any) -> None:
    """Show what a checkpoint holds, from its headers.

    Lists formats, sizes, bits per parameter, and what is unusual. PATH is a folder or a weight
    file. REPO is a model on the Hugging Face Hub; nf4conv does not download its weights.
    """
    display, given = begin(InspectOptions, values, path)
    silence_libraries()  # what is downloaded here is too small for progress bars
    found = nf4conv.inspect(path, **given)
    display.show(found)


def _convert(kind: type[Any], source: str, out: str, values: dict[str, Any]) -> None:
    """Runs `quantize` or `dequantize`, or shows what it would do."""
    display, given = begin(kind, values, source)
    if display.dry_run:
        from nf4conv.commands.writing import dry_run  # importing it holds up --help

        display.show(dry_run(source, kind(**given)))
        return
    with display.progress() as progress:
        report = getattr(nf4conv, kind.command)(source, out, **given, progress=progress)
    display.show(report)


@main.command(
    cls=Command,
    epilog=examples(
        "quantize ./Llama-3.1-8B ./Llama-3.1-8B-nf4",
        "quantize ./model ./out --quant-type fp4 --dry-run",
        "quantize ./my-model ./out --verify --push-to-hub me/my-model-nf4",
        "quantize ./DeepSeek-V3 ./shared/out --part 2/8  # 1/8, … elsewhere",
    ),
)
@click.argument("source", metavar="SRC", type=Place())
@click.argument("out", metavar="OUT", type=Place(file_okay=False))
@options_from(QuantizeOptions)
@dry_run_option
@json_option
@quiet_option
@verbose_option
def quantize(source: str, out: str, **values: Any) -> None:
    """Quantize the checkpoint SRC into the folder OUT.

    SRC is a folder, a .safetensors or .gguf file, a torch pickle, or a model on the Hugging Face
    Hub. nf4conv decodes what is quantized by another method (docs/sources.md), and writes what is
    in 4 bits of bitsandbytes anew: weights in the format asked for, by default their own, stay bit
    for bit. In a diffusers pipeline, --include 'transformer/*' chooses submodels.
    """
    _convert(QuantizeOptions, source, out, values)


@main.command(
    cls=Command,
    epilog=examples(
        "verify ./Llama-3.1-8B-nf4",
        "verify ./Llama-3.1-8B-nf4 --source ./Llama-3.1-8B --report out.html",
        "verify ./Llama-3.1-8B-again --source ./Llama-3.1-8B-Q4_K_M.gguf",
    ),
)
@click.argument("path", metavar="PATH", type=Place())
@options_from(VerifyOptions)
@report_option
@json_option
@quiet_option
@verbose_option
def verify(path: str, report: Path | None, **values: Any) -> None:
    """Verify the checkpoint PATH, in 4 bits or decoded.

    PATH is a folder or a .safetensors file, made by any tool. If it was decoded, SRC is decoded
    again, and every bit must be the same. Exit codes: 0 everything is right, 1 something is wrong,
    2 nf4conv could not verify it.
    """
    display, given = begin(VerifyOptions, values, values["source"])
    with display.progress() as progress:
        found = nf4conv.verify(path, **given, progress=progress)
    if report is not None:
        nf4conv.write_page(found, report)
    display.show(found)
    sys.exit(found.exit_code)


@main.command(
    cls=Command,
    epilog=examples(
        "evaluate ./my-model-nf4 --source ./my-model",
        "evaluate ./model-nf4 ./searched --source ./model",
    ),
)
@click.argument("outs", metavar="OUT...", type=Place(file_okay=False), nargs=-1, required=True)
@options_from(EvaluateOptions)
@json_option
@quiet_option
@verbose_option
def evaluate(outs: tuple[str, ...], **values: Any) -> None:
    """Compare what the models OUT and SRC predict on the same text.

    With several OUTs, nf4conv shows them side by side: how far each is from SRC, and its size.
    All may be on the Hub; nf4conv takes OUT from its main branch. Needs pip install
    'nf4conv[evaluate]'. Exit codes: 0 done, 1 past --max-kl, 2 nf4conv cannot use a model or the
    tokens.
    """
    display, given = begin(EvaluateOptions, values, values["source"])
    with display.progress() as progress:
        found = nf4conv.evaluate(outs, **given, progress=progress)
    display.show(found)
    sys.exit(0 if found.passed else 1)


@main.command(
    cls=Command,
    epilog=examples(
        "dequantize moonshotai/Kimi-K2.6 ./Kimi-K2.6-bf16 --stream",
        "dequantize ./Llama-3.1-8B-nf4 ./Llama-3.1-8B-again --dtype fp16",
        "dequantize ./my-model-nf4 ./merged --lora ./my-adapter --dtype fp16",
        "dequantize deepseek-ai/DeepSeek-V4-Flash ./v4-fp8 --dtype fp8",
    ),
)
@click.argument("source", metavar="SRC", type=Place())
@click.argument("out", metavar="OUT", type=Place(file_okay=False))
@options_from(DequantizeOptions)
@dry_run_option
@json_option
@quiet_option
@verbose_option
def dequantize(source: str, out: str, **values: Any) -> None:
    """Decode the quantized checkpoint SRC into the folder OUT.

    Decodes any released 4- and 8-bit checkpoint to bfloat16, streaming and bit-exact: FP8, MXFP4,
    NVFP4, INT4, GPTQ, AWQ, AutoRound, torchao, GGUF, bitsandbytes. docs/sources.md has a recipe for
    each. SRC is a folder, a .safetensors or .gguf file, or a model on the Hugging Face Hub. OUT
    loads as any 16-bit model, and llama.cpp converts it to GGUF.
    """
    _convert(DequantizeOptions, source, out, values)


@main.command(cls=Command, epilog=examples("env", "env --json"))
@json_option
def env(**values: Any) -> None:
    """Show versions, and what nf4conv would compute with.

    A bug report should contain this.
    """
    found = nf4conv.environment()
    Display(**values).show(found)
