"""Adds up the second moments of what goes into a stage, or into each expert of one.

The sums of a batch are added in the order of the batches, so they are the same whenever they are
computed on the same device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from nf4conv.calibrate.hidden import HiddenStates
from nf4conv.calibrate.model.flow import Call
from nf4conv.calibrate.model.weights import Contents
from nf4conv.calibrate.rounding import SecondMoments
from nf4conv.calibrate.stages import Stage, Target, inputs_of, inputs_of_experts
from nf4conv.errors import SourceError
from nf4conv.format.layout import Format

_MOST_ENERGY: Final = 64.0
"""The most energy that a token may have, relative to the median; a token with more is scaled down.

In large models, the first tokens of a text have activations that would hide all others.
"""

_MOST_BYTES: Final = 4 * 10**9
"""The most bytes of second moments of experts that are added up at a time."""


@dataclass
class BlockAtWork:
    """Holds a block while its weights are in memory.

    Attributes:
        path: the path of the block in the model, for errors.
        module: the block.
        contents: its weights.
        targets: the weights that are calibrated.
        calls: the arguments that each batch calls it with.
        hidden: the hidden states of all windows.
        calibrating: the number of batches that calibrate; the others judge.
        format: the format of the weights in 4 bits.
    """

    path: str
    module: nn.Module
    contents: Contents
    targets: Sequence[Target]
    calls: Sequence[Call]
    hidden: HiddenStates
    calibrating: int
    format: Format

    def run(self) -> None:
        """Runs all windows through the block."""
        for number, hidden in enumerate(self.hidden.batches()):
            self.hidden.replace(number, self.calls[number].run(self.module, hidden))


@dataclass(frozen=True)
class Moments:
    """The second moments of what goes into weights.

    Attributes:
        calibrating: the moments over the windows that calibrate.
        judging: the moments over the windows that judge.
    """

    calibrating: SecondMoments
    judging: SecondMoments

    @classmethod
    def zeros(cls, width: int, device: torch.device) -> "Moments":
        """Returns the moments of no token."""
        return cls(SecondMoments.zeros(width, device), SecondMoments.zeros(width, device))

    def add(self, inputs: torch.Tensor, *, calibrates: bool) -> None:
        """Adds the tokens of a batch, [tokens, in_features]."""
        if len(inputs):
            of_batch = self.calibrating if calibrates else self.judging
            of_batch.add(_capped(inputs))


def _capped(inputs: torch.Tensor) -> torch.Tensor:
    """Returns tokens of which none has far more energy than others."""
    energy = inputs.float().square().sum(dim=1)
    most = _MOST_ENERGY * energy.median()
    if not bool((energy > most).any()) or not bool(most > 0):
        return inputs
    shrunk = (most / energy).clamp(max=1.0).sqrt()
    return inputs.float() * shrunk[:, None]


def moments_of(block: BlockAtWork, stage: Stage) -> Moments:
    """Returns the second moments of what goes into a stage."""
    moments: Moments | None = None
    for number, hidden in enumerate(block.hidden.batches()):
        inputs = inputs_of(block.module, stage, block.calls[number], hidden)
        if moments is None:
            moments = Moments.zeros(inputs.shape[1], inputs.device)
        moments.add(inputs, calibrates=number < block.calibrating)
    assert moments is not None
    _require_finite(block, stage, moments)
    return moments


@dataclass(frozen=True)
class ExpertMoments:
    """The second moments of what goes into one expert.

    Attributes:
        expert: the number of the expert.
        moments: its moments. If too few tokens reach it, those of all experts are blended in.
        few_tokens: the number of tokens that reach it, if that is too few. Otherwise None.
    """

    expert: int
    moments: Moments
    few_tokens: int | None


def moments_of_experts(block: BlockAtWork, stage: Stage) -> Iterator[ExpertMoments]:
    """Yields the second moments of what goes into each expert of a stage.

    All are of the same state of the block: what is put into it meanwhile must not change what goes
    into this stage.
    """
    experts = list(stage.by_expert)
    width = stage.targets[0].job.matrix.shape[1]
    step = max(_MOST_BYTES // (8 * width * width), 1)
    pooled: Moments | None = None
    for start in range(0, len(experts), step):
        mine = experts[start : start + step]
        found, all_of_them = _sums(block, stage, mine, width, is_pooled=pooled is None)
        pooled = pooled or all_of_them
        _require_finite(block, stage, pooled)
        for expert in mine:
            yield _blended(expert, found[expert], pooled)


def _sums(
    block: BlockAtWork, stage: Stage, experts: Sequence[int], width: int, *, is_pooled: bool
) -> tuple[dict[int, Moments], Moments]:
    """Adds up what goes into some experts, and, if asked, what goes into all."""
    device = block.contents.device
    found = {expert: Moments.zeros(width, device) for expert in experts}
    pooled = Moments.zeros(width, device)
    for number, hidden in enumerate(block.hidden.batches()):
        inputs = inputs_of_experts(block.module, stage, block.calls[number], hidden)
        for expert in sorted(inputs):
            calibrates = number < block.calibrating
            if expert in found:
                found[expert].add(inputs[expert], calibrates=calibrates)
            if is_pooled:
                pooled.add(inputs[expert], calibrates=calibrates)
    return found, pooled


def _blended(expert: int, moments: Moments, pooled: Moments) -> ExpertMoments:
    """Returns the moments of an expert; those of all experts are blended in if they are few."""
    tokens = moments.calibrating.tokens
    few = None if moments.calibrating.is_enough() else tokens
    blended = Moments(
        moments.calibrating.blended(pooled.calibrating), moments.judging.blended(pooled.judging)
    )
    return ExpertMoments(expert, blended, few)


def _require_finite(block: BlockAtWork, stage: Stage, moments: Moments) -> None:
    if not bool(moments.calibrating.sums.diagonal().sum().isfinite()):
        raise SourceError(
            f"{block.path}.{stage.path}: what goes into it holds NaN or infinity, so it cannot be "
            f"calibrated; --exclude the weights of the block that makes them, or leave "
            f"--calibrate out"
        )
