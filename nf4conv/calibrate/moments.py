"""Adds up the second moments of what goes into a stage, or into each expert of one: H = Σ x·xᵀ.

The mean squared error of a layer's outputs, for weights that are off by E, is tr(E·H·Eᵀ) divided by
the number of tokens. So H is all that rounding needs to know of the activations.

The sums of a batch are added in the order of the batches, so they are the same whenever they are
computed on the same device.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from nf4conv.calibrate.hidden import HiddenStates
from nf4conv.calibrate.model.filling import Contents
from nf4conv.calibrate.model.flow import Call
from nf4conv.calibrate.stages import Stage, Target, inputs_of
from nf4conv.errors import SourceError
from nf4conv.format.layout import Format

ENOUGH_TOKENS: Final = 2
"""Tokens for each input feature from which on second moments stand alone. Experts of a mixture see
fewer than other layers.
"""

_MOST_ENERGY: Final = 64.0
"""The most energy that a token may have, relative to the median; a token with more is scaled down.

In large models, the first tokens of a text have activations that would hide all others.
"""

_MOST_BYTES: Final = 4 * 10**9
"""The most bytes of second moments of experts that are added up at a time."""


@dataclass
class SecondMoments:
    """Second moments of the inputs of one layer, or of several layers with the same inputs.

    Attributes:
        sums: [in_features, in_features] float32, Σ x·xᵀ.
        tokens: the number of tokens in the sums.
    """

    sums: torch.Tensor
    tokens: int

    @classmethod
    def zeros(cls, in_features: int, device: torch.device) -> "SecondMoments":
        """Returns the moments of no token."""
        return cls(torch.zeros((in_features, in_features), device=device), 0)

    def add(self, inputs: torch.Tensor) -> None:
        """Adds tokens. The same calls in the same order give the same bits on the same device.

        They have any float type, [..., in_features].
        """
        rows = inputs.reshape(-1, self.sums.shape[0]).float()
        self.sums.addmm_(rows.T, rows)
        self.tokens += rows.shape[0]

    def mean(self) -> torch.Tensor:
        """Returns the sums over the number of tokens, [in_features, in_features] float32."""
        return self.sums / max(self.tokens, 1)

    def is_enough(self) -> bool:
        """Returns True if there are tokens enough for these moments to stand alone."""
        return self.tokens >= ENOUGH_TOKENS * self.sums.shape[0]

    def blended(self, layer: "SecondMoments") -> "SecondMoments":
        """Returns these moments, filled up with those of the whole layer if the tokens are few.

        The result is a mean of both, in which the weight of these grows with their tokens.
        """
        if self.is_enough():
            return self
        if self.tokens == 0:
            return layer
        weight = self.tokens / (ENOUGH_TOKENS * self.sums.shape[0])
        mean = weight * self.mean() + (1 - weight) * layer.mean()
        return SecondMoments(mean * self.tokens, self.tokens)


@dataclass
class BlockAtWork:
    """Holds a block while its weights are in memory.

    Attributes:
        module: the block.
        contents: its weights.
        targets: the weights that are calibrated.
        calls: the arguments that each batch calls it with.
        hidden: the hidden states of all windows.
        calibrating: the number of batches that calibrate; the others judge.
        format: the format of the weights in 4 bits.
    """

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


@dataclass
class Moments:
    """The second moments of what goes into some weights with the same inputs.

    Attributes:
        targets: the weights.
        calibrating: the moments over the windows that calibrate.
        judging: the moments over the windows that judge.
        few_tokens: the number of tokens that reach an expert, if that is too few; the moments of
            all experts are blended in then. Otherwise None.
    """

    targets: Sequence[Target]
    calibrating: SecondMoments
    judging: SecondMoments
    few_tokens: int | None = None

    @classmethod
    def zeros(cls, targets: Sequence[Target], device: torch.device) -> "Moments":
        """Returns the moments of no token."""
        width = targets[0].job.matrix.shape[1]
        calibrating = SecondMoments.zeros(width, device)
        return cls(targets, calibrating, SecondMoments.zeros(width, device))

    def add(self, inputs: torch.Tensor, *, calibrates: bool) -> None:
        """Adds the tokens of a batch, [tokens, in_features]."""
        if len(inputs):
            of_batch = self.calibrating if calibrates else self.judging
            of_batch.add(_capped(inputs))

    def blended(self, pooled: "Moments") -> "Moments":
        """Returns the moments of an expert; those of all experts are blended in if they are few."""
        few = None if self.calibrating.is_enough() else self.calibrating.tokens
        calibrating = self.calibrating.blended(pooled.calibrating)
        return Moments(self.targets, calibrating, self.judging.blended(pooled.judging), few)


def _capped(inputs: torch.Tensor) -> torch.Tensor:
    """Returns tokens of which none has far more energy than others."""
    energy = inputs.float().square().sum(dim=1)
    most = _MOST_ENERGY * energy.median()
    if not bool((energy > most).any()) or not bool(most > 0):
        return inputs
    shrunk = (most / energy).clamp(max=1.0).sqrt()
    return inputs.float() * shrunk[:, None]


def moments_of(block: BlockAtWork, stage: Stage) -> Iterator[Moments]:
    """Yields the second moments of what goes into a stage, or into each of its experts.

    All are of the same state of the block: what is put into it meanwhile must not change what goes
    into this stage. Nothing that is yielded is kept here: no tensors are larger.
    """
    device = block.contents.device
    members: defaultdict[int, list[Target]] = defaultdict(list)
    for target in stage:
        members[target.expert or 0].append(target)
    experts = sorted(members)
    pooled = None if stage[0].expert is None else Moments.zeros(stage, device)
    step = max(_MOST_BYTES // (8 * stage[0].job.matrix.shape[1] ** 2), 1)
    for start in range(0, len(experts), step):
        mine = experts[start : start + step]
        found = {expert: Moments.zeros(members[expert], device) for expert in mine}
        _add_all(block, stage, found, pooled if start == 0 else None)
        if start == 0:
            _require_finite(stage, pooled or found[0])
        for expert in mine:
            if pooled is None:
                yield found.pop(expert)
            else:
                yield found.pop(expert).blended(pooled)


def _add_all(
    block: BlockAtWork, stage: Stage, found: Mapping[int, Moments], pooled: Moments | None
) -> None:
    """Adds what goes into some experts, and to `pooled`, if it is given, what goes into all."""
    for number, hidden in enumerate(block.hidden.batches()):
        calibrates = number < block.calibrating
        inputs = inputs_of(block.module, stage, block.calls[number], hidden)
        for expert, tokens in sorted(inputs.items()):
            for moments in (found.get(expert), pooled):
                if moments is not None:
                    moments.add(tokens, calibrates=calibrates)


def _require_finite(stage: Stage, moments: Moments) -> None:
    if not bool(moments.calibrating.sums.diagonal().sum().isfinite()):
        raise SourceError(
            f"{stage[0].job.name}: what goes into it holds NaN or infinity, as if a weight before "
            f"it did or were missing; --exclude the weights of its block, or leave --calibrate out"
        )
