"""Says what a calibration will do: which weights, by which text, and what it takes."""

from collections.abc import Mapping
from dataclasses import dataclass
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
    bytes_to_read: int
    bytes_on_disk: int

    @property
    def knows(self) -> str:
        """Says what the rounding knows of the model."""
        return "activations"

    def described(self) -> dict[str, Any]:
        """Returns the fields of nf4conv.json that are known before anything is computed."""
        texts = []
        for text in self.texts:
            texts.append({"name": text.name, "sha256": text.sha256, "share": text.share})
        return {
            "knows": self.knows,
            "texts": texts,
            "tokens": self.tokens,
            "judging_tokens": self.judging_tokens,
            "window": self.window,
            "seed": self.seed,
            "weights": len(self.weights),
        }


@dataclass(frozen=True)
class CalibrationResult:
    """Says what came of a calibration.

    Attributes:
        made_by: device and versions.
        gains: for each weight the error of its outputs on judging windows, relative to that of
            searched scales; 1 where the search was kept.
        few_tokens: how many tokens reached each weight that fewer reached than it needs.
    """

    made_by: Mapping[str, str]
    gains: Mapping[str, float]
    few_tokens: Mapping[str, int]

    def described(self) -> dict[str, Any]:
        """Returns the fields of nf4conv.json."""
        return {
            "made_by": dict(self.made_by),
            "gains": {name: round(gain, 4) for name, gain in self.gains.items()},
            "few_tokens": dict(self.few_tokens),
        }
