"""The results of commands that plan or write a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from nf4conv.plan.rows import DequantizationTotals, PlanKind, PlanRow, QuantizationTotals
from nf4conv.report.rows.weights import VerificationSummary


@dataclass(frozen=True)
class PlanReport:
    """Describes what `quantize` or `dequantize` would do: the result of --dry-run.

    Attributes:
        command: "quantize" or "dequantize".
        source: the checkpoint that would be read, as a path or a name on the Hub.
        totals: the sums over all tensors of the plan.
        kinds: one row for each kind of module and what becomes of its tensors.
        tensors: one row for each tensor and what becomes of it.
        config: the content of the output's config.json; for a diffusers pipeline, that of each
            submodel, by its name. None if the source has no config.json.
        gpu_bytes: an estimate of the GPU memory, in bytes, that loading the result takes. None for
            a result in 16 or 32 bits.
        advice: why the result has many bits per parameter, and what would change that. Empty if it
            does not.
        notes: lines that the user should read.
    """

    command: str
    source: str
    totals: QuantizationTotals | DequantizationTotals
    kinds: tuple[PlanKind, ...]
    tensors: tuple[PlanRow, ...]
    config: Mapping[str, Any] | None
    gpu_bytes: int | None
    advice: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RunReport:
    """Describes a run that wrote a checkpoint: what every such command reports.

    Attributes:
        out: the output folder.
        already_complete: True if the result was there before, so that nothing was computed.
        part: the part that this run made, as "2/3"; all sizes and counts are then those of the
            part. None for a run that made the whole checkpoint.
        device: where the run computed: "cpu", or a GPU as "cuda:0".
        copied: the number of tensors that were kept. Includes the components of weights that stay
            in 4 bits.
        bytes_before: the size of all tensors of the source.
        bytes_after: the size of the output's weight files.
        seconds: wall clock time of the whole run, without planning.
        pipeline_seconds: wall clock time from the first read to the last write; a share of
            `seconds`.
        seconds_by_activity: seconds spent in "read", "compute" and "write", summed over the
            workers.
        host_baseline_bytes: peak resident memory of the process before the first byte is read.
        host_peak_bytes: peak resident memory of the process at the end.
        device_peak_bytes: the most memory that was held on the GPU; 0 on a CPU.
        shards_resumed: the number of finished shards that were kept from an earlier, interrupted
            run.
        notes: lines that the user should read.
        shards_missing: the number of files that other parts have not made yet. 0 if `out` is whole.
    """

    command: ClassVar[str]

    out: str
    already_complete: bool
    part: str | None
    device: str
    copied: int
    bytes_before: int
    bytes_after: int
    seconds: float
    pipeline_seconds: float
    seconds_by_activity: Mapping[str, float]
    host_baseline_bytes: int
    host_peak_bytes: int
    device_peak_bytes: int
    shards_resumed: int
    notes: tuple[str, ...]
    shards_missing: int


def run_of_earlier(
    out: Path, copied: int, before: int, after: int, notes: tuple[str, ...] = ()
) -> RunReport:
    """Returns the report of a run that computed nothing, as an earlier one had made everything."""
    return RunReport(
        out=str(out),
        already_complete=True,
        part=None,
        device="none",
        copied=copied,
        bytes_before=before,
        bytes_after=after,
        seconds=0,
        pipeline_seconds=0,
        seconds_by_activity={},
        host_baseline_bytes=0,
        host_peak_bytes=0,
        device_peak_bytes=0,
        shards_resumed=0,
        notes=notes,
        shards_missing=0,
    )


def _fields_of(run: RunReport) -> dict[str, Any]:
    """Returns the fields that every run reports, for the report of one command."""
    return {field.name: getattr(run, field.name) for field in fields(RunReport)}


@dataclass(frozen=True)
class DequantizeReport(RunReport):
    """Describes what a dequantization did.

    The fields up to `notes` are those of every run, see RunReport.

    Attributes:
        decoded: the number of weights that were decoded.
    """

    command: ClassVar[str] = "dequantize"

    decoded: int

    @classmethod
    def of_run(cls, run: RunReport, *, decoded: int) -> "DequantizeReport":
        """Adds the figures of a dequantization to what every run reports."""
        return cls(**_fields_of(run), decoded=decoded)


@dataclass(frozen=True)
class QuantizeReport(RunReport):
    """Describes what a quantization did.

    The fields up to `notes` are those of every run, see RunReport.

    Attributes:
        packed: the number of weights in 4 bits of the output.
        stay: how many of them were in 4 bits already, and stay bit for bit.
        parameters: the number of elements of all tensors.
        bits_per_parameter: bits per parameter of the output's weight files.
        gpu_bytes: an estimate of the GPU memory, in bytes, that loading the result takes.
        loading: Python code that loads the result. Empty if nothing says how it is loaded.
        install: the command that installs what that code needs. Empty if there is no code.
        push: the command that pushes the result. Empty if it was pushed, and if it has no
            config.json.
        advice: why the result has many bits per parameter, and what would change that. Empty if it
            does not.
        verification: what `--verify` measured. None without it.
        pushed: the address of the commit or pull request on the Hub. None if the result was not
            pushed.
    """

    command: ClassVar[str] = "quantize"

    packed: int
    stay: int
    parameters: int
    bits_per_parameter: float
    gpu_bytes: int
    loading: str
    install: str
    push: str
    advice: str
    verification: VerificationSummary | None = None
    pushed: str | None = None

    @classmethod
    def of_run(
        cls,
        run: RunReport,
        *,
        packed: int,
        stay: int,
        parameters: int,
        bits_per_parameter: float,
        gpu_bytes: int,
        loading: str,
        install: str,
        push: str,
        advice: str,
        verification: VerificationSummary | None,
    ) -> "QuantizeReport":
        """Adds the figures of a quantization to what every run reports."""
        return cls(
            **_fields_of(run),
            packed=packed,
            stay=stay,
            parameters=parameters,
            bits_per_parameter=bits_per_parameter,
            gpu_bytes=gpu_bytes,
            loading=loading,
            install=install,
            push=push,
            advice=advice,
            verification=verification,
        )
