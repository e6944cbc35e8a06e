"""Says what a calibration will do: which weights, by which text; and what came of it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nf4conv.options import RunOptions


@dataclass(frozen=True)
class CalibrationText:
    """Describes a text that calibrates: the name of the file, and its SHA-256."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Calibration:
    """Plans the calibration of one checkpoint.

    Attributes:
        texts: what the model reads.
        tokens: the number of tokens that calibrate.
        judging_tokens: the number of other tokens, which judge what was gained.
        window: the number of tokens that the model reads together.
        transformers: the version of transformers whose code runs the model.
        block_bytes: the bytes of each block in the source.
        bytes_spared: the source bytes that the run need not read afterwards to write the result: it
            reads the calibrated weights, which are in 4 bits, instead of the original ones.
        weights: names of the weights that are calibrated.
        outputs: "qkv" or "all", as --calibrate-output has it: the errors of these weights are
            weighed by how much the predictions depend on each output. None without that option.
        carry_out: takes a plan, the output folder, how to use the machine, and what to call with
            the source bytes that have been worked through since the last call. Calibrates what the
            plan says, or goes on with it, and returns the plan that writes it.
    """

    texts: tuple[CalibrationText, ...]
    tokens: int
    judging_tokens: int
    window: int
    transformers: str
    block_bytes: tuple[int, ...]
    bytes_spared: int
    weights: frozenset[str]
    outputs: str | None
    carry_out: Callable[[Any, Path, RunOptions, Callable[[int], None]], Any]

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.block_bytes)

    @property
    def bytes_to_read(self) -> int:
        """The bytes of the source that are read for it: gradients take two more passes."""
        passes = 1 if self.outputs is None else 3
        return passes * sum(self.block_bytes)

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
            "weights": len(self.weights),
        }
