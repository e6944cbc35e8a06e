"""Makes models that were loaded with bitsandbytes multiply with `linear_4bit`, and undoes it."""

from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch

from nf4conv.inference.linear import linear_4bit, make_tables


def patch_linear_4bit(model: torch.nn.Module) -> int:
    """Makes the 4-bit layers of a model multiply with `linear_4bit`.

    Every `bitsandbytes.nn.Linear4bit` of the model gets a new `forward`, and every layer of a class
    derived from it, unless that class has a forward of its own. Nothing else of the model changes.
    Layers whose weights are not packed yet keep bitsandbytes' product until they are; so do layers
    that have run on a CPU, where bitsandbytes packs weights anew for a product of its own. It does
    not matter whether adapters are added before or after, and hooks of accelerate stay where they
    are.

    Args:
        model: changed in place, such as a transformers model that was loaded with a
            BitsAndBytesConfig or from what `nf4conv quantize` wrote.

    Returns:
        The number of layers that were patched; 0 if the model has none.

    Example:
        model = AutoModelForCausalLM.from_pretrained("model-nf4", device_map="cuda")
        nf4conv.patch_linear_4bit(model)
        model.generate(**prompt, cache_implementation="static")  # transformers compiles the step
    """
    patched = 0
    for module, kind in _linear_4bit_layers(model):
        if type(module).forward is not kind.forward:  # it computes something else
            continue
        _replace_forward(module, partial(_forward, module))
        state = getattr(module.weight, "quant_state", None)
        if state is not None and not _is_repacked(state):
            # a graph that is captured before anything has run must find them
            dtype = module.compute_dtype or torch.bfloat16
            make_tables(state.quant_type, dtype, module.weight.device)
        patched += 1
    return patched


def unpatch_linear_4bit(model: torch.nn.Module) -> int:
    """Gives the 4-bit layers of a model bitsandbytes' own product back.

    Args:
        model: what `patch_linear_4bit` changed; changed in place.

    Returns:
        The number of layers that were patched.

    Example:
        nf4conv.unpatch_linear_4bit(model)
    """
    restored = 0
    for module, _ in _linear_4bit_layers(model):
        if _is_ours(vars(module).get("_old_forward")):
            module._old_forward = MethodType(type(module).forward, module)
        elif _is_ours(vars(module).get("forward")):
            del module.forward
        else:
            continue
        restored += 1
    return restored


def _linear_4bit_layers(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yields the layers whose class is Linear4bit or derives from it, and that Linear4bit.

    PEFT's layers around them have a class of the same name.
    """
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ == "Linear4bit" and not kind.__module__.startswith("peft."):
                yield module, kind
                break


def _replace_forward(module: Any, forward: Any) -> None:
    """Gives a layer a new forward, behind the hook of accelerate if there is one."""
    if "_old_forward" in vars(module) and not _is_ours(vars(module).get("forward")):
        module._old_forward = forward
    else:
        module.forward = forward


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, partial) and forward.func is _forward


def _forward(module: Any, x: torch.Tensor) -> Any:
    """Computes what a patched Linear4bit returns for x."""
    weight = module._parameters["weight"]
    state = getattr(weight, "quant_state", None)
    if state is None or _is_repacked(state):
        return type(module).forward(module, x)
    dtype = module.compute_dtype
    if dtype is None or dtype is x.dtype:
        return linear_4bit(x, weight, state, module._parameters["bias"])
    return linear_4bit(x.to(dtype), weight, state, module._parameters["bias"]).to(x.dtype)


def _is_repacked(state: Any) -> bool:
    """Returns True if bitsandbytes has packed a weight for its own product on CPUs.

    It asks for no attribute that is missing: torch.compile would trace what bitsandbytes does then,
    and check its steps again at every call.
    """
    return bool(vars(state).get("packing_format_for_cpu", False))
