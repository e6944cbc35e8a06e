"""What each command returns. Field names are the keys of --json, in their order.

docs/json.md is made from them, and from the comments beside them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nf4conv.report import rows
from nf4conv.report.tolerance import RELATIVE_ERRORS
from nf4conv.sources.stored_weights import Finding


@dataclass(frozen=True)
class PlanReport:
    """What `quantize` or `dequantize` would do: the result of --dry-run."""

    command: str  # "quantize" or "dequantize"
    source: str  # what would be read
    totals: rows.QuantizationTotals | rows.DequantizationTotals  # of everything
    kinds: tuple[rows.PlanKind, ...]  # what becomes of each kind of module
    tensors: tuple[rows.PlanRow, ...]  # what becomes of each tensor
    # the content of the output's config.json, of a diffusers pipeline those of its submodels; None
    # if none
    config: Mapping[str, Any] | None
    # an estimate of the GPU memory that loading the result takes; None for a result in 16 or 32
    # bits
    gpu_bytes: int | None
    # why there are many bits per parameter, and what would change that; empty if there are not
    advice: str
    notes: tuple[str, ...]  # what the user should know


@dataclass(frozen=True)
class RunReport:
    """What a run did that wrote a checkpoint."""

    command: ClassVar[str]

    out: str  # the output folder
    already_complete: bool  # whether the result was there before, so that nothing was computed
    part: str | None  # of which sizes and counts are, as "2/3"; None for a run that made all
    device: str  # where it was computed
    copied: int  # tensors kept, those of weights that stay in 4 bits included
    bytes_before: int  # of all tensors of the source
    bytes_after: int  # of the output's weight files
    seconds: float  # wall clock of the whole run, once planned
    pipeline_seconds: float  # of it, from the first read to the last write
    seconds_by_activity: Mapping[
        str, float
    ]  # "read", "compute" and "write", summed over the workers
    host_baseline_bytes: int  # peak resident memory of the process when the first byte is read
    host_peak_bytes: int  # the same at the end
    device_peak_bytes: int  # the most held on the GPU
    shards_resumed: int  # finished shards of an earlier, interrupted run that were kept
    notes: tuple[str, ...]  # what the user should know


@dataclass(frozen=True)
class DequantizeReport(RunReport):
    """What a dequantization did."""

    command: ClassVar[str] = "dequantize"

    decoded: int  # weights decoded


@dataclass(frozen=True)
class QuantizeReport(RunReport):
    """What a quantization did."""

    command: ClassVar[str] = "quantize"

    packed: int  # weights packed
    parameters: int  # elements of all tensors
    bits_per_parameter: float  # of the output
    gpu_bytes: int  # an estimate of the GPU memory that loading the result takes
    loading: str  # Python code that loads it
    # why there are many bits per parameter, and what would change that; empty if there are not
    advice: str
    verification: rows.VerificationSummary | None = (
        None  # what was looked at, with `verify`; else None
    )
    pushed: str | None = None  # address of the commit on the Hub; None if nothing was to be pushed


@dataclass(frozen=True)
class FinishReport:
    """What has become of the parts of a checkpoint."""

    command: ClassVar[str] = "finish"

    out: str  # the output folder
    already_complete: bool  # whether the result was there before, so that nothing was done
    shards: int  # weight files
    bytes_after: int  # of them
    verification: (
        rows.VerificationSummary | None
    )  # what the parts looked at, with `verify`; else None
    seconds: float  # wall clock


@dataclass(frozen=True)
class VerifyReport:
    """What verification found."""

    command: ClassVar[str] = "verify"

    path: str  # the checkpoint
    source: str | None  # what it was compared with; None if nothing
    passed: bool  # the verdict
    checks: Mapping[
        str, rows.CheckResult
    ]  # for each check that ran, by name: what it means, and whether it passed
    findings: tuple[Finding, ...]  # everything that is wrong or worth knowing; a fault has is_fault
    # by which command, version and options, and from what, as its nf4conv.json says; None if it has
    # none
    made: Mapping[str, Any] | None
    # a row for each packed weight: place, size, format and, with a source, its errors
    weights: tuple[rows.WeightRow, ...]
    kinds: tuple[rows.WeightKind, ...]  # the same added up by kind of module
    sizes: Mapping[
        str, int
    ]  # bytes of codes, of scales, of tables (and quant states), and of what is not packed
    parameters: int  # elements of all tensors
    bits_per_parameter: float  # of the whole checkpoint
    identical: (
        bool | None
    )  # whether every byte compared is what quantizing the source gives; None without a source
    settings: Mapping[str, Any]  # options, device and versions
    seconds: float  # wall clock

    @property
    def normal(self) -> list[tuple[str, float, float]]:
        """(name, smallest, largest) relative error that trained weights usually have, of each
        format compared.
        """
        formats = {
            (row.quant_type, row.blocksize)
            for row in self.weights
            if row.relative_error is not None
        }
        scales = (
            "search"
            if self.made is not None and self.made["options"].get("scales") == "search"
            else "absmax"
        )
        return [
            (f"{name}/{size}", *RELATIVE_ERRORS[scales, name][size][:2])
            for name, size in sorted(formats)
        ]

    @property
    def verdict(self) -> str:
        """One line."""
        faults = sum(finding.is_fault for finding in self.findings)
        compared = [
            weight.relative_error for weight in self.weights if weight.relative_error is not None
        ]
        worst = (
            f"largest relative error {max(compared):.4f}"
            if compared
            else "not compared with a source"
        )
        if self.passed:
            same = ", byte for byte what quantizing the source gives" if self.identical else ""
            return f"passed: {len(self.weights):,} packed weights, {worst}{same}"
        return f"FAILED: {faults:,} fault{'s' if faults != 1 else ''} in {len(self.weights):,} packed weights, {worst}"


@dataclass(frozen=True)
class ComparisonReport:
    """What a comparison found."""

    command: ClassVar[str] = "compare"

    a: str  # the one checkpoint
    b: str  # the other
    passed: bool  # the verdict
    notes: tuple[str, ...]  # what the user should know
    tensors: tuple[rows.ComparedRow, ...]  # a row for each
    kinds: tuple[rows.ComparedKind, ...]  # the same added up by kind of module
    counts: Mapping[rows.Status, int]  # tensors by status
    settings: Mapping[str, Any]  # options, device and versions
    seconds: float  # wall clock

    @property
    def verdict(self) -> str:
        """One line."""
        total = len(self.tensors)
        if self.counts.get(rows.Status.IDENTICAL) == total:
            return f"identical: {total:,} tensors, every byte"
        counted = ", ".join(f"{count:,} {status}" for status, count in self.counts.items())
        errors = [row.relative_error for row in self.tensors if row.relative_error is not None]
        worst = f"; largest relative error {max(errors):.4g}" if errors else ""
        if not self.passed and self.counts.keys() <= {rows.Status.EQUAL, rows.Status.IDENTICAL}:
            worst += " (--tolerance 0 lets these pass)"
        return f"{'within tolerance' if self.passed else 'DIFFERENT'}: {counted}{worst}"


@dataclass(frozen=True)
class Evaluation:
    """How far a model in 4 bits is from its source."""

    command: ClassVar[str] = "evaluate"

    out: str  # the model in 4 bits
    source: str  # what it was made from
    passed: bool  # whether kl is at most --max-kl, if that is given
    kind: str  # "causal", "seq2seq", "masked" or "encoder"
    text: str  # where the tokens are from
    tokens: int  # that both models read
    device: str  # where
    arithmetic: str  # in what
    # kl, in nats, mean, kl_median and kl_99th over positions; agreement, of 1, of the most likely
    # token; perplexity and perplexity_source. Of an encoder cosine, cosine_least of the states;
    # cosine_pooled of means.
    figures: Mapping[str, float]

    def rows(self) -> dict[str, str]:
        """What was found, in words and figures."""
        about = {
            "text": f"{self.tokens:,} tokens of {self.text}",
            "run": f"on {self.device}, {self.arithmetic}",
        }
        return {
            name.replace("_", " "): f"{value:.5g}" for name, value in self.figures.items()
        } | about


@dataclass(frozen=True)
class Inspection:
    """What is in a checkpoint."""

    command: ClassVar[str] = "inspect"

    path: str  # the checkpoint, as it was given
    files: tuple[str, ...]  # the weight files
    config: Mapping[str, Any] | None  # what config.json says about a quantization; None if nothing
    model_type: str | None  # of the config; None if there is none
    # by which command, version and options, and from what, as its nf4conv.json says; None if it has
    # none
    made: Mapping[str, Any] | None
    notes: tuple[str, ...]  # what is unusual
    gpu_bytes: int  # an estimate of the GPU memory that loading it takes
    tensors: tuple[
        rows.InspectedRow, ...
    ]  # a row for each tensor, the tensors of a packed weight being one
    kinds: tuple[rows.InspectedKind, ...]  # the same added up by kind of module
    totals: rows.InspectionTotals  # of the whole checkpoint
    # what is wrong with a 4-bit checkpoint, as far as headers, small tensors and config tell
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Environment:
    """What a bug report should say."""

    command: ClassVar[str] = "env"

    python: str  # its version
    platform: str  # system, release and processor
    packages: Mapping[str, str | None]  # their versions; None for one that is not installed
    cores: int  # of the CPU, that this process may use
    gpus: tuple[str, ...]  # name, compute capability and memory of each that torch finds
    engine: str  # who computes with --device auto, where, and why
    folders: Mapping[str, str]  # where compiled kernels and downloads are kept
