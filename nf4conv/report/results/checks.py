"""The result of `verify`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nf4conv.report.rows.weights import CheckResult, ComparedTensors, WeightKind, WeightRow
from nf4conv.report.tolerance import expected_errors
from nf4conv.sources.stored_weights import Finding


@dataclass(frozen=True)
class VerifySettings:
    """Describes how a checkpoint was verified.

    Attributes:
        tolerance: the largest relative error that passes; "default" for that of the format, or
            for none where nothing says how the checkpoint was made.
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
    relation: str
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
    def is_judged(self) -> bool:
        """True if something says which differences are allowed: how it was made, or the user."""
        settings = self.settings
        return self.relation != "none" or settings.exact or settings.tolerance != "default"

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
