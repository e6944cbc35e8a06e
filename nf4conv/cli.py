"""The command line: words → options → one function of the public API → what it returned, printed, and an exit code.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 verification failed, 2 usage or bad input.
"""

import dataclasses
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

import nf4conv
from nf4conv.errors import Nf4convError, VerificationError
from nf4conv.options import (
    DTYPES,
    MOE,
    NON_FINITE,
    PLANNERS,
    QUANT_STORAGES,
    QUANT_TYPES,
    CompareOptions,
    DequantizeOptions,
    PushOptions,
    QuantizeOptions,
    RunOptions,
    SourceOptions,
    VerifyOptions,
)
from nf4conv.report.text import comparison_lines, inspection_lines, printable, size, verification_lines

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


class _Size(click.ParamType[int]):
    """A number of bytes, as transformers and huggingface_hub write it: 5GB is 5·10⁹, 5GiB is 5·2³⁰."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(value).upper())
        if match is None or match[2] not in _UNITS:
            self.fail(f"{value!r} is not a size such as 5GB or 500MB", param, ctx)
        size = int(float(match[1]) * _UNITS[match[2]])
        if size <= 0:
            self.fail("a size must be positive", param, ctx)
        return size


class _Place(click.ParamType[str]):
    """A path or a Hub id, as it was given."""

    name = "place"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        # what an unset variable of a shell leaves; as a path it would be the current folder, which --overwrite clears
        if not value:
            self.fail("is empty", param, ctx)
        return str(value)


class _Commands(click.Group):
    """Turns every error into one line and an exit code, whether it is meant for the user or a fault."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except VerificationError as error:
            _fail(str(error), 1)
        except Nf4convError as error:
            _fail(str(error), 2)
        except _Terminated:
            _fail("stopped; the same command resumes", 128 + signal.SIGTERM)
        except KeyboardInterrupt:
            _fail("interrupted; the same command resumes", 128 + signal.SIGINT)
        except BrokenPipeError:
            # the reader of our output has left; nothing is left to be told, not even by the interpreter's exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if os.environ.get("NF4CONV_DEBUG"):
                raise
            _fail(_explained(error, ctx.command_path), 2)


def _explained(error: Exception, command: str) -> str:
    """What to tell of an error that nobody expected."""
    if isinstance(error, OSError):
        return f"{error.filename or command}: {error.strerror or error}"
    if isinstance(error, MemoryError):
        return "out of memory; try fewer --workers, or a smaller --buffer-size"
    found = f"{type(error).__name__}: {error}"
    return f"{found[:300]}: this is a bug of nf4conv, please report it; NF4CONV_DEBUG=1 shows where it is"


class _Terminated(BaseException):
    pass


def _raise_terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise _Terminated


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"{click.style('Error:', fg='red')} {printable(message)}", err=True, color=_color())
    sys.exit(code)


def _color() -> bool | None:
    """Whether to colour stderr; None leaves it to click, which asks whether it is a terminal."""
    return False if os.environ.get("NO_COLOR") else None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(nf4conv.__version__, message="%(version)s")
def main() -> None:
    """Hugging Face checkpoints to 4-bit bitsandbytes NF4/FP4: streamed, bit-exact with bitsandbytes CUDA."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # called by another program than __main__.py
        signal.signal(signal.SIGTERM, _raise_terminated)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an arrow must not fail where only ASCII can be printed


def _options(*decorators: Callable[..., Any]) -> Callable[..., Any]:
    """Several options as one decorator, in the order in which --help shows them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


_repository_options = _options(
    click.option("--revision", help="Branch, tag or commit on the Hub.  [default: main]"),
    click.option("--token", help="For the Hub.  [default: the one that is logged in]"),
    click.option("--cache-dir", type=click.Path(path_type=Path), help="Of downloads.  [default: HF_HUB_CACHE]"),
    click.option("--local-files-only", is_flag=True, help="Take what is cached, and do not ask the Hub."),
    click.option("--subfolder", help="That holds the checkpoint, such as transformer."),
    click.option("--variant", help="Of the weight files, such as fp16."),
)
"""Of every command that reads a checkpoint which may be on the Hub."""

