"""The methods that transformers' quantizer of bitsandbytes gets.

They change nothing for a checkpoint without packed experts. `_nf4conv` of a quantizer is what
checkpoints.py found out about its checkpoint, or None.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from nf4conv.inference.moe.loading.checkpoints import (
    QUANTIZER,
    log,
    look_at_packed,
    misfit,
    with_experts,
)

BYTES_PER_ELEMENT: Final = 0.5625
"""The bytes that an element of packed experts takes without double quantization: 4.5 bits.

With double quantization it takes 4.13 bits.
"""

_SAVING: Final = (
    "transformers cannot save a model with 4-bit experts: copy the folder that it was loaded from; "
    "an adapter is saved by PEFT and merged by `nf4conv dequantize --lora`"
)


def install(quantizer: Any) -> None:
    """Replaces methods of Bnb4BitHfQuantizer, or says what of it does not fit."""
    reason = misfit(QUANTIZER)
    if reason is not None:
        log.warning("nf4conv does not load 4-bit experts here: %s", reason)
        return
    replacements = (
        _process_model_before_weight_loading,
        update_weight_conversions,
        param_element_size,
        get_state_dict_and_metadata,
        _process_model_after_weight_loading,
    )
    for make in replacements:
        own = getattr(quantizer, make.__name__)
        setattr(quantizer, make.__name__, wraps(own)(make(own)))


def _process_model_before_weight_loading(own: Callable[..., Any]) -> Callable[..., Any]:
    """Looks at the files."""

    def process(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(self, model, *args, **kwargs)
        self._nf4conv = None
        if self.pre_quantized:
            files = kwargs.get("checkpoint_files")
            self._nf4conv = look_at_packed(model, files, kwargs.get("device_map"))
        return result

    return process


def update_weight_conversions(own: Callable[..., Any]) -> Callable[..., Any]:
    """Puts converters for packed experts before the others.

    transformers 5.23 passes the model too; earlier releases do not.
    """

    def update(self: Any, weight_conversions: Any, *args: Any) -> Any:
        conversions = own(self, weight_conversions, *args)
        if self._nf4conv is None:
            return conversions
        return with_experts(self._nf4conv, conversions, self)

    return update


def param_element_size(own: Callable[..., Any]) -> Callable[..., Any]:
    """Says how much memory packed experts need, for device maps and what is reserved before."""

    def size(self: Any, model: Any, param_name: str, *args: Any, **kwargs: Any) -> Any:
        if self._nf4conv is not None and param_name in self._nf4conv.parameters:
            return BYTES_PER_ELEMENT
        return own(self, model, param_name, *args, **kwargs)

    return size


def _process_model_after_weight_loading(own: Callable[..., Any]) -> Callable[..., Any]:
    """Prepares layers of experts for compiled code."""

    def process(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(self, model, *args, **kwargs)
        if self._nf4conv is not None and self._nf4conv.parameters:
            from nf4conv.inference.moe.forward import (
                prepare_layers,  # importing torch takes seconds
            )

            prepare_layers(model)
        return result

    return process


def get_state_dict_and_metadata(own: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses to save packed experts, which no converter of transformers can write."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._nf4conv is not None and self._nf4conv.parameters:
            raise ValueError(_SAVING)
        return own(self, *args, **kwargs)

    return state_dict
