"""Looks at a checkpoint that is loaded, and has its experts stay packed.

`install` gives methods to transformers' quantizer of bitsandbytes, which change nothing for a
checkpoint without packed experts. `_nf4conv` of a quantizer is the Loading of its checkpoint, or
None. What needs torch is imported when there are packed experts: importing torch takes seconds.
"""

import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from operator import attrgetter
from typing import Any, Final

from nf4conv.errors import CodecError
from nf4conv.inference.moe.loading.headers import PackedNames, is_of_experts, read_packed_names

log = logging.getLogger("nf4conv.inference.moe")

KNOWN: Final = "5.8 to 5.24"
"""The releases of transformers that the loader was tested with."""

QUANTIZER: Final = "transformers.quantizers.quantizer_bnb_4bit"
_CLASS: Final = "Bnb4BitHfQuantizer"

Filled = dict[str, tuple[int, tuple[str, ...]]]
"""For each function by name: how many positional arguments a call gives it, and which keywords."""

_METHODS: Final[Filled] = {
    f"{_CLASS}._process_model_before_weight_loading": (2, ("device_map", "checkpoint_files")),
    f"{_CLASS}.update_weight_conversions": (2, ()),
    f"{_CLASS}.param_element_size": (3, ()),
    f"{_CLASS}.get_state_dict_and_metadata": (2, ()),
    f"{_CLASS}._process_model_after_weight_loading": (2, ()),
}

HOOKS: Final[dict[str, Filled]] = {
    QUANTIZER: _METHODS,
    "transformers.core_model_loading": {
        "ConversionOps": (0, ()),
        "ErnieFuseAndSplitTextVisionExperts": (0, ()),
        "MergeModulelist": (1, ()),
        "SkipParameters": (0, ()),
        "WeightConverter": (3, ()),
        "WeightRenaming": (2, ()),
        "rename_source_key": (5, ()),
    },
    "transformers.modeling_utils": {"PreTrainedModel._get_dtype_plan": (2, ())},
    "transformers.integrations.moe": {"grouped_mm_experts_forward": (4, ())},
}
"""The functions of transformers that the loader calls or replaces, by their modules."""

BYTES_PER_ELEMENT: Final = 0.5625
"""The bytes that an element of packed experts takes without double quantization: 4.5 bits.

With double quantization it takes 4.13 bits.
"""

_SAVING: Final = (
    "transformers cannot save a model with 4-bit experts: copy the folder that it was loaded from; "
    "an adapter is saved by PEFT and merged by `nf4conv dequantize --lora`"
)


@dataclass
class Loading:
    """Holds what is known of the checkpoint that a quantizer loads.

    Attributes:
        model: the model, without weights; None when it is not needed any more.
        names: what is packed in the files; nothing for a 16-bit model.
        parameters: the parameters that are packed in the model.
    """

    model: Any
    names: PackedNames
    parameters: set[str] = field(default_factory=set)


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


def look_at_packed(model: Any, files: Any, device_map: Any) -> Loading | None:
    """Reads which weights of a checkpoint are packed; None if it has no packed experts, or if
    Unsloth, which patches transformers for itself, was imported.

    Raises CodecError if this transformers is not as the loader needs it, its module of experts
    takes no packed ones, or experts are to stay on the disk.
    """
    names = read_packed_names(files or ())
    if not names.experts or "unsloth" in sys.modules:
        return None
    for name in HOOKS:
        importlib.import_module(name)
        reason = misfit(name)
        if reason is not None:
            raise CodecError(f"4-bit experts do not load here: {reason}")
    if not expert_parameters(model):
        for name, parameter in model.named_parameters():
            if parameter.dim() == 3 and is_of_experts(name):
                raise CodecError(
                    f"{name}: no packed experts load into it; Granite's do from transformers 5.13 "
                    f"on, and `nf4conv dequantize` brings any checkpoint back to 16 bits"
                )
        return None
    if isinstance(device_map, dict) and "disk" in device_map.values():
        # accelerate writes tensors by the address of their values, and packed ones have several
        raise CodecError('packed experts cannot stay on the disk: device_map takes a GPU or "cpu"')
    return Loading(model, names)


def misfit(name: str) -> str | None:
    """Returns what of an imported module of transformers the loader cannot work with; or None."""
    version = sys.modules["transformers"].__version__
    for hook, (positions, keywords) in HOOKS[name].items():
        try:
            signature = inspect.signature(attrgetter(hook)(sys.modules[name]))
            signature.bind_partial(*[None] * positions, **dict.fromkeys(keywords))
        except ValueError:  # what derives from a class in C has no signature
            continue
        except (AttributeError, TypeError) as reason:
            return (
                f"{hook} of transformers {version} does not fit ({reason}); "
                f"the loader works with transformers {KNOWN}"
            )
    return None


def expert_parameters(model: Any) -> list[str]:
    """Returns the names of the 3-D parameters of routed experts."""
    names = []
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3 and ".experts." in f".{name}":
            names.append(name)
    return names


def with_experts(loading: Loading, conversions: list[Any], hf_quantizer: Any) -> list[Any]:
    """Puts converters for packed experts before those of the model and its quantizer. `loading`
    gets the parameters that stay packed.
    """
    from nf4conv.inference.moe.adapted import know_adapters
    from nf4conv.inference.moe.forward import patch_layer
    from nf4conv.inference.moe.loading.converters import (
        converters_of_experts,
        decode_routers,
        parameters_of_packed,
    )
    from nf4conv.inference.moe.sharding import install_sharding
    from nf4conv.inference.moe.tensor import know_transformers_operators

    parameters = expert_parameters(loading.model)
    made = converters_of_experts(conversions, parameters, loading.names, hf_quantizer)
    found = parameters_of_packed(made + conversions, loading.names, loading.model, parameters)
    model, loading.parameters, loading.model = loading.model, found, None
    if not found:
        return conversions
    decode_routers(conversions)
    know_transformers_operators()
    know_adapters()
    install_sharding()
    for name in found:
        patch_layer(model.get_submodule(name.rpartition(".")[0]))
    log.warning(
        "nf4conv keeps %d parameters of experts in 4 bits (NF4CONV_MOE=0 switches this off)",
        len(found),
    )
    return made + conversions
