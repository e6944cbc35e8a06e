"""Asks transformers into which module every tensor goes, and which of them it quantizes.

It builds the model on the meta device, and follows every name on disk into it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from nf4conv.models.module_names import module_of
from nf4conv.models.parsing import parse_config


@dataclass(frozen=True)
class Skeleton:
    """Describes what transformers makes of the names of a checkpoint.

    Attributes:
        modules: the path of the module whose weight a tensor becomes, by the tensor's name on disk.
            Tensors that are split, merged or otherwise changed on the way are not here.
        linear: paths of the modules that transformers replaces when it loads in 4-bit.
    """

    modules: Mapping[str, str]
    linear: frozenset[str]


def read_skeleton(names: Sequence[str], config: Mapping[str, Any]) -> Skeleton:
    """Builds the model of a config.json, and follows the names of tensors into it."""
    model_class = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = model_class(parse_config(config, model_class.config_class))
    return Skeleton(_follow_names(names, model), frozenset(_linear_layers(model)))


def _follow_names(names: Sequence[str], model: "transformers.PreTrainedModel") -> dict[str, str]:
    conversions = get_model_conversion_mapping(model)
    renamings = [step for step in conversions if isinstance(step, WeightRenaming)]
    converters = [step for step in conversions if isinstance(step, WeightConverter)]
    meta_state = model.state_dict()
    modules = {}
    for name in names:
        renamed, converter = rename_source_key(
            name, renamings, converters, model.base_model_prefix, meta_state
        )
        if converter is None and renamed.endswith(".weight") and renamed in meta_state:
            modules[name] = module_of(renamed)
    return modules


def _linear_layers(model: "transformers.PreTrainedModel") -> Iterator[str]:
    """Yields the paths that transformers replaces; subclasses of `nn.Linear` are none of them."""
    protected = list(model._keep_in_fp32_modules or ())
    for path, module in model.named_modules():
        is_linear = isinstance(module, Conv1D) or type(module) is torch.nn.Linear
        if is_linear and should_convert_module(path, protected):
            yield path
