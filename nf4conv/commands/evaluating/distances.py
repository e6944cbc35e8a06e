"""Measures how far the answers of two models are apart, for `nf4conv evaluate`."""

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

_NORMAL_95: Final = 1.96  # standard errors on either side of a mean


@dataclass
class TokenDistances:
    """Gathers how far the predictions of two models are apart, one number for each position."""

    divergence: list[torch.Tensor] = field(default_factory=list)  # Kullback-Leibler, in nats
    by_window: list[torch.Tensor] = field(default_factory=list)  # its mean over each window
    agreement: list[torch.Tensor] = field(default_factory=list)  # whether the best token is one
    loss_source: list[torch.Tensor] = field(default_factory=list)  # in nats
    loss: list[torch.Tensor] = field(default_factory=list)  # in nats

    def add(self, before: torch.Tensor, after: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds log-probabilities of the original and of the model in 4 bits, and their tokens."""
        # what the source rules out adds nothing
        ruled_out = before.isneginf()
        probabilities = before.exp()
        terms = probabilities * (before - after)
        terms = torch.where(ruled_out, 0, terms)
        divergence = terms.sum(dim=-1, dtype=torch.float64)
        best_before = before.argmax(dim=-1)
        best_after = after.argmax(dim=-1)
        tokens = targets[..., None]
        self.divergence.append(_values(divergence))
        self.by_window.append(_values(divergence.mean(dim=-1)))
        self.agreement.append(_values(best_before == best_after))
        loss_source = -before.gather(-1, tokens)
        loss = -after.gather(-1, tokens)
        self.loss_source.append(_values(loss_source))
        self.loss.append(_values(loss))

    def figures(self) -> dict[str, float]:
        """Returns what Evaluation.figures holds."""
        divergence = torch.cat(self.divergence).numpy()
        figures = {}
        figures["kl"] = float(divergence.mean())
        means = torch.cat(self.by_window).numpy()
        if means.size > 1:
            half = _NORMAL_95 * float(means.std(ddof=1)) / math.sqrt(means.size)
            figures["kl_low"] = figures["kl"] - half
            figures["kl_high"] = figures["kl"] + half
        figures["kl_median"] = float(np.median(divergence))
        figures["kl_99th"] = float(np.quantile(divergence, 0.99))
        figures["agreement"] = _mean(self.agreement)
        figures["perplexity_source"] = _perplexity(self.loss_source)
        figures["perplexity"] = _perplexity(self.loss)
        return figures


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
        cosine = torch.cosine_similarity(before, after, dim=-1)
        mean_before = before.mean(dim=1)
        mean_after = after.mean(dim=1)
        cosine_pooled = torch.cosine_similarity(mean_before, mean_after, dim=-1)
        self.cosine.append(_values(cosine))
        self.cosine_pooled.append(_values(cosine_pooled))

    def figures(self) -> dict[str, float]:
        """Returns what Evaluation.figures holds."""
        return {
            "cosine": _mean(self.cosine),
            "cosine_least": _least(self.cosine),
            "cosine_pooled": _mean(self.cosine_pooled),
        }


def _values(found: torch.Tensor) -> torch.Tensor:
    return found.flatten().double().cpu()


def _mean(values: list[torch.Tensor]) -> float:
    joined = torch.cat(values)
    return float(joined.numpy().mean())


def _least(values: list[torch.Tensor]) -> float:
    joined = torch.cat(values)
    return float(joined.min())


def _perplexity(losses: list[torch.Tensor]) -> float:
    return math.exp(min(_mean(losses), 700))  # a larger exponent gives no float
