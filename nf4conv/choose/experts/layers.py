"""Decides about the experts of a layer together: all are there, and all are packed or none."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from nf4conv.choose.decisions import Keep, Pack
from nf4conv.choose.experts.gathering import Experts
from nf4conv.errors import PlanError
from nf4conv.models.experts import SINGLE_WEIGHT
from nf4conv.models.families import experts_in, has_uneven_experts
from nf4conv.sources.foreign.bitsandbytes import is_in_4_bits
from nf4conv.sources.tensors import TensorInfo

_Layers: TypeAlias = Mapping[str, Mapping[str, Mapping[int, TensorInfo]]]
"""Weights of single experts, by the path of the layer's experts, projection and number."""


def check_layout(decisions: Mapping[str, Pack | Keep], experts: Experts, moe: str | None) -> None:
    """Checks the experts that are stored one by one and are to be packed.

    Args:
        decisions: what becomes of each tensor, by name.
        experts: the experts of the checkpoint.
        moe: "packed" or "portable", as --moe has it; None for a source in 4 bits that keeps its
            layout.

    Raises:
        PlanError: an expert is missing, or has another shape than the others of its layer. Loaders
            put all experts of a layer into one tensor.
    """
    if moe is None:
        check_whole(experts.tensors.values(), experts.config)
        return
    packed = []
    for name, decision in decisions.items():
        if isinstance(decision, Pack) and experts.layer_of(name) is not None:
            packed.append(experts.tensors[name])
    _check_layers(_single_experts(packed), experts.config)


def check_whole(tensors: Iterable[TensorInfo], config: Mapping[str, Any]) -> None:
    """Checks the experts that are stored one by one, packed or not.

    Nothing is checked if the config does not say how many experts there are.

    Args:
        tensors: all tensors of a checkpoint.
        config: the content of its config.json.

    Raises:
        PlanError: an expert is missing, or has another shape than the others of its layer.
    """
    if experts_in(config):
        _check_layers(_single_experts(tensors), config)


def _single_experts(tensors: Iterable[TensorInfo]) -> _Layers:
    """Returns those tensors that are weights of single experts, by layer."""
    layers: dict[str, dict[str, dict[int, TensorInfo]]] = {}
    for tensor in tensors:
        match = SINGLE_WEIGHT.match(tensor.name)
        if match is not None:
            projections = layers.setdefault(match[1], {})
            projections.setdefault(match[3], {})[int(match[2])] = tensor
    return layers


def _check_layers(layers: _Layers, config: Mapping[str, Any]) -> None:
    """Raises a PlanError unless all experts of each layer are there and have one shape."""
    is_uneven = has_uneven_experts(config)
    if is_uneven or "model_type" not in config:
        return
    numbers = experts_in(config)
    for layer, projections in layers.items():
        count = 1 + max(max(weights) for weights in projections.values())
        if numbers and count > max(numbers):
            raise PlanError(
                f"{layer}: {count} experts, but config.json says {max(numbers)}: the checkpoint "
                f"is of another model than its config.json"
            )
        if numbers and count not in numbers:
            count = min(number for number in numbers if number > count)  # the last are missing
        for projection, weights in projections.items():
            _check_projection(layer, projection, weights, count)


def _check_projection(
    layer: str, projection: str, weights: Mapping[int, TensorInfo], count: int
) -> None:
    """Raises a PlanError unless `count` experts have this projection, all in one shape."""
    first = next(iter(weights.values()))
    for expert in range(count):
        weight = weights.get(expert)
        if weight is None:
            raise PlanError(
                f"{first.file}: {layer}.{expert}.{projection}.weight is missing: "
                f"of {count} experts of this layer {len(weights)} have it",
                path=first.file,
            )
        if weight.shape != first.shape:
            raise PlanError(
                f"{weight.file}: {weight.name} is {list(weight.shape)}, but {first.name} of the "
                f"same layer is {list(first.shape)}: loaders put all experts of a layer into one "
                f"tensor",
                path=weight.file,
                tensor=weight.name,
            )


def alike_in_layers(
    decisions: Mapping[str, Pack | Keep], experts: Experts
) -> dict[str, Pack | Keep]:
    """Keeps all experts of a layer where some of them have to be kept.

    transformers 5 and vLLM put the experts of a layer into one tensor, which is packed or not. What
    the source itself has in 4 bits beside experts in 16 bits stays as it is.
    """
    if "model_type" not in experts.config:
        return dict(decisions)
    packed: dict[str, list[str]] = {}
    kept: dict[str, list[str]] = {}
    for name, decision in decisions.items():
        layer = experts.layer_of(name)
        if layer is not None:
            group = packed.setdefault(layer, [])
            if isinstance(decision, Keep):
                group = kept.setdefault(layer, [])
            group.append(name)
    alike = dict(decisions)
    for layer, names in kept.items():
        others = packed.get(layer, [])
        if not others or _is_mixed_in_source(experts, names, others):
            continue
        first = decisions[names[0]]
        assert isinstance(first, Keep)
        for name in others:
            why = f"loaders need the experts of a layer alike, and one is kept: {first.reason}"
            alike[name] = Keep(why, is_linear=name not in experts.stacks)
    return alike


def _is_mixed_in_source(experts: Experts, kept: Sequence[str], packed: Sequence[str]) -> bool:
    """Returns True if the packed experts of a layer are in 4 bits already, and the kept are not."""
    kept_in_4_bits = any(is_in_4_bits(experts.tensors[name]) for name in kept)
    return not kept_in_4_bits and all(is_in_4_bits(experts.tensors[name]) for name in packed)
