"""Says what a calibration will do: which weights, by which text, and what it takes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nf4conv.format.units import size


@dataclass(frozen=True)
class CalibrationText:
    """Describes a text that calibrates.

    Attributes:
        name: the name of the file.
        sha256: the SHA-256 of the file.
        share: the share of the tokens that come from this text, from 0 to 1.
    """

    name: str
    sha256: str
    share: float


@dataclass(frozen=True)
class Needs:
    """Estimates what a calibration takes, on an H200 and on two cores of a CPU.

    Attributes:
        gpu_seconds: time on a GPU.
        gpu_bytes: memory of the GPU.
        gpu_host_bytes: memory of the host beside it.
        cpu_seconds: time without a GPU.
        cpu_bytes: memory of the host without a GPU.
        disk_bytes: the most bytes in the output's work folder.
    """

    gpu_seconds: float
    gpu_bytes: int
    gpu_host_bytes: int
    cpu_seconds: float
    cpu_bytes: int
    disk_bytes: int

    def described(self) -> str:
        """Returns a line for people."""
        on_gpu = (
            f"{_duration(self.gpu_seconds)} on an H200, with {size(self.gpu_bytes)} of its memory "
            f"and {size(self.gpu_host_bytes)} of the host's"
        )
        on_cpu = (
            f"{_duration(self.cpu_seconds)} on two cores of a CPU, with {size(self.cpu_bytes)} of "
            f"memory"
        )
        disk = f"{size(self.disk_bytes)} of disk meanwhile"
        return f"calibrating takes about {on_gpu}; or {on_cpu}; and {disk}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


@dataclass(frozen=True)
class Calibration:
    """Plans the calibration of one checkpoint.

    Attributes:
        texts: what the model reads.
        tokens: the number of tokens that calibrate.
        judging_tokens: the number of other tokens, which judge what was gained.
        window: the number of tokens that the model reads together.
        seed: decides which windows of the texts are taken.
        transformers: the version of transformers whose code runs the model.
        passes: the number of times that all blocks are run: 1, or 3 with `outputs`.
        block_bytes: the bytes of each block in the source.
        bytes_spared: the source bytes that the run need not read afterwards to write the result: it
            reads the calibrated weights, which are in 4 bits, instead of the original ones.
        weights: names of the weights that are calibrated.
        outputs: "qkv" or "all", as --calibrate-output has it: the errors of these weights are
            weighed by how much the predictions depend on each output. None without that option.
        needs: the time, memory and disk space that it takes.
    """

    texts: tuple[CalibrationText, ...]
    tokens: int
    judging_tokens: int
    window: int
    seed: int
    transformers: str
    passes: int
    block_bytes: tuple[int, ...]
    bytes_spared: int
    weights: frozenset[str]
    outputs: str | None
    needs: Needs

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.block_bytes)

    @property
    def bytes_to_read(self) -> int:
        """The bytes of the source that are read for it."""
        return self.passes * sum(self.block_bytes)

    @property
    def knows(self) -> str:
        """Says what the rounding knows of the model."""
        if self.outputs is None:
            return "activations"
        which = "all weights" if self.outputs == "all" else "the first weights of each block"
        return f"activations, and how predictions depend on the outputs of {which}"

    def described(self) -> dict[str, Any]:
        """Returns the fields of nf4conv.json that are known before anything is computed."""
        return {
            "knows": self.knows,
            "texts": [asdict(text) for text in self.texts],
            "tokens": self.tokens,
            "judging_tokens": self.judging_tokens,
            "window": self.window,
            "seed": self.seed,
            "weights": len(self.weights),
        }


@dataclass(frozen=True)
class CalibratedWeights:
    """Says what came of the weights of a block.

    Attributes:
        sha256: the SHA-256 of all components that decode them, see check/calibrated.py.
        gains: the error of each weight's outputs on judging windows, relative to the error with
            searched scales; 1 for a weight that keeps the searched scales.
        few_tokens: the number of tokens that reached a weight, for each weight that too few
            reached.
    """

    sha256: str
    gains: Mapping[str, float]
    few_tokens: Mapping[str, int]


@dataclass(frozen=True)
class CalibrationResult:
    """Says what came of a calibration.

    Attributes:
        made_by: device and versions.
        blocks: what came of each block, in their order.
    """

    made_by: Mapping[str, str]
    blocks: tuple[CalibratedWeights, ...]

    def described(self) -> dict[str, Any]:
        """Returns the fields of nf4conv.json."""
        blocks = []
        for block in self.blocks:
            described: dict[str, Any] = {
                "sha256": block.sha256,
                "gains": {name: round(gain, 4) for name, gain in block.gains.items()},
            }
            if block.few_tokens:
                described["few_tokens"] = dict(block.few_tokens)
            blocks.append(described)
        return {"made_by": dict(self.made_by), "blocks": blocks}