_machine_options = _options(
    click.option("--device", default=RunOptions().device, show_default=True, help="auto, cpu, cuda or cuda:N."),
    click.option(
        "--workers",
        type=click.IntRange(0, 1024),
        default=RunOptions().workers,
        help="Threads; 0 chooses.  [default: 0]",
    ),
    click.option("--buffer-size", type=_Size(), default="64MB", show_default=True, help="Memory for reading."),
)
"""Of every command that reads weights."""

_writing_options = _options(
    click.option("--dry-run", is_flag=True, help="Show what would become of each tensor, and stop."),
    _repository_options,
    click.option("--stream", is_flag=True, help="Fetch weights as they are needed, and keep no copy."),
    _machine_options,
    click.option("--overwrite", is_flag=True, help="Delete what is in OUT, and start anew."),
    click.option("--checksum", is_flag=True, help="Write SHA256SUMS of the output."),
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    click.option("-q", "--quiet", is_flag=True, help="No progress, no summary."),
)
"""The last of every command that writes a checkpoint."""

_judging_options = _options(
    _machine_options,
    click.option("-q", "--quiet", is_flag=True, help="No progress, no tables: the exit code tells."),
    _repository_options,
)
"""The last of every command whose exit code is a verdict."""

_source_and_out = _options(
    click.argument("source", metavar="SRC", type=_Place()), click.argument("out", metavar="OUT", type=_Place())
)
_lora = click.option(
    "--lora",
    multiple=True,
    metavar="ADAPTER",
    help="Merge this adapter of PEFT first: a folder, or a Hub id with or without @revision. Best into the 16-bit "
    "model; into a 4-bit one if it was trained on that. Repeatable.",
)
_json_file = click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write everything found to this file."
)


def _chosen(name: str, kind: click.ParamType[Any] | None, help: str) -> Callable[..., Any]:
    """An option that always has a value, by default that of QuantizeOptions."""
    default = getattr(QuantizeOptions(), name.partition("/")[0].removeprefix("--").replace("-", "_"))
    return click.option(name, type=kind, default=default, show_default=True, help=help)


_QUANTIZE_EXAMPLES = """\b
Examples:
  nf4conv quantize ./Llama-3.1-8B ./Llama-3.1-8B-nf4
  nf4conv quantize ./model ./out --quant-type fp4 --dry-run
  nf4conv quantize meta-llama/Llama-3.1-70B ./out --stream      fetches and drops shard by shard
"""


