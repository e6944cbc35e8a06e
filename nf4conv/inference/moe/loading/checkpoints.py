"""Looks at a checkpoint that is loaded, and has its experts stay packed.

What needs torch is imported when there are packed experts: importing torch takes seconds.
"""

import importlib
import inspect
import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

from nf4conv.errors import CodecError
from nf4conv.inference.moe.loading.headers import (
    PackedNames,
    read_packed_names,
)

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
    "transformers.integrations.moe": {
        "ALL_EXPERTS_FUNCTIONS.get_interface": (2, ()),
        "grouped_mm_experts_forward": (4, ()),
    },
}
"""The functions of transformers that the loader calls or replaces, by their modules."""


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


def look_at_packed(model: Any, files: Any, device_map: Any) -> Loading | None:
    """Reads which weights of a checkpoint are packed; None if it has no packed experts, or if
    Unsloth, which patches transformers for itself, was imported.

    Raises CodecError if this transformers is not as the loader needs it,
    or experts are to stay on the disk.
    """
    names = read_packed_names(files or ())
    if not names.experts or "unsloth" in sys.modules:
        return None
    _check_transformers()
    parameters = expert_parameters(model)
    if not parameters:
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


def _check_transformers() -> None:
    """Raises CodecError if transformers lacks what the loader hooks into."""
    for name in HOOKS:
        importlib.import_module(name)
        reason = misfit(name)
        if reason is not None:
            raise CodecError(f"4-bit experts do not load here: {reason}")


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
    from nf4conv.inference.moe.loading.converters import (
        converters_of_experts,
        decode_routers,
        parameters_of_packed,
    )

    parameters = expert_parameters(loading.model)
    made = converters_of_experts(conversions, parameters, loading.names, hf_quantizer)
    found = parameters_of_packed(made + conversions, loading.names, loading.model, parameters)
    model, loading.parameters, loading.model = loading.model, found, None
    if not found:
        return conversions
    decode_routers(conversions)
    prepare_transformers(model, found)
    log.warning(
        "nf4conv keeps %d parameters of experts in 4 bits (NF4CONV_MOE=0 switches this off)",
        len(found),
    )
    return made + conversions


def prepare_transformers(model: Any, parameters: Iterable[str]) -> None:
    """Makes transformers' layers of experts ready for packed weights, given the model without
    weights and the parameters that are packed.
    """
    from transformers.integrations import moe

    from nf4conv.inference.moe.adapted import know_adapters
    from nf4conv.inference.moe.forward import install_dispatch, leave_out_of_graphs
    from nf4conv.inference.moe.sharding import install_sharding
    from nf4conv.inference.moe.tensor import know_transformers_operators

    know_transformers_operators()
    know_adapters()
    install_sharding()
    install_dispatch(type(moe.ALL_EXPERTS_FUNCTIONS))
    for name in parameters:
        leave_out_of_graphs(model.get_submodule(name.rpartition(".")[0]))
