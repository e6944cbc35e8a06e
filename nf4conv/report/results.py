"""What each command returns. Field names are the keys of --json, in their order; docs/json.md is made from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nf4conv.checkpoint.structure import Finding
from nf4conv.report.rows import (
    CheckResult,
    ComparedKind,
    ComparedRow,
    DequantizationTotals,
    InspectedKind,
    InspectedRow,
    InspectionTotals,
    PlanKind,
    PlanRow,
    QuantizationTotals,
    Status,
    VerificationSummary,
    WeightKind,
    WeightRow,
)
from nf4conv.report.tolerance import RELATIVE_ERRORS


@dataclass(frozen=True)
class PlanReport:
    """What `quantize` or `dequantize` would do: the result of --dry-run.

    Attributes:
        command: "quantize" or "dequantize".
        source: what would be read.
        totals: of everything.
        kinds: what becomes of each kind of module.
        tensors: what becomes of each tensor.
        config: the content of the output's config.json, of a diffusers pipeline those of its submodels; None if none.
        gpu_bytes: an estimate of the GPU memory that loading the result takes; None for a result in 16 or 32 bits.
        advice: why there are many bits per parameter, and what would change that; empty if there are not.
        notes: what the user should know.
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
    """What a run did that wrote a checkpoint.

    Attributes:
        out: the output folder.
        already_complete: whether the result was there before, so that nothing was computed.
        device: where it was computed.
        copied: tensors kept, those of weights that stay in 4 bits included.
        bytes_before: of all tensors of the source.
        bytes_after: of the output's weight files.
        seconds: wall clock of the whole run, once planned.
        pipeline_seconds: of it, from the first read to the last write.
        seconds_by_activity: "read", "compute" and "write", summed over the workers.
        host_baseline_bytes: peak resident memory of the process when the first byte is read.
        host_peak_bytes: the same at the end.
        device_peak_bytes: the most held on the GPU.
        shards_resumed: finished shards of an earlier, interrupted run that were kept.
        notes: what the user should know.
    """

    command: ClassVar[str]

    out: str
    already_complete: bool
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


@dataclass(frozen=True)
class DequantizeReport(RunReport):
    """What a dequantization did.

    Attributes:
        decoded: weights decoded.
    """

    command: ClassVar[str] = "dequantize"

    decoded: int


@dataclass(frozen=True)
class QuantizeReport(RunReport):
    """What a quantization did.

    Attributes:
        packed: weights packed.
        parameters: elements of all tensors.
        bits_per_parameter: of the output.
        gpu_bytes: an estimate of the GPU memory that loading the result takes.
        loading: Python code that loads it.
        advice: why there are many bits per parameter, and what would change that; empty if there are not.
        verification: what was looked at, with `verify`; else None.
        pushed: address of the commit on the Hub; None if nothing was to be pushed.
    """

    command: ClassVar[str] = "quantize"

    packed: int
    parameters: int
    bits_per_parameter: float
    gpu_bytes: int
    loading: str
    advice: str
    verification: VerificationSummary | None = None
    pushed: str | None = None


@dataclass(frozen=True)
class VerifyReport:
    """What verification found.

    Attributes:
        path: the checkpoint.
        source: what it was compared with; None if nothing.
        passed: the verdict.
        checks: for each check that ran, by name: what it means, and whether it passed.
        findings: everything that is wrong or worth knowing; a fault has is_fault.
        made: by which command, version and options, and from what, as its nf4conv.json says; None if it has none.
        weights: a row for each packed weight: place, size, format and, with a source, its errors.
        kinds: the same added up by kind of module.
        sizes: bytes of codes, of scales, of tables (and quant states), and of what is not packed.
        parameters: elements of all tensors.
        bits_per_parameter: of the whole checkpoint.
        identical: whether every byte compared is what quantizing the source gives; None without a source.
        settings: options, device and versions.
        seconds: wall clock.
    """

    command: ClassVar[str] = "verify"

    path: str
    source: str | None
    passed: bool
    checks: Mapping[str, CheckResult]
    findings: tuple[Finding, ...]
    made: Mapping[str, Any] | None
    weights: tuple[WeightRow, ...]
    kinds: tuple[WeightKind, ...]
    sizes: Mapping[str, int]
    parameters: int
    bits_per_parameter: float
    identical: bool | None
    settings: Mapping[str, Any]
    seconds: float

    @property
    def normal(self) -> list[tuple[str, float, float]]:
        """(name, smallest, largest) relative error that trained weights usually have, of each format compared."""
        formats = {(row.quant_type, row.blocksize) for row in self.weights if row.relative_error is not None}
        scales = "search" if self.made is not None and self.made["options"].get("scales") == "search" else "absmax"
        return [(f"{name}/{size}", *RELATIVE_ERRORS[scales, name][size][:2]) for name, size in sorted(formats)]

    @property
    def verdict(self) -> str:
        """One line."""
        faults = sum(finding.is_fault for finding in self.findings)
        compared = [weight.relative_error for weight in self.weights if weight.relative_error is not None]
        worst = f"largest relative error {max(compared):.4f}" if compared else "not compared with a source"
        if self.passed:
            same = ", byte for byte what quantizing the source gives" if self.identical else ""
            return f"passed: {len(self.weights):,} packed weights, {worst}{same}"
        return f"FAILED: {faults:,} fault{'s' if faults != 1 else ''} in {len(self.weights):,} packed weights, {worst}"


