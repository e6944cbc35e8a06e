"""The results of commands that verify a checkpoint or compare two."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nf4conv.report.rows.comparison import ComparedKind, ComparedRow, Status
from nf4conv.report.rows.weights import CheckResult, ComparedTensors, WeightKind, WeightRow
from nf4conv.report.tolerance import expected_errors
from nf4conv.sources.stored_weights import Finding


@dataclass(frozen=True)
class VerifySettings:
    """Describes how a checkpoint was verified.

    Attributes:
        tolerance: the largest relative error that passes; "default" for that of the format.
        exact: True if every byte had to be the one that quantizing the source gives.
        scales: how the weights were scaled, by the record of the checkpoint: "absmax", "search",
            "calibrated", or several of them with commas.
        device: the device that measured the values.
        nf4conv: the version of nf4conv.
        torch: the version of torch.
        lora: the adapters that were merged into the source, as they were given.
    """

    tolerance: float | str
    exact: bool
    scales: str
    device: str
    nf4conv: str
    torch: str
    lora: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerifyReport:
    """Describes what verification found.

    Attributes:
        path: the checkpoint that was verified.
        source: the checkpoint that it was compared with. None if it was compared with nothing.
        passed: True if no finding is a fault.
        checks: the checks that ran, by name.
        findings: everything that is wrong or worth knowing. `is_fault` marks what is wrong.
        made: the record that the checkpoint's nf4conv.json holds: command, version, options,
            weights and source. None if it has no such file.
        weights: one row for each packed weight.
        kinds: the same rows, summed over the weights of one kind of module.
        tensors: the tensors that are not packed, as they compare with the source. None without a
            source.
        is_decoded: True if `dequantize` made the checkpoint, or another tool that decodes, so that
            no weight is packed.
        sizes: bytes by use: "codes", "scales", "tables" (code maps and quant states) and
            "not_packed".
        parameters: the number of elements of all tensors.
        bits_per_parameter: bits per parameter of the whole checkpoint.
        identical: True if every compared byte of packed weights is the one that quantizing the
            source gives or, of calibrated weights, the one that calibration recorded; or if every
            value is the one that decoding the source gives. None without a source.
        settings: the options, the device and the versions that the verification used.
        seconds: wall clock time of the verification.
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
    tensors: ComparedTensors | None
    is_decoded: bool
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
        scales_found: dict[tuple[str, int], set[str]] = {}
        for row in self.weights:
            if row.relative_error is not None:
                scales_found.setdefault((row.quant_type, row.blocksize), set()).add(row.scales)
        usual = []
        for quant_type, blocksize in sorted(scales_found):
            found = scales_found[quant_type, blocksize]
            errors = [expected_errors(scales, quant_type, blocksize) for scales in found]
            smallest = min(error.normal for error in errors)
            largest = max(error.heavy for error in errors)
            usual.append((f"{quant_type}/{blocksize}", smallest, largest))
        return usual

    @property
    def verdict(self) -> str:
        """The result in one line."""
        what, found = self._found()
        if self.passed:
            return f"passed: {what}, {found}"
        faults = sum(1 for finding in self.findings if finding.is_fault)
        noun = "fault" if faults == 1 else "faults"
        return f"FAILED: {faults:,} {noun} in {what}, {found}"

    def _found(self) -> tuple[str, str]:
        """Returns what was verified, and how it compares with the source."""
        if self.is_decoded:
            return "a decoded checkpoint", self._tensors_found()
        weights = f"{len(self.weights):,} packed weights"
        errors = [row.relative_error for row in self.weights if row.relative_error is not None]
        if not errors:
            return weights, "not compared with a source"
        found = f"largest relative error {max(errors):.4f}"
        if self.passed and self.identical:
            calibrated = sum(row.scales == "calibrated" and row.error > 0 for row in self.weights)
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
        if self.tensors is None:
            return "not compared with a source"
        compared = f"{self.tensors.compared:,} tensors"
        if not self.tensors.differing:
            return f"{compared} bit for bit what decoding the source gives"
        largest = f"largest difference {self.tensors.largest_difference:.4g}"
        return f"{self.tensors.differing:,} of {compared} differ, {largest}"


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
    tensors: tuple[ComparedRow, ...]
    kinds: tuple[ComparedKind, ...]
    counts: Mapping[Status, int]
    settings: ComparisonSettings
    seconds: float

    @property
    def verdict(self) -> str:
        """The result in one line."""
        total = len(self.tensors)
        if self.counts.get(Status.IDENTICAL) == total:
            return f"identical: {total:,} tensors, every byte"
        outcome = "within tolerance" if self.passed else "DIFFERENT"
        counted = ", ".join(f"{count:,} {status}" for status, count in self.counts.items())
        line = f"{outcome}: {counted}"
        errors = [row.relative_error for row in self.tensors if row.relative_error is not None]
        if errors:
            line += f"; largest relative error {max(errors):.4g}"
        if not self.passed and self.counts.keys() <= {Status.EQUAL, Status.IDENTICAL}:
            line += " (--tolerance 0 lets these pass)"
        return line
