"""Defines the program `nf4conv`: its commands in the order of use, and how it handles signals."""

import io
import sys

import click

import nf4conv
from nf4conv.cli.commands.dequantize import dequantize
from nf4conv.cli.commands.env import env
from nf4conv.cli.commands.evaluate import evaluate
from nf4conv.cli.commands.finish import finish
from nf4conv.cli.commands.inspect import inspect
from nf4conv.cli.commands.quantize import quantize
from nf4conv.cli.commands.verify import verify
from nf4conv.cli.errors import CommandGroup, raise_terminated
from nf4conv.cli.help import examples
from nf4conv.system.signals import handle_stop


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples(
        "inspect ./Llama-3.1-8B-nf4",
        "quantize ./Llama-3.1-8B ./Llama-3.1-8B-nf4",
        "verify ./Llama-3.1-8B-nf4",
        "dequantize ./Llama-3.1-8B-nf4 ./Llama-3.1-8B-again",
    ),
)
@click.version_option(nf4conv.__version__, "-V", "--version", message="nf4conv %(version)s")
def main() -> None:
    """Turn Hugging Face checkpoints into 4-bit bitsandbytes checkpoints (NF4 or FP4), and back.

    nf4conv streams the weights and needs little memory. On a GPU or a CPU, it writes the same bytes
    as bitsandbytes' CUDA kernels.
    """
    # __main__.py has set a handler already; other programs that call this function have not.
    handle_stop(raise_terminated)
    # Where stdout takes only ASCII, an arrow is printed as \u2192 and does not fail the run.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


for command in (
    inspect,
    quantize,
    verify,
    evaluate,
    dequantize,
    finish,
    env,
):
    main.add_command(command)
