"""The methods that transformers' quantizer of bitsandbytes gets.

They change nothing for a checkpoint without packed experts. What needs torch is imported when there
are some: importing torch takes seconds.
"""

import logging
import sys
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

from nf4conv.moe.headers import PackedNames, check_completeness, read_packed_names

log = logging.getLogger("nf4conv.moe")

BYTES_PER_ELEMENT: Final = 0.5625
"""Of packed experts: 4.5 bits without double quantization, 4.13 with it."""


@dataclass
class Loading:
    """What is known of the checkpoint that a quantizer loads.

    Attributes:
        model: the model, without weights; None after update_weight_conversions.
        names: what is packed in the files.
        parameters: the parameters that packed experts become; known after
            update_weight_conversions.
    """

    model: Any
    names: PackedNames
    parameters: set[str] = field(default_factory=set)


def install(quantizer: Any) -> None:
    """Replaces methods of Bnb4BitHfQuantizer.

    Args:
        quantizer: the class, of a release that is known.
    """
    prepare = quantizer._process_model_before_weight_loading
    update = quantizer.update_weight_conversions
    element_size = quantizer.param_element_size
    state_dict = quantizer.get_state_dict_and_metadata

    @wraps(prepare)
    def process_before(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = prepare(self, model, *args, **kwargs)
        self._nf4conv = None
        if self.pre_quantized:
            self._nf4conv = look_at(model, kwargs.get("checkpoint_files"))
        return result

    @wraps(update)
    def update_conversions(self: Any, weight_conversions: Any, *args: Any) -> Any:
        conversions = update(self, weight_conversions, *args)
        if self._nf4conv is None:
            return conversions
        return with_experts(self._nf4conv, conversions, self)

    @wraps(element_size)
    def param_element_size(self: Any, model: Any, param_name: str, param: Any) -> float:
        if self._nf4conv is not None and param_name in self._nf4conv.parameters:
            return BYTES_PER_ELEMENT
        size: float = element_size(self, model, param_name, param)
        return size

    @wraps(state_dict)
    def get_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._nf4conv is not None and self._nf4conv.parameters:
            raise ValueError(
                "transformers cannot save a model with 4-bit experts: copy the folder that it was "
                "loaded from; an adapter is saved by PEFT and merged by "
                "`nf4conv dequantize --lora`"
            )
        return state_dict(self, *args, **kwargs)

    quantizer._process_model_before_weight_loading = process_before
    quantizer.update_weight_conversions = update_conversions
    quantizer.param_element_size = param_element_size
    quantizer.get_state_dict_and_metadata = get_state_dict


def look_at(model: Any, files: Any) -> Loading | None:
    """Reads which weights of a checkpoint are packed; None if it has no packed experts, or they are
    somebody else's to load.

    Raises:
        CodecError: an expert, or a tensor of one, is missing.
    """
    names = read_packed_names(files or ())
    if not names.experts or not _stacks_experts(model):
        return None
    if _unsloth_is_there():
        log.warning("nf4conv.moe stands back: Unsloth loads 4-bit experts in its own way")
        return None
    check_completeness(names)
    return Loading(model, names)


def _stacks_experts(model: Any) -> bool:
    return bool(_expert_parameters(model))


def _expert_parameters(model: Any) -> list[str]:
    """Returns the names of the 3-D parameters of routed experts."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and ".experts." in f".{name}"
    ]


def _unsloth_is_there() -> bool:
    """Returns whether Unsloth has been imported, and has patched transformers for itself."""
    return "unsloth" in sys.modules or "unsloth_zoo" in sys.modules


def with_experts(loading: Loading, conversions: list[Any], hf_quantizer: Any) -> list[Any]:
    """Puts converters for packed experts before those of the model.

    Args:
        loading: gets the parameters that stay packed.
        conversions: of the model and of its quantizer.
        hf_quantizer: transformers' quantizer.
    """
    from transformers.integrations import moe

    from nf4conv.moe.converters import (
        converters_of_experts,
        decode_routers,
        parameters_of_packed,
    )
    from nf4conv.moe.dispatch import install as install_dispatch
    from nf4conv.moe.tensor import know_transformers_operators

    parameters = _expert_parameters(loading.model)
    made = converters_of_experts(conversions, parameters, loading.names, hf_quantizer)
    loading.parameters = parameters_of_packed(made + conversions, loading.names, loading.model)
    loading.model = None
    if not loading.parameters:
        return conversions
    decode_routers(conversions)
    know_transformers_operators()
    install_dispatch(type(moe.ALL_EXPERTS_FUNCTIONS))
    log.warning(
        "nf4conv.moe keeps %d parameters of experts in 4 bits (NF4CONV_MOE=0 switches this off)",
        len(loading.parameters),
    )
    return made + conversions
