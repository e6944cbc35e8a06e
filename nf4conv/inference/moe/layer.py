"""Says what of a layer of experts is packed: what forward.py computes with."""

from typing import Any, NamedTuple

import torch

from nf4conv.inference.moe.adapted import AdaptedExperts, Factors
from nf4conv.inference.moe.tensor import Experts4bit


class PackedLayer(NamedTuple):
    """The weights of a layer of packed experts.

    Attributes:
        up: `gate_up_proj`, or `up_proj` where experts have no gate.
        down: `down_proj`.
        up_factors: LoRA on `up`; empty without LoRA.
        down_factors: LoRA on `down`; empty without LoRA.
    """

    up: Experts4bit
    down: Experts4bit
    up_factors: tuple[Factors, ...]
    down_factors: tuple[Factors, ...]


def packed_weights(module: torch.nn.Module) -> PackedLayer | None:
    """Returns the weights of a layer of experts; None unless both are packed."""
    name = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    up, down = _split(getattr(module, name, None)), _split(getattr(module, "down_proj", None))
    if up is None or down is None:
        return None
    return PackedLayer(up[0], down[0], up[1], down[1])


def _split(weight: Any) -> tuple[Experts4bit, tuple[Factors, ...]] | None:
    """Returns packed experts and the LoRA on them; None if a weight is neither."""
    if isinstance(weight, AdaptedExperts):
        return weight.base, weight.factors
    return (weight, ()) if isinstance(weight, Experts4bit) else None
