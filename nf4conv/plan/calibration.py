"""Says what a calibration will do: which weights, by which text, and what it takes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CalibrationText:
    """Describes a text that calibrates.

    Attributes:
        name: of the file.
        sha256: of the file.
        share: of the tokens, from 0 to 1.
    """

    name: str
    sha256: str
    share: float


@dataclass(frozen=True)
class Calibration:
    """Plans the calibration of one checkpoint.

    Attributes:
        texts: what the model reads.
        tokens: how many tokens calibrate.
        judging_tokens: how many others judge what was gained.
        window: tokens that the model reads together.
        seed: decides which windows of the texts are taken.
        transformers: the version whose code runs the model.
        blocks: the number of blocks.
        weights: names of the weights that are calibrated.
        outputs: of which weights the outputs count: "qkv", "all", or None for those of none.
        bytes_to_read: bytes of the source that are read for it.
        bytes_on_disk: bytes that it takes in the output's work folder.
    """

    texts: tuple[CalibrationText, ...]
    tokens: int
    judging_tokens: int
    window: int
    seed: int
    transformers: str
    blocks: int
    weights: frozenset[str]
    outputs: str | None
    bytes_to_read: int
    bytes_on_disk: int

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
        sha256: of what decodes them, see check/calibrated.py.
        gains: for each weight the error of its outputs on judging windows, relative to that of
            searched scales; 1 where the search was kept.
        few_tokens: how many tokens reached each weight that fewer reached than it needs.
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
