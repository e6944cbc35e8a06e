"""What each command returns. Field names are the keys of --json, in their order.

docs/json.md is made from them, and from the comments beside them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from nf4conv.plan import rows as plan_rows
from nf4conv.report import rows
from nf4conv.report.tolerance import RELATIVE_ERRORS
from nf4conv.sources.stored_weights import Finding

ReportT = TypeVar("ReportT", bound="RunReport")


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

    command: str  # "quantize" or "dequantize"
    source: str  # what would be read
    totals: plan_rows.QuantizationTotals | plan_rows.DequantizationTotals  # of everything
    kinds: tuple[plan_rows.PlanKind, ...]  # what becomes of each kind of module
    tensors: tuple[plan_rows.PlanRow, ...]  # what becomes of each tensor
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
    """

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

    @classmethod
    def extend(cls: type[ReportT], report: "RunReport", **own: Any) -> ReportT:
        """Returns a report of this kind: the fields of `report`, and those that the kind adds."""
        shared = {field.name: getattr(report, field.name) for field in fields(RunReport)}
        return cls(**shared, **own)


@dataclass(frozen=True)
class DequantizeReport(RunReport):
    """Describes what a dequantization did.

    RunReport has the fields that every run reports.

    Attributes:
        decoded: the number of weights that were decoded.
    """

    command: ClassVar[str] = "dequantize"

    decoded: int  # weights decoded


@dataclass(frozen=True)
class QuantizeReport(RunReport):
    """Describes what a quantization did.

    RunReport has the fields that every run reports.

    Attributes:
        packed: the number of weights that were packed.
        parameters: the number of elements of all tensors.
        bits_per_parameter: bits per parameter of the output's weight files.
        gpu_bytes: an estimate of the GPU memory, in bytes, that loading the result takes.
        loading: Python code that loads the result. Empty if nothing says how it is loaded.
        advice: why the result has many bits per parameter, and what would change that. Empty if it
            does not.
        verification: what `--verify` measured. None without it.
        pushed: the address of the commit on the Hub. None if the result was not pushed.
    """

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
    """Describes the checkpoint that `finish` made from its parts.

    Attributes:
        out: the output folder.
        already_complete: True if the result was complete before, so that nothing was done.
        shards: the number of weight files.
        bytes_after: the size of the weight files.
        verification: what the parts measured with `--verify`. None without it.
        seconds: wall clock time of the command.
    """

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
    """Describes what verification found.

    Attributes:
        path: the checkpoint that was verified.
        source: the checkpoint that it was compared with. None if it was compared with nothing.
        passed: True if no finding is a fault.
        checks: the checks that ran, by name.
        findings: everything that is wrong or worth knowing. `is_fault` marks what is wrong.
        made: the record that the checkpoint's nf4conv.json holds: command, version, options and
            source. None if it has no such file.
        weights: one row for each packed weight.
        kinds: the same rows, summed over the weights of one kind of module.
        sizes: bytes by use: "codes", "scales", "tables" (code maps and quant states) and
            "not_packed".
        parameters: the number of elements of all tensors.
        bits_per_parameter: bits per parameter of the whole checkpoint.
        identical: True if every compared byte is the one that quantizing the source gives. None
            without a source.
        settings: the options, the device and the versions that the verification used.
        seconds: wall clock time of the verification.
    """

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
    """Describes how two checkpoints differ.

    Attributes:
        a: the first checkpoint.
        b: the second checkpoint.
        passed: True if every tensor is identical, or within the tolerance that was given.
        notes: lines that the user should read.
        tensors: one row for each name of a tensor.
        kinds: the same rows, summed over the tensors of one kind of module.
        counts: the number of tensors of each status that occurs.
        settings: the options, the device and the versions that the comparison used.
        seconds: wall clock time of the comparison.
    """

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
    """Describes how far the answers of a model in 4 bits are from those of its source.

    Attributes:
        out: the model in 4 bits.
        source: the model that it was made from.
        passed: True if `kl` is at most --max-kl, or if no --max-kl was given.
        kind: the kind of model: "causal", "seq2seq", "masked" or "encoder".
        text: where the tokens come from.
        tokens: the number of tokens that both models read.
        device: the device that both models ran on.
        arithmetic: the arithmetic that both models used.
        figures: the results by name. An encoder has `cosine` (mean over positions), `cosine_least`
            (the smallest) and `cosine_pooled` (of the mean state of each window). All other models
            have the divergence of the predicted next token in nats as `kl` (mean over positions),
            `kl_median` and `kl_99th` (percentile), the share of positions, from 0 to 1, where both
            predict the same token as `agreement`, and `perplexity_source` and `perplexity`.
    """

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
    """Describes what a checkpoint holds, as its headers tell.

    Attributes:
        path: the checkpoint, as it was given.
        files: the names of the weight files.
        config: what config.json says about a quantization. None if it says nothing.
        model_type: `model_type` of the config. None if there is none.
        made: the record that the checkpoint's nf4conv.json holds: command, version, options and
            source. None if it has no such file.
        notes: a line for each kind of module whose tensors are not all stored alike.
        gpu_bytes: an estimate of the GPU memory, in bytes, that loading the checkpoint takes.
        tensors: one row for each tensor. All components of a packed weight share one row.
        kinds: the same rows, summed over the tensors of one kind of module.
        totals: the sums over the whole checkpoint.
        findings: what is wrong with a 4-bit checkpoint, as far as headers, quant states and config
            tell.
    """

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
    """Describes the machine and its software, for a bug report.

    Attributes:
        python: the version of Python.
        platform: the operating system, its release and the processor.
        packages: the version of each package, by name. None for one that is not installed.
        cores: the number of CPU cores that this process may use.
        gpus: name, compute capability and memory of each GPU that torch finds.
        engine: what computes with --device auto, where, and why.
        folders: the folders of compiled kernels and of downloads, by what they hold.
    """

    command: ClassVar[str] = "env"

    python: str  # its version
    platform: str  # system, release and processor
    packages: Mapping[str, str | None]  # their versions; None for one that is not installed
    cores: int  # of the CPU, that this process may use
    gpus: tuple[str, ...]  # name, compute capability and memory of each that torch finds
    engine: str  # who computes with --device auto, where, and why
    folders: Mapping[str, str]  # where compiled kernels and downloads are kept
