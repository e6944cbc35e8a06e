"""The results of commands that look at a checkpoint, a model or this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nf4conv.report.rows.inspection import InspectedKind, InspectedRow, InspectionTotals
from nf4conv.sources.stored_weights import Finding


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
        gpu_bytes: an estimate of the GPU memory, in bytes, that loading the checkpoint takes.
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
    gpu_bytes: int
    tensors: tuple[InspectedRow, ...]
    kinds: tuple[InspectedKind, ...]
    totals: InspectionTotals
    findings: tuple[Finding, ...] = ()
    experts: str = ""


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
            `kl_low` and `kl_high` (95 % interval of that mean, by how windows differ; not for one
            window), `kl_median` and `kl_99th` (percentile), the share of positions, from 0 to 1,
            where both predict the same token as `agreement`, and `perplexity_source` and
            `perplexity`.
        bytes: the size of all tensors of the model in 4 bits.
        bits_per_weight: codes and scales of the linear weights, for each of their elements. Linear
            weights are those that one at least of the models evaluated together has packed. None
            if there are none.
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
    bytes: int = 0
    bits_per_weight: float | None = None

    def rows(self) -> dict[str, str]:
        """Returns the lines of a table: what was measured, and how, in words and figures."""
        lines = {}
        for name, value in self.figures.items():
            lines[name.replace("_", " ")] = f"{value:.5g}"
        if self.bits_per_weight is not None:
            lines["bits per weight"] = f"{self.bits_per_weight:.3f}"
        lines["size"] = f"{self.bytes / 1e6:,.1f} MB"
        lines["text"] = f"{self.tokens:,} tokens of {self.text}"
        lines["run"] = f"on {self.device}, {self.arithmetic}"
        return lines


@dataclass(frozen=True)
class Evaluations:
    """Describes several forms of one model in 4 bits, side by side.

    Attributes:
        passed: True if each of them passed.
        evaluations: one for each form, in the order in which they were given. All read the same
            tokens.
    """

    command: ClassVar[str] = "evaluate"

    passed: bool
    evaluations: tuple[Evaluation, ...]


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
