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
    replacements: dict[str, Callable[..., Any]] = {
        "_process_model_before_weight_loading": _look_at_files,
        "update_weight_conversions": _convert_experts,
        "param_element_size": _size_of_element,
        "get_state_dict_and_metadata": _refuse_to_save,
        "_process_model_after_weight_loading": _prepare_for_compiling,
    }
    for name, replacement in replacements.items():
        setattr(quantizer, name, _in_place_of(getattr(quantizer, name), replacement))


def _in_place_of(own: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that gives a replacement the method of transformers first."""

    @wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(own, self, *args, **kwargs)

    return method


def _look_at_files(own: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Looks at the files."""
    result = own(self, model, *args, **kwargs)
    self._nf4conv = None
    if self.pre_quantized:
        files = kwargs.get("checkpoint_files")
        self._nf4conv = look_at_packed(model, files, kwargs.get("device_map"))
    return result


def _convert_experts(own: Any, self: Any, weight_conversions: Any, *args: Any) -> Any:
    """Puts converters for packed experts before the others.

    transformers 5.23 passes the model too; earlier releases do not.
    """
    conversions = own(self, weight_conversions, *args)
    if self._nf4conv is None:
        return conversions
    return with_experts(self._nf4conv, conversions, self)


def _size_of_element(
    own: Any, self: Any, model: Any, param_name: str, *args: Any, **kwargs: Any
) -> Any:
    """Says how much memory packed experts need, for device maps and what is reserved before."""
    if self._nf4conv is not None and param_name in self._nf4conv.parameters:
        return BYTES_PER_ELEMENT
    return own(self, model, param_name, *args, **kwargs)


def _prepare_for_compiling(own: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepares layers of experts for compiled code."""
    result = own(self, model, *args, **kwargs)
    if self._nf4conv is not None and self._nf4conv.parameters:
        from nf4conv.inference.moe.forward import prepare_layers  # importing torch takes seconds

        prepare_layers(model)
    return result


def _refuse_to_save(own: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses to save packed experts, which no converter of transformers can write."""
    if self._nf4conv is not None and self._nf4conv.parameters:
        raise ValueError(_SAVING)
    return own(self, *args, **kwargs)
