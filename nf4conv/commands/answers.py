"""Measures how far the answers of two models are apart, for `nf4conv evaluate`."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class TokenDistances:
    """Gathers how far the predictions of two models are apart, one number for each position."""

    divergence: list[torch.Tensor] = field(default_factory=list)  # Kullback-Leibler, in nats
    agreement: list[torch.Tensor] = field(default_factory=list)  # whether the best token is one
    loss_source: list[torch.Tensor] = field(default_factory=list)  # in nats
    loss: list[torch.Tensor] = field(default_factory=list)  # in nats

    def add(self, before: torch.Tensor, after: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds log-probabilities of the original and of the model in 4 bits, and their tokens."""
        terms = before.exp() * (before - after)
        terms = torch.where(before.isneginf(), 0, terms)  # what the source rules out adds nothing
        self.divergence.append(_values(terms.sum(dim=-1, dtype=torch.float64)))
        self.agreement.append(_values(before.argmax(dim=-1) == after.argmax(dim=-1)))
        self.loss_source.append(_values(-before.gather(-1, targets[..., None])))
        self.loss.append(_values(-after.gather(-1, targets[..., None])))

    def figures(self) -> dict[str, float]:
        """Returns what Evaluation.figures holds."""
        divergence = torch.cat(self.divergence).numpy()
        return {
            "kl": float(divergence.mean()),
            "kl_median": float(np.median(divergence)),
            "kl_99th": float(np.quantile(divergence, 0.99)),
            "agreement": _mean(self.agreement),
            "perplexity_source": _perplexity(_mean(self.loss_source)),
            "perplexity": _perplexity(_mean(self.loss)),
        }


@dataclass
class StateDistances:
    """Gathers how far the hidden states of two encoders are apart."""

    cosine: list[torch.Tensor] = field(default_factory=list)  # of each position
    cosine_pooled: list[torch.Tensor] = field(default_factory=list)  # of the mean of each window

    def add(
        self,
        before: torch.Tensor,
        after: torch.Tensor,
        targets: torch.Tensor,  # noqa: ARG002
    ) -> None:
        """Adds hidden states of the original and of the model in 4 bits."""
        self.cosine.append(_values(torch.cosine_similarity(before, after, dim=-1)))
        pooled = torch.cosine_similarity(before.mean(dim=1), after.mean(dim=1), dim=-1)
        self.cosine_pooled.append(_values(pooled))

    def figures(self) -> dict[str, float]:
        """Returns what Evaluation.figures holds."""
        return {
            "cosine": _mean(self.cosine),
            "cosine_least": float(torch.cat(self.cosine).min()),
            "cosine_pooled": _mean(self.cosine_pooled),
        }


def _values(found: torch.Tensor) -> torch.Tensor:
    return found.flatten().double().cpu()


def _mean(values: list[torch.Tensor]) -> float:
    return float(torch.cat(values).numpy().mean())


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700))  # a larger exponent is no float
