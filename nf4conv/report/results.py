"""The results of all commands. docs/generate.py describes them by the `Attributes` below."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final

from nf4conv.check.structure import Finding
from nf4conv.format.layout import split_component
from nf4conv.options import VerifyOptions
from nf4conv.plan.rows import KindRow, PlanTotals, TensorRow, bits_per_parameter, kind_of, summed
from nf4conv.report.tolerance import expected_errors

_NUMBERS: Final = re.compile(r"\d[\d.,]*")


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
        notes: lines that the user should read.
    """

    command: str
    source: str
    totals: PlanTotals
    kinds: tuple[KindRow, ...]
    tensors: tuple[TensorRow, ...]
    config: Mapping[str, Any] | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class VerificationSummary:
    """Sums up what `quantize --verify` measured.

    Attributes:
        packed: the number of weights that are packed.
        copied: the number of tensors that are kept.
        largest_relative_error: the largest relative error of a weight.
        median_relative_error: the median of the weights' relative errors.
        bytes_differing: the number of bytes that differ from those that quantizing the source
            gives.
        weights: one row for each packed weight. Empty in a result that was complete before, because
            its nf4conv.json keeps only the sums.
    """

    packed: int
    copied: int
    largest_relative_error: float
    median_relative_error: float
    bytes_differing: int
    weights: tuple[TensorRow, ...] = ()

    @classmethod
    def of(cls, rows: Sequence[TensorRow], copies: int) -> "VerificationSummary":
        """Sums up the rows of packed weights, beside which `copies` tensors were kept."""
        import statistics  # it takes half as long as --help

        found = [row.errors for row in rows if row.errors is not None]
        errors = [one.relative_error for one in found]
        median = statistics.median(errors) if errors else 0.0
        return cls(
            packed=len(rows),
            copied=copies,
            largest_relative_error=max(errors, default=0.0),
            median_relative_error=median,
            bytes_differing=sum(one.differing for one in found),
            weights=tuple(rows),
        )

    @classmethod
    def joined(cls, parts: Sequence[Mapping[str, Any]]) -> "VerificationSummary":
        """Sums up the summaries of several shards, given the `asdict` of each, read from JSON."""
        rows = [TensorRow.from_json(row) for part in parts for row in part["weights"]]
        rows.sort(key=lambda row: row.name)
        return cls.of(rows, sum(part["copied"] for part in parts))

    def to_record(self) -> dict[str, int | float]:
        """Returns the figures as nf4conv.json keeps them.

        They are rounded to the digits that do not depend on how the work was divided.
        """
        return {
            "packed": self.packed,
            "copied": self.copied,
            "largest_relative_error": round(self.largest_relative_error, 6),
            "median_relative_error": round(self.median_relative_error, 6),
            "bytes_differing": self.bytes_differing,
        }

    @classmethod
    def from_record(cls, record: Any) -> "VerificationSummary | None":
        """Reads what `to_record` gave to nf4conv.json; None if the file holds something else."""
        if not isinstance(record, dict):
            return None
        if record.keys() != {one.name for one in fields(cls)} - {"weights"}:
            return None
        for figure in record.values():
            if type(figure) not in (int, float):  # a bool is an int, but no figure
                return None
        return cls(**record)


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Describes a run that wrote a checkpoint: the result of `quantize` and `dequantize`.

    The defaults are those of a run that computed nothing, as an earlier one had made everything.

    Attributes:
        command: "quantize" or "dequantize".
        out: the output folder.
        totals: the sums over all tensors, as in the plan; `bytes_after` is the size of the weight
            files that were written. Of a run that made a part, the sums are those of the part.
        already_complete: True if the result was there before, so that nothing was computed.
        part: the part that this run made, as "2/3". None for a run that made the whole checkpoint.
        device: where the run computed: "cpu", or a GPU as "cuda:0". "none" if it computed nothing.
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
        shards_missing: the number of files that other parts have not made yet. 0 if `out` is whole.
        notes: lines that the user should read.
        verification: what `--verify` measured. None without it.
        loading: Python code that loads what `quantize` made. Empty if nothing says how it is
            loaded.
        install: the command that installs what that code needs. Empty if there is no code.
        push: the command that pushes the result. Empty if it was pushed, and if it has no
            config.json.
        pushed: the address of the commit or pull request on the Hub. None if the result was not
            pushed.
    """

    command: str
    out: str
    totals: PlanTotals
    already_complete: bool = False
    part: str | None = None
    device: str = "none"
    seconds: float = 0.0
    pipeline_seconds: float = 0.0
    seconds_by_activity: Mapping[str, float] = field(default_factory=dict)
    host_baseline_bytes: int = 0
    host_peak_bytes: int = 0
    device_peak_bytes: int = 0
    shards_resumed: int = 0
    shards_missing: int = 0
    notes: tuple[str, ...] = ()
    verification: VerificationSummary | None = None
    loading: str = ""
    install: str = ""
    push: str = ""
    pushed: str | None = None


@dataclass(frozen=True)
class CheckResult:
    """Describes a check that ran.

    Attributes:
        meaning: what the check holds the checkpoint to.
        passed: True if the check found no fault.
    """

    meaning: str
    passed: bool


def grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Groups findings that differ only in the layer or expert, and in numbers; faults first."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: not finding.is_fault):
        _, component = split_component(finding.tensor)
        text = _NUMBERS.sub("", finding.text)
        key = (str(finding.is_fault), finding.check, where(finding), component, text)
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def where(finding: Finding) -> str:
    """Returns the kind of modules that a finding is about, or its file."""
    weight, _ = split_component(finding.tensor)
    return kind_of(weight) if weight else finding.file


@dataclass(frozen=True)
class ComparedTensors:
    """Sums up the tensors that are not packed, compared bit for bit with those of the source.

    Those of a decoded checkpoint are compared with what the source decodes to.

    Attributes:
        compared: the number of tensors.
        differing: the number of those that are not equal.
        values: the number of values in all of them.
        values_differing: the number of values that are not equal.
        largest_difference: the largest |difference| of a float. Infinite where one of the two is
            NaN or infinite, and the other is not.
        largest_relative_error: the largest ‖A - B‖ / ‖A‖ of a tensor, where nothing says how the
            checkpoint was made from the source; otherwise None.
    """

    compared: int
    differing: int
    values: int
    values_differing: int
    largest_difference: float
    largest_relative_error: float | None = None

    @classmethod
    def sum_up(cls, parts: Iterable["ComparedTensors"]) -> "ComparedTensors":
        """Sums up tensors, or submodels."""
        total = cls(0, 0, 0, 0, 0.0)
        for part in parts:
            errors = (total.largest_relative_error, part.largest_relative_error)
            known = [error for error in errors if error is not None]
            total = cls(
                compared=total.compared + part.compared,
                differing=total.differing + part.differing,
                values=total.values + part.values,
                values_differing=total.values_differing + part.values_differing,
                largest_difference=max(total.largest_difference, part.largest_difference),
                largest_relative_error=max(known, default=None),
            )
        return total


@dataclass(frozen=True)
class VerifyReport:
    """Describes what verification found.

    Attributes:
        path: the checkpoint that was verified.
        source: the checkpoint that it was compared with. None if it was compared with nothing.
        passed: True if no finding is a fault, and something says which differences are allowed.
        checks: the checks that ran, by name.
        findings: everything that is wrong or worth knowing. `is_fault` marks what is wrong.
        made: the record that the checkpoint's nf4conv.json holds: command, version, options,
            weights and source. None if it has no such file.
        weights: one row for each packed weight.
        kinds: the same rows, summed over the weights of one kind of module.
        tensors: the tensors that are not packed, as they compare with the source. None without a
            source.
        relation: how the checkpoint says that it was made from the source: "quantized", "decoded",
            or "none" if nothing says it.
        sizes: bytes by use: "codes", "scales", "tables" (code maps and quant states) and
            "not_packed".
        parameters: the number of elements of all tensors.
        bits_per_parameter: bits per parameter of the whole checkpoint.
        identical: True if every compared byte of packed weights is the one that quantizing the
            source gives or, of calibrated weights, the one that calibration recorded; or if every
            value is the one that decoding the source gives. None without a source.
        options: what was asked for.
        device: the device that measured the values.
        seconds: wall clock time of the verification.
    """

    command: ClassVar[str] = "verify"

    path: str
    source: str | None
    passed: bool = field(init=False)
    checks: Mapping[str, CheckResult]
    findings: tuple[Finding, ...]
    made: Mapping[str, Any] | None
    weights: tuple[TensorRow, ...]
    kinds: tuple[KindRow, ...] = field(init=False)
    tensors: ComparedTensors | None
    relation: str
    sizes: Mapping[str, int]
    parameters: int
    bits_per_parameter: float = field(init=False)
    identical: bool | None
    options: VerifyOptions
    device: str
    seconds: float

    def __post_init__(self) -> None:
        is_faulty = any(finding.is_fault for finding in self.findings)
        bits = bits_per_parameter(sum(self.sizes.values()), self.parameters)
        object.__setattr__(self, "passed", self.is_judged and not is_faulty)
        object.__setattr__(self, "kinds", summed(self.weights))
        object.__setattr__(self, "bits_per_parameter", bits)

    @property
    def normal(self) -> list[tuple[str, float, float]]:
        """The relative errors that trained weights usually have, for each format compared.

        Each entry is the format, such as "nf4/64", and the smallest and largest usual error.
        """
        scales_found: dict[tuple[str, int], set[str]] = {}
        for row in self.weights:
            if row.errors is not None and row.format is not None:
                form = (row.format.quant_type, row.format.blocksize)
                scales_found.setdefault(form, set()).add(row.format.scales)
        usual = []
        for quant_type, blocksize in sorted(scales_found):
            found = scales_found[quant_type, blocksize]
            errors = [expected_errors(scales, quant_type, blocksize) for scales in found]
            smallest = min(error.normal for error in errors)
            largest = max(error.heavy for error in errors)
            usual.append((f"{quant_type}/{blocksize}", smallest, largest))
        return usual

    @property
    def is_judged(self) -> bool:
        """True if something says which differences are allowed: how it was made, or the user."""
        options = self.options
        return self.relation != "none" or options.exact or options.tolerance is not None

    @property
    def exit_code(self) -> int:
        """0 if it passed, 1 if something is wrong, 2 if nobody says which differences pass."""
        if self.passed:
            return 0
        return 1 if any(finding.is_fault for finding in self.findings) else 2

    @property
    def verdict(self) -> str:
        """The result in one line. Where nothing was compared, it is not called passed."""
        if any(finding.check == "source" for finding in self.findings):
            return "FAILED: the source is not what this was made from"
        what, found = self._found()
        faults = sum(1 for finding in self.findings if finding.is_fault)
        if faults:
            noun = "fault" if faults == 1 else "faults"
            return f"FAILED: {faults:,} {noun} in {what}, {found}"
        if self.source is None:
            return f"sound: {what}, not compared with a source"
        if self.relation != "none":
            return f"passed: {what}, {found}"
        if self.is_judged:
            return f"within the tolerance: {what}, {found}"
        return (
            f"compared, not judged: {what}, {found}; nothing says how it was made from the source: "
            f"--tolerance says what you accept"
        )

    def _found(self) -> tuple[str, str]:
        """Returns what was verified, and how it compares with the source."""
        if self.relation != "quantized":
            what = "a decoded checkpoint" if self.relation == "decoded" else "a checkpoint"
            return what, self._tensors_found()
        weights = f"{len(self.weights):,} packed weights"
        errors = [row.error for row in self.weights if row.error is not None]
        if not errors:
            return weights, "not compared with a source"
        found = f"largest relative error {max(errors):.4f}"
        if self.passed and self.identical:
            calibrated = sum(row.is_calibrated and (row.error or 0) > 0 for row in self.weights)
            if not calibrated:
                found += ", byte for byte what quantizing the source gives"
            elif calibrated == len(self.weights):
                found += ", byte for byte what calibration recorded"
            else:
                found += (
                    f", byte for byte what calibration recorded of {calibrated:,} weights and what "
                    f"quantizing the source gives of the others"
                )
        return weights, found

    def _tensors_found(self) -> str:
        tensors = self.tensors
        if tensors is None:
            return "not compared with a source"
        compared = f"{tensors.compared:,} tensors"
        if not tensors.differing:
            if self.relation == "decoded":
                return f"{compared} bit for bit what decoding the source gives"
            return f"all values of {compared} equal those of the source"
        found = f"{tensors.differing:,} of {compared} differ"
        if tensors.largest_relative_error is not None:
            found += f", largest relative error {tensors.largest_relative_error:.4g}"
        return f"{found}, largest difference {tensors.largest_difference:.4g}"


@dataclass(frozen=True)
class Inspection:
    """Describes what a checkpoint holds, as its headers tell.

    Attributes:
        path: the checkpoint, as it was given.
        files: the names of the weight files.
        config: what config.json says about a quantization. None if it says nothing.
        model_type: `model_type` of the config. None if there is none.
        made: the record that the checkpoint's nf4conv.json holds: command, version, options,
            weights and source. None if it has no such file.
        notes: a line for each kind of module whose tensors are not all stored alike.
        tensors: one row for each tensor. All components of a packed weight share one row.
        kinds: the same rows, summed over the tensors of one kind of module.
        totals: the sums over the whole checkpoint.
        findings: what is wrong with a 4-bit checkpoint, as far as headers, quant states and config
            tell.
        experts: how the experts of a 4-bit checkpoint are stored, and what loads them. Empty if it
            has none, or if nothing is in 4 bits.
    """

    command: ClassVar[str] = "inspect"

    path: str
    files: tuple[str, ...]
    config: Mapping[str, Any] | None
    model_type: str | None
    made: Mapping[str, Any] | None
    notes: tuple[str, ...]
    tensors: tuple[TensorRow, ...]
    kinds: tuple[KindRow, ...]
    totals: KindRow
    findings: tuple[Finding, ...] = ()
    experts: str = ""


@dataclass(frozen=True)
class Evaluation:
    """Describes how far the answers of a model in 4 bits are from those of its source.

    Attributes:
        out: the model in 4 bits.
        passed: True if `kl` is at most --max-kl, or if no --max-kl was given.
        figures: the results by name. An encoder has `cosine` (mean over positions), `cosine_least`
            (the smallest) and `cosine_pooled` (of the mean state of each window). All other models
            have the divergence of the predicted next token in nats as `kl` (mean over positions),
            `kl_low` and `kl_high` (95 % interval of that mean, by how windows differ; not for one
            window), `kl_median` and `kl_99th` (percentile), the share of positions, from 0 to 1,
            where both predict the same token as `agreement`, and `perplexity_source` and
            `perplexity`.
        bytes: the size of all tensors of the model in 4 bits.
    """

    out: str
    passed: bool
    figures: Mapping[str, float]
    bytes: int


@dataclass(frozen=True)
class Evaluations:
    """Describes one or several forms of one model in 4 bits, side by side.

    Attributes:
        source: the model that they were made from.
        passed: True if each of them passed.
        kind: the kind of model: "causal", "masked" or "encoder".
        text: where the tokens come from.
        tokens: the number of tokens that all models read.
        device: the device that all models ran on.
        arithmetic: the arithmetic that all models used.
        evaluations: one for each form, in the order in which they were given.
    """

    command: ClassVar[str] = "evaluate"

    source: str
    passed: bool = field(init=False)
    kind: str
    text: str
    tokens: int
    device: str
    arithmetic: str
    evaluations: tuple[Evaluation, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "passed", all(one.passed for one in self.evaluations))


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
        lacking: what the operating system lacks, and what that means here, a sentence for each.
        experts: whether transformers loads 4-bit experts here, and which release, or why not.
    """

    command: ClassVar[str] = "env"

    python: str
    platform: str
    packages: Mapping[str, str | None]
    cores: int
    gpus: tuple[str, ...]
    engine: str
    folders: Mapping[str, str]
    lacking: tuple[str, ...] = ()
    experts: str = ""