@dataclass(frozen=True)
class ComparisonReport:
    """What a comparison found.

    Attributes:
        a: the one checkpoint.
        b: the other.
        passed: the verdict.
        notes: what the user should know.
        tensors: a row for each.
        kinds: the same added up by kind of module.
        counts: tensors by status.
        settings: options, device and versions.
        seconds: wall clock.
    """

    command: ClassVar[str] = "compare"

    a: str
    b: str
    passed: bool
    notes: tuple[str, ...]
    tensors: tuple[ComparedRow, ...]
    kinds: tuple[ComparedKind, ...]
    counts: Mapping[Status, int]
    settings: Mapping[str, Any]
    seconds: float

    @property
    def verdict(self) -> str:
        """One line."""
        total = len(self.tensors)
        if self.counts.get(Status.IDENTICAL) == total:
            return f"identical: {total:,} tensors, every byte"
        counted = ", ".join(f"{count:,} {status}" for status, count in self.counts.items())
        errors = [row.relative_error for row in self.tensors if row.relative_error is not None]
        worst = f"; largest relative error {max(errors):.4g}" if errors else ""
        if not self.passed and self.counts.keys() <= {Status.EQUAL, Status.IDENTICAL}:
            worst += " (--tolerance 0 lets these pass)"
        return f"{'within tolerance' if self.passed else 'DIFFERENT'}: {counted}{worst}"


@dataclass(frozen=True)
class Evaluation:
    """How far a model in 4 bits is from its source.

    Attributes:
        out: the model in 4 bits.
        source: what it was made from.
        passed: whether kl is at most --max-kl, if that is given.
        kind: "causal", "seq2seq", "masked" or "encoder".
        text: where the tokens are from.
        tokens: that both models read.
        device: where.
        arithmetic: in what.
        figures: kl, in nats, mean, kl_median and kl_99th over positions; agreement, of 1, of the most likely token;
            perplexity and perplexity_source. Of an encoder cosine, cosine_least of the states; cosine_pooled of means.
    """

    command: ClassVar[str] = "evaluate"

    out: str
    source: str
    passed: bool
    kind: str
    text: str
    tokens: int
    device: str
    arithmetic: str
    figures: Mapping[str, float]

    def rows(self) -> dict[str, str]:
        """What was found, in words and figures."""
        about = {"text": f"{self.tokens:,} tokens of {self.text}", "run": f"on {self.device}, {self.arithmetic}"}
        return {name.replace("_", " "): f"{value:.5g}" for name, value in self.figures.items()} | about


@dataclass(frozen=True)
class Inspection:
    """What is in a checkpoint.

    Attributes:
        path: the checkpoint, as it was given.
        files: the weight files.
        config: what config.json says about a quantization; None if nothing.
        model_type: of the config; None if there is none.
        made: by which command, version and options, and from what, as its nf4conv.json says; None if it has none.
        notes: what is unusual.
        gpu_bytes: an estimate of the GPU memory that loading it takes.
        tensors: a row for each tensor, the tensors of a packed weight being one.
        kinds: the same added up by kind of module.
        totals: of the whole checkpoint.
        findings: what is wrong with a 4-bit checkpoint, as far as headers, small tensors and config tell.
    """

    command: ClassVar[str] = "inspect"

    path: str
    files: tuple[str, ...]
    config: Mapping[str, Any] | None
    model_type: str | None
    made: Mapping[str, Any] | None
    notes: tuple[str, ...]
    gpu_bytes: int
    tensors: tuple[InspectedRow, ...]
    kinds: tuple[InspectedKind, ...]
    totals: InspectionTotals
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Environment:
    """What a bug report should say.

    Attributes:
        python: its version.
        platform: system, release and processor.
        packages: their versions; None for one that is not installed.
        cores: of the CPU, that this process may use.
        gpus: name, compute capability and memory of each that torch finds.
        engine: who computes with --device auto, where, and why.
        folders: where compiled kernels and downloads are kept.
    """

    command: ClassVar[str] = "env"

    python: str
    platform: str
    packages: Mapping[str, str | None]
    cores: int
    gpus: tuple[str, ...]
    engine: str
    folders: Mapping[str, str]
