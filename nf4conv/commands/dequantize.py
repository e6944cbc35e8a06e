"""`nf4conv dequantize`: turns a quantized checkpoint or diffusers pipeline into a plain one."""

from pathlib import Path

from nf4conv.commands.writing import convert
from nf4conv.declaring import after_two_places
from nf4conv.options import DequantizeOptions
from nf4conv.report.results import RunReport


@after_two_places(DequantizeOptions)
def dequantize(source: str | Path, out: str | Path, options: DequantizeOptions) -> RunReport:
    """Decodes a 4-bit checkpoint or diffusers pipeline, exactly as bitsandbytes' CUDA library does.

    A run that was interrupted goes on where it stopped: run it again with the same arguments.

    Example:
        >>> nf4conv.dequantize("./Llama-3.1-8B-nf4", "./Llama-3.1-8B-again", dtype="float16")

    Args:
        source: a folder, a .safetensors file, or "org/name" on the Hugging Face Hub.
        out: the folder to write. It must be empty, or hold an interrupted run of the same plan.

    Returns:
        What was decoded and kept, sizes, times and memory.

    Raises:
        SourceError: the source cannot be read.
        OptionError: an option has a value that it cannot have.
        PlanError: the request cannot be met for this source.
        OutputError: `out` cannot be written. After this and any other error, `out` does not look
            like a finished checkpoint.
    """
    return convert(source, Path(out), options)
