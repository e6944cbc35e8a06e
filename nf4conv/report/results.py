"""The results of all commands. docs/generate.py describes them by the `Attributes` below."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Final

from nf4conv.check.structure import Finding
from nf4conv.format.layout import split_component
from nf4conv.options import VerifyOptions
from nf4conv.plan.rows import (
    KindRow,
    PlanTotals,
    TensorRow,
    distance,
    kind_of,
)
from nf4conv.sources.record import name_of

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
        reading_seconds: an estimate of the seconds that reading the source takes on this machine,
            after reading a little of it. Computing and writing go on meanwhile, and can take
            longer. None for a source that is not on this disk.
        notes: lines that the user should read.
    """

    command: str
    source: str
    totals: PlanTotals
    kinds: tuple[KindRow, ...]
    tensors: tuple[TensorRow, ...]
    config: Mapping[str, Any] | None
    reading_seconds: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class VerificationSummary:
    """Sums up what `quantize --verify` measured, as nf4conv.json keeps it.

    Attributes:
        packed: the number of weights that are packed.
        copied: the number of tensors that are kept.
        largest_relative_error: the largest relative error of a weight, to six digits: those do not
            depend on how the work was divided.
    """

    packed: int
    copied: int
    largest_relative_error: float

    @classmethod
    def sum_up(cls, parts: Sequence["VerificationSummary"]) -> "VerificationSummary":
        """Sums up shards, or submodels."""
        return cls(
            packed=sum(part.packed for part in parts),
            copied=sum(part.copied for part in parts),
            largest_relative_error=max((one.largest_relative_error for one in parts), default=0.0),
        )

    @classmethod
    def from_record(cls, record: Any) -> "VerificationSummary | None":
        """Reads what a record keeps; None if it holds something else."""
        names = [one.name for one in fields(cls)]
        if not isinstance(record, dict) or not record.keys() >= {*names}:
            return None
        figures = [record[name] for name in names]
        if any(type(figure) not in (int, float) for figure in figures):  # a bool is no figure
            return None
        return cls(*figures)


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


def used_by(runs: Sequence[RunReport]) -> dict[str, Any]:
    """Returns the seconds and the memory that several runs took, by the fields of a report."""
    seconds: Counter[str] = Counter()
    for run in runs:
        seconds.update(run.seconds_by_activity)
    return {
        "seconds_by_activity": dict(seconds),
        "host_peak_bytes": max(run.host_peak_bytes for run in runs),
        "device_peak_bytes": max(run.device_peak_bytes for run in runs),
    }


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


def folder_name(place: str) -> str:
    """Returns the name of a folder without its path. A name on the Hub stays as it is."""
    path = Path(place)
    return name_of(path) if path.is_absolute() or path.exists() else place


@dataclass(frozen=True)
class VerifyReport:
    """Describes what verification found.

    Attributes:
        path: the checkpoint that was verified.
        source: the checkpoint that it was compared with. None if it was compared with nothing.
        passed: True if no finding is a fault, and something says which differences are allowed.
        checks: the checks that ran, by the names in docs/verify.md: True if one found no fault.
        findings: everything that is wrong or worth knowing. `is_fault` marks what is wrong.
        made: the record that the checkpoint's nf4conv.json holds: command, version, options,
            weights and source. None if it has no such file.
        weights: one row for each packed weight.
        kinds: the same rows, summed over the weights of one kind of module.
        tensors: one row for each tensor that is not packed and was compared with the source, or
            with what the source decodes to.
        relation: how the checkpoint says that it was made from the source: "quantized", "decoded",
            or "none" if nothing says it.
        bytes: the size of all tensors.
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
    passed: bool
    checks: Mapping[str, bool]
    findings: tuple[Finding, ...]
    made: Mapping[str, Any] | None
    weights: tuple[TensorRow, ...]
    kinds: tuple[KindRow, ...]
    tensors: tuple[TensorRow, ...]
    relation: str
    bytes: int
    parameters: int
    bits_per_parameter: float
    identical: bool | None
    options: VerifyOptions
    device: str
    seconds: float

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
        what = "a decoded checkpoint" if self.relation == "decoded" else "a checkpoint"
        found = self._difference()
        if self.relation == "quantized":
            what = f"{len(self.weights):,} packed weights"
            found = self._largest_error()
        faults = sum(1 for finding in self.findings if finding.is_fault)
        if faults:
            noun = "fault" if faults == 1 else "faults"
            return f"FAILED: {faults:,} {noun} in {what}, {found}"
        if self.source is None:
            return f"sound: {what}, {found}"
        if self.relation != "none":
            return f"passed: {what}, {found}"
        if self.passed:
            return f"within the tolerance: {what}, {found}"
        return (
            f"compared, not judged: {what}, {found}; nothing says how it was made from the source: "
            f"--tolerance says what you accept"
        )

    def _largest_error(self) -> str:
        """Says how packed weights compare with the source."""
        errors = [row.error for row in self.weights if row.error is not None]
        if not errors:
            return "not compared with a source"
        found = f"largest relative error {max(errors):.4f}"
        if self.passed and self.identical:
            recorded = any(row.is_calibrated and row.error for row in self.weights)
            gives = "calibration recorded" if recorded else "quantizing the source gives"
            found += f", byte for byte what {gives}"
        return found

    def _difference(self) -> str:
        """Says how tensors that are not packed compare with the source."""
        if self.source is None:
            return "not compared with a source"
        compared = f"{len(self.tensors):,} tensors"
        unlike = [row.errors for row in self.tensors if row.errors and row.errors.differing]
        if unlike:
            found = f"{len(unlike):,} of {compared} differ"
            if self.relation == "none":
                worst = max((errors.relative_error for errors in unlike), key=distance)
                found += f", largest relative error {worst:.4g}"
            return f"{found}, largest difference {max(one.largest for one in unlike):.4g}"
        if self.relation == "decoded":
            return f"{compared} bit for bit what decoding the source gives"
        return f"all values of {compared} equal those of the source"


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
        tensors: one row for each tensor. All components of a packed weight share one row.
        kinds: the same rows, summed over the tensors of one kind of module.
        totals: the sums over the whole checkpoint.
        findings: what is wrong with a 4-bit checkpoint, as far as headers, quant states and config
            tell.
        experts: how experts in 4 bits are stored, and what loads them. Empty if there is
            nothing to say.
    """

    command: ClassVar[str] = "inspect"

    path: str
    files: tuple[str, ...]
    config: Mapping[str, Any] | None
    model_type: str | None
    made: Mapping[str, Any] | None
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
    passed: bool
    kind: str
    text: str
    tokens: int
    device: str
    arithmetic: str
    evaluations: tuple[Evaluation, ...]


@dataclass(frozen=True)
class Environment:
    """Describes the machine and its software, for a bug report.

    Attributes:
        values: what was found, by what it is about: "python", the name of a package, "GPUs",
            "--device auto", and others.
    """

    command: ClassVar[str] = "env"

    values: Mapping[str, str]
