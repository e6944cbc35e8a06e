"""The denoisers of diffusers at their own sizes, without weights: our plan against what diffusers
would replace.

Classes that cannot be made without arguments are given some. What is found holds for loading, not
for computing.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from nf4conv.choose.decisions import Keep, Pack, Selection
from nf4conv.choose.selection import select
from nf4conv.options import QuantizeOptions
from nf4conv.sources.tensors import TensorInfo

ARGUMENTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "ControlNetUnionModel": {
        "num_control_type": 6,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    "DreamLiteTransformer2DModel": {"in_channels": 320},
    "EasyAnimateTransformer3DModel": {"in_channels": 16, "out_channels": 16, "patch_size": 2},
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2,
        "in_channels": 16,
        "caption_channels": [4096, 4096],
        "llama_layers": list(range(48)),
    },
    "HunyuanDiT2DControlNetModel": {"in_channels": 4, "patch_size": 2},
    "HunyuanDiT2DModel": {"in_channels": 4, "patch_size": 2},
    "LatteTransformer3DModel": {
        "attention_head_dim": 72,
        "in_channels": 4,
        "patch_size": 2,
        "num_layers": 28,
        "cross_attention_dim": 1152,
        "caption_channels": 4096,
        "norm_type": "ada_norm_single",
    },
    "LuminaNextDiT2DModel": {"num_kv_heads": 8},
    "OmniGenTransformer2DModel": {
        "rope_scaling": {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}
    },
    "Transformer2DModel": {"in_channels": 320},
    "TransformerTemporalModel": {"in_channels": 320},
    "ZImageControlNetModel": {"control_layers_places": [0, 5], "control_in_dim": 16},
}


@dataclass(frozen=True)
class Plan:
    """The plans that we and diffusers have for a class.

    Attributes:
        packed: modules that we pack.
        replaced: modules that diffusers would make 4-bit, given our skip list.
        linear: all linear layers.
        reasons: of those that we keep and diffusers by itself would pack, why.
    """

    packed: frozenset[str]
    replaced: frozenset[str]
    linear: frozenset[str]
    reasons: Mapping[str, str]


def classes() -> list[Any]:
    """Returns every denoiser and controlnet of diffusers.

    Classes that hold several controlnets are left out: their members are saved one by one.
    """
    import diffusers

    modules = [
        module
        for package in ("transformers", "unets", "controlnets")
        for module in _modules(package)
    ]
    return [
        kind
        for module in modules
        for name, kind in vars(module).items()
        if inspect.isclass(kind)
        and issubclass(kind, diffusers.ModelMixin)
        and kind.__module__ == module.__name__
        if "Multi" not in name
    ]


def _modules(package: str) -> Iterator[Any]:
    folder = importlib.import_module(f"diffusers.models.{package}")
    for module in pkgutil.iter_modules(folder.__path__):
        if "flax" not in module.name:  # which is not installed
            yield importlib.import_module(f"{folder.__name__}.{module.name}")


def plan(kind: Any) -> Plan:
    """Plans a class for us and for diffusers. Its weights are on no device."""
    with torch.device("meta"):
        model = kind(**ARGUMENTS.get(kind.__name__, {}))
    linear = _of_type(model, torch.nn.Linear)
    config = {"_class_name": kind.__name__, **model.config}
    selection = select(
        [_stored(*entry) for entry in model.state_dict().items()], config, QuantizeOptions()
    )
    replaced = _replace(model, selection.skip_modules)
    alone = _replace(model, ())
    return Plan(_packed(selection), replaced, linear, _reasons(selection, alone))


def _stored(name: str, value: torch.Tensor) -> TensorInfo:
    return TensorInfo(
        name, "BF16", tuple(value.shape), Path("model.safetensors"), 0, 2 * value.numel()
    )


def _of_type(model: torch.nn.Module, kind: type) -> frozenset[str]:
    return frozenset(name for name, module in model.named_modules() if isinstance(module, kind))


def _replace(model: Any, skip_modules: Iterable[str]) -> frozenset[str]:
    """Replaces modules by 4-bit ones, as
    BnB4BitDiffusersQuantizer._process_model_before_weight_loading does.
    """
    import bitsandbytes
    import diffusers
    from diffusers.quantizers.bitsandbytes.utils import replace_with_bnb_linear

    skipped = [*skip_modules, *(model._keep_in_fp32_modules or ())]
    config = diffusers.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skipped)
    replace_with_bnb_linear(model, skipped, quantization_config=config)
    return _of_type(model, bitsandbytes.nn.Linear4bit)


def _packed(selection: Selection) -> frozenset[str]:
    return frozenset(
        name.removesuffix(".weight")
        for name, decision in selection.decisions.items()
        if isinstance(decision, Pack)
    )


def _reasons(selection: Selection, alone: frozenset[str]) -> dict[str, str]:
    decisions = {
        name.removesuffix(".weight"): decision for name, decision in selection.decisions.items()
    }
    return {
        path: decisions[path].reason for path in sorted(alone) if isinstance(decisions[path], Keep)
    }
