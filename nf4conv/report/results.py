"""The results that commands return. Their fields are the keys of --json, in their order.

docs/generate.py makes docs/json.md from these classes and the `Attributes` in their docstrings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from nf4conv.plan.rows import DequantizationTotals, PlanKind, PlanRow, QuantizationTotals
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

    @classmethod
    def extend(cls: type[ReportT], report: "RunReport", **own: Any) -> ReportT:
        """Returns a report of this kind: the fields of `report`, and those that the kind adds."""
        shared = {field.name: getattr(report, field.name) for field in fields(RunReport)}
        return cls(**shared, **own)


@dataclass(frozen=True)
class DequantizeReport(RunReport):
    """Describes what a dequantization did.

    The fields up to `notes` are those of every run, see RunReport.

    Attributes:
        decoded: the number of weights that were decoded.
    """

    command: ClassVar[str] = "dequantize"

    decoded: int


@dataclass(frozen=True)
class QuantizeReport(RunReport):
    """Describes what a quantization did.

    The fields up to `notes` are those of every run, see RunReport.

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

    packed: int
    parameters: int
    bits_per_parameter: float
    gpu_bytes: int
    loading: str
    advice: str
    verification: rows.VerificationSummary | None = None
    pushed: str | None = None


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

    out: str
    already_complete: bool
    shards: int
    bytes_after: int
    verification: rows.VerificationSummary | None
    seconds: float


@dataclass(frozen=True)
class VerifySettings:
    """Describes how a checkpoint was verified.

    Attributes:
        tolerance: the largest relative error that passes; "default" for that of the format.
        exact: True if every byte had to be the one that quantizing the source gives.
        scales: how the scales were made, by the record of the checkpoint: "absmax" or "search".
        device: the device that measured the values.
        nf4conv: the version of nf4conv.
        torch: the version of torch.
    """

    tolerance: float | str
    exact: bool
    scales: str
    device: str
    nf4conv: str
    torch: str


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

    path: str
    source: str | None
    passed: bool
    checks: Mapping[str, rows.CheckResult]
    findings: tuple[Finding, ...]
    made: Mapping[str, Any] | None
    weights: tuple[rows.WeightRow, ...]
    kinds: tuple[rows.WeightKind, ...]
    sizes: Mapping[str, int]
    parameters: int
    bits_per_parameter: float
    identical: bool | None
    settings: VerifySettings
    seconds: float

    @property
    def normal(self) -> list[tuple[str, float, float]]:
        """The relative errors that trained weights usually have, for each format compared.

        Each entry is the format, such as "nf4/64", and the smallest and largest usual error.
        """
        scales = "absmax"
        if self.made is not None and self.made["options"].get("scales") == "search":
            scales = "search"
        compared = [row for row in self.weights if row.relative_error is not None]
        formats = {(row.quant_type, row.blocksize) for row in compared}
        usual = []
        for quant_type, blocksize in sorted(formats):
            errors = RELATIVE_ERRORS[scales, quant_type][blocksize]
            usual.append((f"{quant_type}/{blocksize}", errors.normal, errors.heavy))
        return usual

    @property
    def verdict(self) -> str:
        """The result in one line."""
        weights = f"{len(self.weights):,} packed weights"
        errors = [row.relative_error for row in self.weights if row.relative_error is not None]
        if errors:
            worst = f"largest relative error {max(errors):.4f}"
        else:
            worst = "not compared with a source"
        if not self.passed:
            faults = sum(1 for finding in self.findings if finding.is_fault)
            noun = "fault" if faults == 1 else "faults"
            return f"FAILED: {faults:,} {noun} in {weights}, {worst}"
        if self.identical:
            worst += ", byte for byte what quantizing the source gives"
        return f"passed: {weights}, {worst}"


@dataclass(frozen=True)
class ComparisonSettings:
    """Describes how two checkpoints were compared.

    Attributes:
        tolerance: the largest relative error that passes. None if only identical tensors pass.
        include: only tensors that match one of these globs were compared. Empty for all.
        exclude: tensors that match one of these globs were not compared.
        device: the device that compared values.
        nf4conv: the version of nf4conv.
        torch: the version of torch.
    """

    tolerance: float | None
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    device: str
    nf4conv: str
    torch: str


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

    a: str
    b: str
    passed: bool
    notes: tuple[str, ...]
    tensors: tuple[rows.ComparedRow, ...]
    kinds: tuple[rows.ComparedKind, ...]
    counts: Mapping[rows.Status, int]
    settings: ComparisonSettings
    seconds: float

    @property
    def verdict(self) -> str:
        """The result in one line."""
        total = len(self.tensors)
        if self.counts.get(rows.Status.IDENTICAL) == total:
            return f"identical: {total:,} tensors, every byte"
        outcome = "within tolerance" if self.passed else "DIFFERENT"
        counted = ", ".join(f"{count:,} {status}" for status, count in self.counts.items())
        line = f"{outcome}: {counted}"
        errors = [row.relative_error for row in self.tensors if row.relative_error is not None]
        if errors:
            line += f"; largest relative error {max(errors):.4g}"
        if not self.passed and self.counts.keys() <= {rows.Status.EQUAL, rows.Status.IDENTICAL}:
            line += " (--tolerance 0 lets these pass)"
        return line


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
        """Returns the lines of a table: what was measured, and how, in words and figures."""
        lines = {}
        for name, value in self.figures.items():
            lines[name.replace("_", " ")] = f"{value:.5g}"
        lines["text"] = f"{self.tokens:,} tokens of {self.text}"
        lines["run"] = f"on {self.device}, {self.arithmetic}"
        return lines


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

    path: str
    files: tuple[str, ...]
    config: Mapping[str, Any] | None
    model_type: str | None
    made: Mapping[str, Any] | None
    notes: tuple[str, ...]
    gpu_bytes: int
    tensors: tuple[rows.InspectedRow, ...]
    kinds: tuple[rows.InspectedKind, ...]
    totals: rows.InspectionTotals
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

    python: str
    platform: str
    packages: Mapping[str, str | None]
    cores: int
    gpus: tuple[str, ...]
    engine: str
    folders: Mapping[str, str]
