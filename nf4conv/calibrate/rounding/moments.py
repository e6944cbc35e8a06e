"""The second moments of a layer's inputs: H = Σ x·xᵀ over tokens x.

The mean squared error of the layer's outputs, for weights that are off by E, is tr(E·H·Eᵀ) divided
by the number of tokens. So H is all that rounding needs to know of the activations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

ENOUGH_TOKENS: Final = 2
"""Tokens for each input feature from which on second moments stand alone. Experts of a mixture see
fewer than other layers.
"""


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
        with full_precision():
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


@contextmanager
def full_precision() -> Iterator[None]:
    """Lets products of float32 matrices keep float32's precision: no TF32."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
