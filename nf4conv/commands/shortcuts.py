"""Commands with their options as keywords: `nf4conv.quantize("SRC", "OUT", scales="search")`.

Each function makes the option classes of its keywords, and calls the function that takes them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nf4conv.choices import chosen
from nf4conv.commands.compare import compare_checkpoints
from nf4conv.commands.dequantize import dequantize_checkpoint
from nf4conv.commands.inspect import inspect_checkpoint
from nf4conv.commands.keywords import (
    Comparing,
    Dequantizing,
    Place,
    Quantizing,
    Verifying,
    check_keywords,
    takes,
)
from nf4conv.commands.quantize import quantize_checkpoint
from nf4conv.commands.verify import verify_checkpoint
from nf4conv.options import (
    CompareOptions,
    DequantizeOptions,
    PushOptions,
    QuantizeOptions,
    RunOptions,
    SourceOptions,
    VerifyOptions,
)
from nf4conv.report.results.checks import ComparisonReport, VerifyReport
from nf4conv.report.results.contents import Inspection
from nf4conv.report.results.runs import DequantizeReport, QuantizeReport

if TYPE_CHECKING:  # in `typing` since Python 3.11
    from typing_extensions import Unpack


@takes(Quantizing, QuantizeOptions, RunOptions, SourceOptions, PushOptions)
def quantize(
    source: str | Path,
    out: str | Path,
    progress: Callable[[int], None] | None = None,
    **options: "Unpack[Quantizing]",
) -> QuantizeReport:
    """Quantizes a checkpoint to 4 bits; in a diffusers pipeline, each submodel by its own rules.

    A run that was interrupted goes on where it stopped: run it again with the same arguments.
    `quantize_checkpoint` does the same with options in classes.

    Example:
        >>> report = nf4conv.quantize("./Llama-3.1-8B", "./Llama-3.1-8B-nf4", verify=True)
        >>> print(report.packed, "weights,", report.bits_per_parameter, "bits per parameter")

    Args:
        source: a folder, a .safetensors file, a torch pickle, or "org/name" on the Hugging Face
            Hub.
        out: the folder to write. It must be empty, or hold an interrupted run of the same plan.
        progress: is called with the number of source bytes that have been read since the last
            call, from any thread.
        **options: fields of QuantizeOptions, RunOptions, SourceOptions and PushOptions:

    Returns:
        What was packed and kept, sizes, times and memory.

    Raises:
        SourceError: the source cannot be read.
        OptionError: an option has a value that it cannot have.
        PlanError: the request cannot be met for this source.
        OutputError: `out` cannot be written. After this and any other error, `out` does not look
            like a finished checkpoint.
        VerificationError: with `verify`, what was written is not what it should be.
    """
    check_keywords(quantize, options)
    return quantize_checkpoint(
        source,
        out,
        chosen(QuantizeOptions, options),
        chosen(RunOptions, options),
        progress,
        chosen(SourceOptions, options),
        chosen(PushOptions, options),
    )


@takes(Dequantizing, DequantizeOptions, RunOptions, SourceOptions)
def dequantize(
    source: str | Path,
    out: str | Path,
    progress: Callable[[int], None] | None = None,
    **options: "Unpack[Dequantizing]",
) -> DequantizeReport:
    """Decodes a 4-bit checkpoint or diffusers pipeline, exactly as bitsandbytes' CUDA library does.

    A run that was interrupted goes on where it stopped: run it again with the same arguments.
    `dequantize_checkpoint` does the same with options in classes.

    Example:
        >>> nf4conv.dequantize("./Llama-3.1-8B-nf4", "./Llama-3.1-8B-again", dtype="float16")

    Args:
        source: a folder, a .safetensors file, or "org/name" on the Hugging Face Hub.
        out: the folder to write. It must be empty, or hold an interrupted run of the same plan.
        progress: is called with the number of source bytes that have been read since the last
            call, from any thread.
        **options: fields of DequantizeOptions, RunOptions and SourceOptions:

    Returns:
        What was decoded and kept, sizes, times and memory.

    Raises:
        SourceError: the source cannot be read.
        OptionError: an option has a value that it cannot have.
        PlanError: the request cannot be met for this source.
        OutputError: `out` cannot be written. After this and any other error, `out` does not look
            like a finished checkpoint.
    """
    check_keywords(dequantize, options)
    return dequantize_checkpoint(
        source,
        out,
        chosen(DequantizeOptions, options),
        chosen(RunOptions, options),
        progress,
        chosen(SourceOptions, options),
    )


@takes(Verifying, VerifyOptions, RunOptions, SourceOptions)
def verify(
    path: str | Path,
    source: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
    **options: "Unpack[Verifying]",
) -> VerifyReport:
    """Verifies a 4-bit checkpoint, or a diffusers pipeline, that nf4conv or another tool made.

    `verify_checkpoint` does the same with options in classes.

    Example:
        >>> report = nf4conv.verify("./Llama-3.1-8B-nf4", "./Llama-3.1-8B", exact=True)
        >>> assert report.passed, report.verdict

    Args:
        path: a folder or a .safetensors file.
        source: what it was made from: a folder, a file, or "org/name" on the Hugging Face Hub.
            Without it, only what the checkpoint says about itself is verified.
        progress: is called with the number of bytes that have been read since the last call, from
            any thread.
        **options: fields of VerifyOptions, RunOptions and SourceOptions:

    Returns:
        Every check, every fault, and figures for every packed weight.

    Raises:
        SourceError: there are no weights at `path`, or the source cannot be read.
        OptionError: an option has a value that it cannot have.
        PlanError: the options make no sense together.
    """
    check_keywords(verify, options)
    return verify_checkpoint(
        path,
        source,
        chosen(VerifyOptions, options),
        chosen(RunOptions, {**options, "tolerance": None}),  # which is that of VerifyOptions
        progress,
        chosen(SourceOptions, options),
    )


@takes(Comparing, CompareOptions, RunOptions, SourceOptions)
def compare(
    a: str | Path,
    b: str | Path,
    progress: Callable[[int], None] | None = None,
    **options: "Unpack[Comparing]",
) -> ComparisonReport:
    """Compares two checkpoints, or two diffusers pipelines, tensor by tensor, in any format.

    `compare_checkpoints` does the same with options in classes.

    Example:
        >>> nf4conv.compare("./ours-nf4", "./theirs-nf4", exclude=["lm_head.*"]).verdict
        'identical: 290 tensors, every byte'

    Args:
        a: a folder, a weight file, or "org/name" on the Hugging Face Hub.
        b: another.
        progress: is called with the number of bytes that have been read since the last call, from
            any thread.
        **options: fields of CompareOptions, RunOptions and SourceOptions:

    Returns:
        A row for each tensor, and the verdict.

    Raises:
        SourceError: one of the checkpoints cannot be read.
        OptionError: an option has a value that it cannot have.
        PlanError: the options make no sense together.
    """
    check_keywords(compare, options)
    return compare_checkpoints(
        a,
        b,
        chosen(CompareOptions, options),
        chosen(RunOptions, {**options, "tolerance": None}),  # which is that of CompareOptions
        progress,
        chosen(SourceOptions, options),
    )


@takes(Place, SourceOptions)
def inspect(path: str | Path, **options: "Unpack[Place]") -> Inspection:
    """Describes a checkpoint, or a diffusers pipeline, by its headers.

    Reads no weight, and downloads none. `inspect_checkpoint` does the same with options in a class.

    Example:
        >>> nf4conv.inspect("unsloth/Llama-3.2-1B-bnb-4bit").totals.bits_per_parameter

    Args:
        path: a folder, a weight file, or "org/name" on the Hugging Face Hub.
        **options: fields of SourceOptions:

    Returns:
        Formats, sizes, what is unusual, and a row for each tensor.

    Raises:
        SourceError: the checkpoint cannot be read.
    """
    check_keywords(inspect, options)
    return inspect_checkpoint(path, chosen(SourceOptions, options))