@main.command(epilog=_QUANTIZE_EXAMPLES)
@_source_and_out
@click.option("--quant-type", type=click.Choice(QUANT_TYPES), help="4-bit data type.  [default: nf4]")
@click.option("--blocksize", type=int, help="Weights that share one scale: 32, 64, … 4096.  [default: 64]")
@click.option("--double-quant/--no-double-quant", default=None, help="Quantize the scales too.  [default: do]")
@click.option(
    "--quant-storage",
    type=click.Choice(QUANT_STORAGES),
    help="Dtype of the packed bytes; floats for FSDP.  [default: uint8]",
)
@click.option(
    "--compute-dtype", type=click.Choice(DTYPES), help="What loaders compute in.  [default: --dtype, but not float32]"
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Of what stays unquantized.  [default: the config's]")
@click.option("--include", multiple=True, metavar="GLOB", help="Pack only tensors that match. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Keep tensors that match. Repeatable.")
@click.option(
    "--skip-modules", multiple=True, metavar="NAME", help="Keep these modules, as llm_int8_skip_modules. Repeatable."
)
@click.option("--quantize-towers", is_flag=True, help="Pack vision and audio towers too.")
@click.option("--moe", type=click.Choice(MOE), help="How experts are stored.  [default: portable]")
@_chosen("--plan-with", click.Choice(PLANNERS), "Who says what is linear.")
@click.option("--max-shard-size", type=_Size(), default="1GB", show_default=True, help="Largest output file.")
@_chosen("--non-finite", click.Choice(NON_FINITE), "Weights with NaN or infinity.")
@_lora
@click.option("--verify", is_flag=True, help="Read back what is written, and compare it with SRC.")
@click.option("--tolerance", type=float, help="Largest relative error with --verify.  [default: docs/verify.md]")
@click.option("--push-to-hub", metavar="REPO", help="Upload the result to this model repository, shard by shard.")
@click.option("--public", is_flag=True, help="Let everybody see that repository.  [default: private]")
@_writing_options
def quantize(source: str, out: str, dry_run: bool, as_json: bool, quiet: bool, **chosen: Any) -> None:
    """Quantize the checkpoint SRC into the folder OUT.

    SRC is a folder, a .safetensors file, a torch pickle, or a model on the Hugging Face Hub. It may be quantized by
    another method: FP8, MXFP4, NVFP4 and 8-bit weights are decoded on the way. A 4-bit SRC is written anew for current
    loaders: weights in the format asked for, by default their own, stay bit for bit. Of a diffusers pipeline, denoisers
    and text encoders are packed; --include 'transformer/*' chooses components.
    """
    kinds = (RunOptions, QuantizeOptions, SourceOptions, PushOptions)
    run, options, where, push = (_split(kind, chosen) for kind in kinds)
    _quieten_downloads(quiet)
    plan = nf4conv.plan_quantization(source, options, where)
    if dry_run:
        totals = plan.totals()
        _print_plan(
            plan,
            (*plan.notes, *nf4conv.second_opinion(plan)),
            as_json,
            f"{totals.packed:,} weights packed, {totals.copied:,} tensors kept, {totals.shards} files: "
            f"{size(totals.bytes_in)} → {size(totals.bytes_out)} "
            f"({totals.compression:.2f}x, {totals.bits_per_parameter:.2f} bits per parameter)",
        )
    else:
        execute = partial(nf4conv.execute_quantization, plan, out, run, push=push)
        _execute(plan, execute, as_json, quiet, _print_report)


_DEQUANTIZE_EXAMPLES = """\b
Examples:
  nf4conv dequantize ./Llama-3.1-8B-nf4 ./Llama-3.1-8B-again
  nf4conv dequantize ./model-4bit ./out --dtype float16
  nf4conv dequantize ./model-4bit ./out --include '*.layers.0.*'      the rest stays in 4 bits
"""


@main.command(epilog=_DEQUANTIZE_EXAMPLES)
@_source_and_out
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the result.  [default: as before it was quantized]")
@click.option("--include", multiple=True, metavar="GLOB", help="Decode only weights that match. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave weights that match in 4 bits. Repeatable.")
@click.option("--max-shard-size", type=_Size(), default="1GB", show_default=True, help="Largest output file.")
@_lora
@_writing_options
def dequantize(source: str, out: str, dry_run: bool, as_json: bool, quiet: bool, **chosen: Any) -> None:
    """Turn the 4-bit checkpoint SRC back into plain safetensors in the folder OUT.

    SRC is any bitsandbytes 4-bit checkpoint, a folder, a .safetensors file, or a model on the Hugging Face Hub. The
    result loads without bitsandbytes.
    """
    run, options, where = (_split(kind, chosen) for kind in (RunOptions, DequantizeOptions, SourceOptions))
    _quieten_downloads(quiet)
    plan = nf4conv.plan_dequantization(source, options, where)
    if dry_run:
        totals = plan.totals()
        _print_plan(
            plan,
            plan.notes,
            as_json,
            f"{totals.decoded:,} weights decoded, {totals.copied:,} tensors copied, {totals.shards} files: "
            f"{size(totals.bytes_in)} → {size(totals.bytes_out)}",
        )
    else:
        execute = partial(nf4conv.execute_dequantization, plan, out, run)
        _execute(plan, execute, as_json, quiet, _print_dequantize_report)


_VERIFY_EXAMPLES = """\b
Examples:
  nf4conv verify ./Llama-3.1-8B-nf4
  nf4conv verify ./Llama-3.1-8B-nf4 --source ./Llama-3.1-8B --report report.html
"""


@main.command(epilog=_VERIFY_EXAMPLES)
@click.argument("path", metavar="PATH")
@click.option("--source", metavar="SRC", help="What it was made from: every value is compared with it.")
@click.option("--tolerance", type=float, help="Largest relative error of a weight.  [default: docs/verify.md]")
@click.option("--exact", is_flag=True, help="Require the bytes that quantizing SRC gives.")
@click.option("--lora", multiple=True, metavar="ADAPTER", help="That was merged into SRC. Repeatable.")
@_json_file
@click.option("--report", type=click.Path(path_type=Path), help="Write a page to look at to this file.")
@_judging_options
def verify(
    path: str, source: str | None, json_file: Path | None, report: Path | None, quiet: bool, **chosen: Any
) -> None:
    """Verify the 4-bit checkpoint PATH: a folder or a .safetensors file, made by any tool.

    Exit codes: 0 everything is right, 1 something is not, 2 it could not be verified.
    """
    run, options, where = (_split(kind, chosen) for kind in (RunOptions, VerifyOptions, SourceOptions))
    _quieten_downloads(quiet)
    plan = nf4conv.plan_verification(path, source, options, where)
    with _progress(plan.bytes_to_read, quiet) as advance:
        found = nf4conv.execute_verification(plan, run, advance)
    files = (json_file, nf4conv.write_json), (report, nf4conv.write_page)
    _judge(found, files, () if quiet else verification_lines(found))


_COMPARE_EXAMPLES = """\b
Examples:
  nf4conv compare ./ours-nf4 ./theirs-nf4                            every byte
  nf4conv compare ./model-nf4 ./model-dequantized --tolerance 0      every value, in whatever format
"""


@main.command(epilog=_COMPARE_EXAMPLES)
@click.argument("a", metavar="A", type=_Place())
@click.argument("b", metavar="B", type=_Place())
@click.option("--tolerance", type=float, help="Largest relative error of a tensor.  [default: equal bytes]")
@click.option("--include", multiple=True, metavar="GLOB", help="Compare only tensors that match. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out tensors that match. Repeatable.")
@_json_file
@_judging_options
def compare(a: str, b: str, json_file: Path | None, quiet: bool, **chosen: Any) -> None:
    """Compare the tensors of the checkpoints A and B: folders, weight files, or models on the Hub, in any format.

    Exit codes: 0 every byte is equal, or no tensor is farther off than the tolerance; 1 otherwise; 2 bad input.
    """
    run, options, where = (_split(kind, chosen) for kind in (RunOptions, CompareOptions, SourceOptions))
    _quieten_downloads(quiet)
    plan = nf4conv.plan_comparison(a, b, options, where)
    with _progress(plan.bytes_to_read, quiet) as advance:
        found = nf4conv.execute_comparison(plan, run, advance)
    _judge(found, [(json_file, nf4conv.write_json)], () if quiet else comparison_lines(found))


_INSPECT_EXAMPLES = """\b
Examples:
  nf4conv inspect ./Llama-3.1-8B-nf4
  nf4conv inspect unsloth/Llama-3.2-1B-bnb-4bit          reads headers only
"""


@main.command(epilog=_INSPECT_EXAMPLES)
@click.argument("path", metavar="PATH|REPO")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@_repository_options
def inspect(path: str, as_json: bool, **chosen: Any) -> None:
    """Show what is in a checkpoint, by its headers: tensors, formats, sizes, bits per parameter.

    PATH is a folder or a weight file; REPO a model on the Hugging Face Hub, of which no weight is fetched.
    """
    _quieten_downloads(True)
    found = nf4conv.inspect_checkpoint(path, SourceOptions(**chosen))
    if as_json:
        _print_json(dataclasses.asdict(found))
    else:
        click.echo("\n".join(inspection_lines(found)))


def _split(kind: type[Any], chosen: dict[str, Any]) -> Any:
    """The chosen values that belong to one kind of options; a command need not have all of them."""
    return kind(**{field.name: chosen[field.name] for field in dataclasses.fields(kind) if field.name in chosen})


def _quieten_downloads(quiet: bool) -> None:
    if quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # which huggingface_hub reads when it is imported


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr in bytes of source; none where stderr is not a terminal or the user wants none."""
    from tqdm import tqdm

    hidden = quiet or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in ("1", "ON", "YES", "TRUE")
    with tqdm(total=total, unit="B", unit_scale=True, disable=True if hidden else None, leave=False) as bar:
        yield bar.update


def _execute(
    plan: Any, execute: Callable[..., Any], as_json: bool, quiet: bool, print_report: Callable[[Any], None]
) -> None:
    """Carry out a plan of `quantize` or `dequantize`, and print what came of it."""
    for note in () if quiet else plan.notes:
        click.echo(f"{click.style('Note:', fg='yellow')} {printable(note)}", err=True, color=_color())
    with _progress(plan.totals().bytes_in, quiet) as advance:
        report = execute(progress=advance)
    if as_json:
        _print_json(dataclasses.asdict(report))
    elif not quiet:
        print_report(report)


def _judge(found: Any, files: Iterable[tuple[Path | None, Callable[..., None]]], lines: Iterable[str]) -> NoReturn:
    """Write and print what `verify` or `compare` found, and leave with its verdict."""
    for file, write in files:
        if file is not None:
            write(found, file)
    if lines:
        click.echo("\n".join(lines))
    sys.exit(0 if found.passed else 1)


def _print_json(content: Mapping[str, Any]) -> None:
    click.echo(json.dumps(content, indent=2))


def _print_plan(plan: Any, notes: Sequence[str], as_json: bool, summary: str) -> None:
    rows = plan.rows()
    if as_json:
        totals = dataclasses.asdict(plan.totals())
        tensors = [dataclasses.asdict(row) for row in rows]
        _print_json({"tensors": tensors, "totals": totals, "config": plan.config, "notes": notes})
        return
    names = [printable(row.name) for row in rows]
    width = max(map(len, names))
    for name, row in zip(names, rows, strict=True):
        shape = "x".join(map(str, row.shape)) or "scalar"
        sizes = f"{size(row.bytes_in):>9} → {size(row.bytes_out):>9}"
        click.echo(f"{row.action:4}  {name:{width}}  {row.dtype:4} {shape:>14}  {sizes}  {row.reason}")
    click.echo(f"\n{summary}")
    for note in notes:
        click.echo(f"Note: {printable(note)}")


def _print_report(report: "nf4conv.QuantizeReport") -> None:
    what = f"{report.packed:,} weights packed, {report.copied:,} tensors kept"
    ratio = report.bytes_before / report.bytes_after
    _print_run(
        report, what, f" ({ratio:.2f}x, {report.bits_per_parameter:.2f} bits per parameter)", report.bytes_before
    )
    if report.verification is not None:
        verified = report.verification
        click.echo(
            f"verified: {verified.weights:,} packed weights, largest relative error "
            f"{verified.largest_relative_error:.4f}; {verified.copies:,} kept tensors equal"
        )
    if report.pushed is not None:
        click.echo(f"pushed: {report.pushed}")


def _print_dequantize_report(report: "nf4conv.DequantizeReport") -> None:
    what = f"{report.decoded:,} weights decoded, {report.copied:,} tensors copied"
    _print_run(report, what, "", report.bytes_after)


def _print_run(
    report: "nf4conv.QuantizeReport | nf4conv.DequantizeReport", what: str, ratio: str, processed: int
) -> None:
    """Print what was done, the sizes with their ratio, and how long so many bytes took."""
    resumed = f", {report.shards_resumed} shards of an earlier run kept" if report.shards_resumed else ""
    split = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in sorted(report.seconds_by_activity.items()))
    rate = processed / report.seconds / 1e9
    click.echo(
        f"{report.out}: {what}{resumed}\n{size(report.bytes_before)} → {size(report.bytes_after)}{ratio}\n"
        f"{report.seconds:.1f} s on {report.device}, {rate:.2f} GB/s (all workers: {split})"
    )
