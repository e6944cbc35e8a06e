"""Keeps PEFT's layers around packed experts out of compiled graphs.

PEFT adapts a parameter by putting a parametrization in its place at every forward pass, which torch
cannot trace for experts in 4 bits. Such a layer is then called as it stands; what is between the
layers is compiled.
"""

import sys
from typing import Any, Final

from nf4conv.inference.moe.dispatch import outside_of_graphs
from nf4conv.inference.moe.waiting import WaitingFor, is_waiting_for

_LAYERS: Final = "peft.tuners.lora.layer"
_CLASS: Final = "ParamWrapper"

_REASON: Final = "LoRA on 4-bit experts is computed outside of compiled graphs; leave fullgraph off"


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
        wrapper.forward = outside_of_graphs(wrapper.forward, _REASON, _adapts_packed)
    return True


def _adapts_packed(wrapper: Any) -> bool:
    """Returns True if a layer of PEFT is around packed experts."""
    return getattr(wrapper.get_base_layer(), "_nf4conv_is_packed", False)
