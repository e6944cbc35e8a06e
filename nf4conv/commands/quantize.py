"""`nf4conv quantize`: packs a checkpoint or a diffusers pipeline into bitsandbytes' 4 bits."""

from dataclasses import dataclass
from pathlib import Path

from nf4conv.commands.planning import AnyPlan, planned
from nf4conv.commands.writing import convert, execute
from nf4conv.declaring import after_one_place, after_two_places
from nf4conv.options import QuantizeOptions
from nf4conv.plan.parts import plan_part
from nf4conv.plan.rows import PlanTotals, TensorRow
from nf4conv.report.results import RunReport


@after_two_places(QuantizeOptions)
def quantize(source: str | Path, out: str | Path, options: QuantizeOptions) -> RunReport:
    """Quantizes a checkpoint to 4 bits; in a diffusers pipeline, each submodel by its own rules.

    A run that was interrupted goes on where it stopped: run it again with the same arguments.

    Example:
        >>> report = nf4conv.quantize("./Llama-3.1-8B", "./Llama-3.1-8B-nf4", verify=True)
        >>> print(report.totals.packed, "weights,", report.totals.bits_per_parameter, "bits each")

    Args:
        source: a folder, a .safetensors file, a torch pickle, or "org/name" on the Hugging Face
            Hub.
        out: the folder to write. It must be empty, or hold an interrupted run of the same plan.

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
    return convert(source, Path(out), options)


@dataclass(frozen=True)
class Plan:
    """Says what quantizing a checkpoint would do, and does it.

    Attributes:
        made: the plan of the checkpoint, or of each submodel of a diffusers pipeline.
        options: those that `execute` goes by.
    """

    made: AnyPlan
    options: QuantizeOptions

    @property
    def rows(self) -> tuple[TensorRow, ...]:
        """Says what becomes of each tensor, and why."""
        return tuple(self.made.rows())

    @property
    def totals(self) -> PlanTotals:
        """Counts tensors, parameters, bytes and files."""
        return self.made.totals

    def execute(self, out: str | Path) -> RunReport:
        """Carries the plan out. Arguments, results and errors are those of `quantize`."""
        return execute(self.made, Path(out), self.options)


@after_one_place(QuantizeOptions)
def plan_quantize(source: str | Path, options: QuantizeOptions) -> Plan:
    """Decides everything about a quantization from headers and config alone.

    No weight is read, and torch is not imported.

    Example:
        >>> plan = nf4conv.plan_quantize("./Llama-3.1-8B", blocksize=128)
        >>> print(plan.totals.bits_per_parameter)
        >>> plan.execute("./Llama-3.1-8B-nf4")

    Args:
        source: a folder, a .safetensors file, a torch pickle, or "org/name" on the Hugging Face
            Hub.

    Returns:
        What becomes of each tensor; `execute` writes it.

    Raises:
        SourceError: the source cannot be read.
        OptionError: an option has a value that it cannot have.
        PlanError: the request cannot be met for this source.
    """
    return Plan(plan_part(planned(source, options), options), options)
