"""Keeps PEFT's layers around packed experts out of compiled graphs.

PEFT adapts a parameter by putting a parametrization in its place at every forward pass, which torch
cannot trace for experts in 4 bits. Such a layer is then called as it stands; what is between the
layers is compiled.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch

from nf4conv.moe.waiting import WaitingFor, is_waiting_for

_LAYERS: Final = "peft.tuners.lora.layer"
_CLASS: Final = "ParamWrapper"


def leave_adapters_out_of_graphs() -> None:
    """Changes PEFT's class for adapted parameters, now or when PEFT is imported; once."""
    if not _change_if_there() and not is_waiting_for(_LAYERS):
        sys.meta_path.insert(0, WaitingFor(_LAYERS, _change_if_there))


def _change_if_there() -> bool:
    """Changes the class if PEFT has been imported; returns whether it has."""
    wrapper = getattr(sys.modules.get(_LAYERS), _CLASS, None)
    if wrapper is None:
        return False
    if "_nf4conv" not in vars(wrapper):
        wrapper._nf4conv = True
        wrapper.forward = _outside_of_graphs(wrapper.forward)
    return True


def _outside_of_graphs(forward: Callable[..., Any]) -> Callable[..., Any]:
    reason = "LoRA on 4-bit experts is computed outside of compiled graphs; leave fullgraph off"
    disable: Any = torch.compiler.disable
    outside = disable(forward, reason=reason)

    @wraps(forward)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.get_base_layer(), "_nf4conv_is_packed", False):
            return outside(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return compute
