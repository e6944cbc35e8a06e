"""`--plan-with transformers`: the module tree of the installed transformers as the truth about what
is an `nn.Linear`.

The model is built on the meta device, so it costs no memory, and every name on disk is followed to
the module that transformers would load it into. The rules of choose/selection.py still say which of
the linear modules stay in 16 bits: heads, routers, towers. This is the only module that imports
transformers, and it does so when it is called.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nf4conv.choose.evidence import Why, numbers_of
from nf4conv.choose.selection import Keep, Pack, PackedMatrix, Selection, select, with_skip_list
from nf4conv.errors import PlanError
from nf4conv.models.config import architecture_of, without_quantization
from nf4conv.models.module_names import ModuleNames, module_of
from nf4conv.options import QuantizeOptions
from nf4conv.sources.tensors import TensorInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_MOST_PARTS: Final = 10_000  # layers or experts: their modules are made, if without weights


@dataclass(frozen=True)
class Skeleton:
    """What transformers makes of the names of a checkpoint."""

    # tensor on disk → path of the module whose weight it becomes; tensors that are split, merged or
    # otherwise changed on the way are not here
    modules: Mapping[str, str]
    linear: frozenset[str]  # paths of the modules that transformers replaces when it loads in 4-bit
    transposed: frozenset[str]  # those of them that are Conv1D
    version: str  # of the transformers that was asked


def select_with_transformers(
    tensors: Sequence[TensorInfo], config: Mapping[str, Any], options: QuantizeOptions
) -> Selection:
    """Decide for every tensor of a checkpoint, asking the installed transformers which of them are
    linear.

    Notes name every tensor of which the rules alone would have thought otherwise. Arguments as
    `selection.select`.

    Raises:
        PlanError: transformers is not installed or cannot build the model.
    """
    by_rule, decisions, skeleton = _select_twice(tensors, config, options)
    in_memory = {module_of(name): path for name, path in skeleton.modules.items()}
    names = replace(ModuleNames.of(config), in_memory=in_memory)
    on_disk = set(skeleton.modules.values())
    differences = disagreements(by_rule.decisions, decisions, skeleton)
    return with_skip_list(
        decisions, names, [*by_rule.notes, *differences], skeleton.linear - on_disk
    )


def second_opinion(
    tensors: Sequence[TensorInfo], config: Mapping[str, Any] | None, options: QuantizeOptions
) -> tuple[str, ...]:
    """One line about the tensors of which the installed transformers thinks otherwise than the
    rules.

    Arguments as `select_with_transformers`. There is no line where the two agree, or where
    transformers cannot tell.
    """
    if config is None:
        return ()
    try:
        by_rule, decisions, skeleton = _select_twice(tensors, config, options)
    except PlanError:
        return ()
    found = disagreements(by_rule.decisions, decisions, skeleton)
    more = f"; and {len(found) - 3:,} more" if len(found) > 3 else ""
    return (
        (f"--plan-with transformers would differ: {'; '.join(found[:3])}{more}",) if found else ()
    )


def _select_twice(
    tensors: Sequence[TensorInfo], config: Mapping[str, Any], options: QuantizeOptions
) -> tuple[Selection, dict[str, Pack | Keep], Skeleton]:
    """What the rules decide, what becomes of that by the module tree, and the tree."""
    by_rule = select(tensors, config, options)
    skeleton = read_skeleton([tensor.name for tensor in tensors], config)
    decisions = {
        tensor.name: _correct(tensor, by_rule.decisions[tensor.name], skeleton, options)
        for tensor in tensors
    }
    return by_rule, decisions, skeleton


def read_skeleton(names: Sequence[str], config: Mapping[str, Any]) -> Skeleton:
    """Build the model of a config.json on the meta device, and follow the names of tensors on disk
    into it.

    Raises:
        PlanError: transformers is not installed, is older than 5, or cannot build the model.
    """
    try:
        import transformers
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )
        from transformers.quantizers.quantizers_utils import should_convert_module
    except ImportError as error:
        raise PlanError(
            f"--plan-with transformers needs transformers 5: pip install 'nf4conv[transformers]' "
            f"({error})"
        ) from error
    try:
        model = _build(config)
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
        linear, transposed = _linear_modules(model)
        protected = list(model._keep_in_fp32_modules or ())
        linear = {path for path in linear if should_convert_module(path, protected)}
    except PlanError:
        raise
    except Exception as error:
        version = f"--plan-with transformers: transformers {transformers.__version__}"
        raise PlanError(
            f"{version} cannot build {architecture_of(config) or 'a model'}: {str(error)[:300]}"
        ) from error
    return Skeleton(
        modules, frozenset(linear), frozenset(transposed & linear), transformers.__version__
    )


def _build(config: Mapping[str, Any]) -> "PreTrainedModel":
    import torch
    import transformers

    for key, value in numbers_of(config):
        if value > _MOST_PARTS and any(word in key for word in ("layer", "depth", "expert")):
            raise ValueError(f"{key} is {value:,}")
    architecture = architecture_of(config)
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise PlanError(
            f"--plan-with transformers: transformers {transformers.__version__} has no "
            f"{architecture or 'architecture'}"
        )
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # only a file goes through all that transformers reads it with
        Path(folder, "config.json").write_text(json.dumps(without_quantization(config)))
        parsed = model_class.config_class.from_pretrained(folder)
    with torch.device("meta"):
        return model_class(parsed)  # type: ignore[no-any-return]


def _linear_modules(model: "PreTrainedModel") -> tuple[set[str], set[str]]:
    """Paths of the modules that are replaced, subclasses of `nn.Linear` excepted, and those that
    are Conv1D.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    modules = dict(model.named_modules())
    transposed = {path for path, module in modules.items() if isinstance(module, Conv1D)}
    return transposed | {
        path for path, module in modules.items() if type(module) is torch.nn.Linear
    }, transposed


def _correct(
    tensor: TensorInfo, decision: Pack | Keep, skeleton: Skeleton, options: QuantizeOptions
) -> Pack | Keep:
    path = skeleton.modules.get(tensor.name)
    if isinstance(decision, Pack):
        if len(decision.matrices) > 1 or path in skeleton.linear or options.moe == "per-expert":
            return decision
        return Keep(f"not an nn.Linear in transformers {skeleton.version}", is_linear=True)
    if path not in skeleton.linear or len(tensor.shape) != 2 or decision.why is not Why.UNSURE:
        return decision._replace(is_linear=decision.is_linear or path in skeleton.linear)
    rows, columns = tensor.shape
    transpose = path in skeleton.transposed
    shape = (columns, rows) if transpose else (rows, columns)
    return Pack(
        (PackedMatrix(tensor.name, shape, transpose),),
        f"nn.Linear in transformers {skeleton.version}",
    )


def disagreements(
    by_rule: Mapping[str, Pack | Keep], by_skeleton: Mapping[str, Pack | Keep], skeleton: Skeleton
) -> list[str]:
    """A line for each tensor that one would pack and the other keep."""
    return [
        f"{name}: transformers {skeleton.version} says {decision.reason!r}, the rules say "
        f"{by_rule[name].reason!r}"
        for name, decision in by_skeleton.items()
        if isinstance(decision, Pack) != isinstance(by_rule[name], Pack)
    ]
