"""Keeps packed experts in host memory, and those that are used often on the GPU.

    cache = nf4conv.inference.moe.offload.offload(model, budget=4_000_000_000)

Every layer gets an equal share of the budget. When the router has chosen, the experts that are
missing are copied to the GPU, in the place of those whose last use is longest ago. If a pass needs
more experts than a layer's share holds, it goes on in rounds.
"""

from typing import Any

import torch

from nf4conv.errors import CodecError
from nf4conv.inference.experts.offloaded import OffloadedLayer, expert_bytes
from nf4conv.inference.moe.forward import (
    Projections,
    add_bias,
    is_computable,
    multiply,
    up_projection,
)
from nf4conv.inference.moe.layer import PackedLayer, packed_weights
from nf4conv.inference.moe.tensor import Experts4bit
from nf4conv.inference.moe.weight import PackedWeight


class ExpertCache:
    """The caches of all layers of a model.

    Attributes:
        layers: one for each layer of experts.
    """

    def __init__(self, layers: list[OffloadedLayer]) -> None:
        self.layers = layers

    @property
    def hit_rate(self) -> float:
        """The share of experts that were in the cache when they were needed."""
        hits = sum(layer.hits for layer in self.layers)
        asked = hits + sum(layer.misses for layer in self.layers)
        return hits / asked if asked else 0.0

    def reset_counts(self) -> None:
        """Begins to count anew."""
        for layer in self.layers:
            layer.hits = layer.misses = 0


def offload(model: torch.nn.Module, budget: int) -> ExpertCache:
    """Moves packed experts to host memory; for inference on one GPU.

    Args:
        model: a model that transformers has loaded, with packed experts on the GPU. It may have
            been offloaded before, with another budget.
        budget: bytes of GPU memory for the experts of all layers together.

    Returns:
        The cache, which counts how often an expert was on the GPU when it was needed.

    Raises:
        CodecError: the model has no packed experts, they cannot be offloaded, or the budget holds
            less than one expert of each layer.
    """
    found = []
    for module in model.modules():
        layer = packed_weights(module) if hasattr(module, "is_transposed") else None
        if layer is not None:
            found.append((module, layer))
    if not found:
        raise CodecError("the model has no packed experts to offload")
    caches = []
    for module, layer in found:
        caches.append(_offload_layer(module, layer, budget // len(found)))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return ExpertCache(caches)


def _offload_layer(module: Any, layer: PackedLayer, budget: int) -> OffloadedLayer:
    """Moves the experts of a layer, and lets it compute with what its share of the cache holds."""
    up, down = layer.up.weight, layer.down.weight
    if layer.up_factors or layer.down_factors:
        raise CodecError("experts with LoRA cannot be offloaded: merge the adapter first")
    if up.is_transposed != module.is_transposed or down.is_transposed != module.is_transposed:
        raise CodecError("experts that were packed transposed cannot be offloaded")
    stacks = (*up.parts, *down.parts)
    slots = budget // sum(map(expert_bytes, stacks))
    if slots == 0:
        raise CodecError("the budget holds less than one expert of each layer; give more bytes")
    device = next(iter(module.parameters())).device
    previous = getattr(module, "_nf4conv_offloaded", None)
    if previous is not None:
        device = previous.device
    cache = OffloadedLayer(stacks, slots, device)
    parts = len(up.parts)
    there = PackedWeight(tuple(cache.cached[:parts]), up.rows, up.is_transposed)
    first = up_projection(there, module)
    if first is None:
        raise CodecError("gate and up of experts differ in format: they cannot be offloaded")
    back = up_projection(PackedWeight(tuple(cache.cached[parts:])), _NO_GATE)
    assert back is not None
    host_up = PackedWeight(tuple(cache.host[:parts]), up.rows, up.is_transposed)
    host_down = PackedWeight(tuple(cache.host[parts:]), down.rows, down.is_transposed)
    _set_weight(module, "gate_up_proj" if module.has_gate else "up_proj", layer.up, host_up)
    _set_weight(module, "down_proj", layer.down, host_down)
    module._nf4conv_offloaded = _Computation(cache, Projections(first, back), device)
    return cache


def _set_weight(module: Any, name: str, shown: Experts4bit, weight: PackedWeight) -> None:
    """Replaces a parameter by experts in host memory."""
    parameter = torch.nn.Parameter(Experts4bit(weight, shown.dtype), requires_grad=False)
    setattr(module, name, parameter)


class _NoGate:
    """Stands for a layer that multiplies whole matrices."""

    has_gate = False


_NO_GATE = _NoGate()


class _Computation:
    """Computes an offloaded layer."""

    def __init__(
        self, cache: OffloadedLayer, projections: Projections, device: torch.device
    ) -> None:
        self.cache = cache
        self.projections = projections
        self.device = device

    def __call__(
        self, module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns [tokens, hidden]."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise CodecError("offloaded experts do not train: load the model without offload()")
        if x.device.type == "cuda" and not is_computable(module, x):
            raise CodecError(f"offloaded experts cannot compute with {x.dtype} on this GPU")
        experts = sorted(set(ids.reshape(-1).tolist()))  # waits for the router
        out = None
        for start in range(0, len(experts), self.cache.slots):
            slots = self.cache.fetch(experts[start : start + self.cache.slots])
            part = multiply(module, self.projections, x, slots[ids], weights, names=ids)
            out = part if out is None else out + part
        assert out is not None
        return add_bias(module, out, ids, weights)
