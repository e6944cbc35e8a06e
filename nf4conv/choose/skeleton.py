"""Asks the installed transformers what is an `nn.Linear`, for `--plan-with transformers`.

The module tree of transformers is then the truth. The model is built on the meta device, so it
costs no memory, and every name on disk is followed to the module that transformers would load it
into. The rules of choose/selection.py still say which of the linear modules stay in 16 bits: heads,
routers, towers. This is the only module that imports transformers, and it does so when it is
called.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nf4conv.choose.counts import excess_of
from nf4conv.choose.decisions import Keep, Pack, PackedMatrix, Selection
from nf4conv.choose.evidence import Why
from nf4conv.choose.experts.readers import is_of_experts
from nf4conv.choose.parsing import parse_config
from nf4conv.choose.selection import select, with_skip_list
from nf4conv.errors import PlanError
from nf4conv.models.config import architecture_of, without_quantization
from nf4conv.models.module_names import ModuleNames, module_of
from nf4conv.options import QuantizeOptions
from nf4conv.sources.tensors import TensorInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Skeleton:
    """Describes what transformers makes of the names of a checkpoint.

    Attributes:
        modules: the path of the module whose weight a tensor becomes, by the tensor's name on disk.
            Tensors that are split, merged or otherwise changed on the way are not here.
        linear: paths of the modules that transformers replaces when it loads in 4-bit.
        transposed: paths of those of them that are Conv1D.
        version: the version of transformers that was asked.
    """

    modules: Mapping[str, str]
    linear: frozenset[str]
    transposed: frozenset[str]
    version: str


@dataclass(frozen=True)
class _TwoOpinions:
    """Holds what the rules decide, and what becomes of it by the module tree."""

    by_rule: Selection
    by_skeleton: Mapping[str, Pack | Keep]
    skeleton: Skeleton

    def disagreements(self) -> list[str]:
        """Returns a line for each tensor that one would pack and the other keep."""
        lines = []
        for name, decision in self.by_skeleton.items():
            other = self.by_rule.decisions[name]
            if isinstance(decision, Pack) != isinstance(other, Pack):
                lines.append(
                    f"{name}: transformers {self.skeleton.version} says {decision.reason!r}, "
                    f"the rules say {other.reason!r}"
                )
        return lines


def select_with_transformers(
    tensors: Sequence[TensorInfo], config: Mapping[str, Any], options: QuantizeOptions
) -> Selection:
    """Decides for every tensor, asking the installed transformers which of them are linear.

    The notes name every tensor of which the rules alone would have thought otherwise.

    Args:
        tensors: all tensors of the checkpoint.
        config: the content of its config.json.
        options: what the user asked for.

    Raises:
        PlanError: transformers is not installed or cannot build the model, or no skip list can tell
            the packed modules from the others.
    """
    opinions = _select_twice(tensors, config, options)
    skeleton = opinions.skeleton
    in_memory = {module_of(name): path for name, path in skeleton.modules.items()}
    names = replace(ModuleNames.of(config), in_memory=in_memory)
    not_on_disk = skeleton.linear - set(skeleton.modules.values())
    notes = [*opinions.by_rule.notes, *opinions.disagreements()]
    return with_skip_list(opinions.by_skeleton, names, notes, not_on_disk)


def second_opinion(
    tensors: Sequence[TensorInfo], config: Mapping[str, Any] | None, options: QuantizeOptions
) -> tuple[str, ...]:
    """Compares what the rules decide with what the installed transformers thinks.

    Args:
        tensors: all tensors of the checkpoint.
        config: the content of its config.json; None if it has none.
        options: what the user asked for.

    Returns:
        One line about the tensors of which transformers thinks otherwise. No line where the two
        agree, or where transformers cannot tell.
    """
    if config is None:
        return ()
    try:
        found = _select_twice(tensors, config, options).disagreements()
    except PlanError:
        return ()
    if not found:
        return ()
    line = f"--plan-with transformers would differ: {'; '.join(found[:3])}"
    if len(found) > 3:
        line += f"; and {len(found) - 3:,} more"
    return (line,)


def _select_twice(
    tensors: Sequence[TensorInfo], config: Mapping[str, Any], options: QuantizeOptions
) -> _TwoOpinions:
    """Decides for every tensor by the rules, and then by the module tree of transformers."""
    by_rule = select(tensors, config, options)
    skeleton = read_skeleton([tensor.name for tensor in tensors], config)
    corrected = {}
    for tensor in tensors:
        decision = by_rule.decisions[tensor.name]
        corrected[tensor.name] = _correct(tensor, decision, skeleton)
    return _TwoOpinions(by_rule, corrected, skeleton)


def read_skeleton(names: Sequence[str], config: Mapping[str, Any]) -> Skeleton:
    """Builds the model of a config.json on the meta device, and follows names on disk into it.

    Args:
        names: the names of the tensors on disk.
        config: the content of config.json.

    Raises:
        PlanError: transformers is not installed, is older than 5, or cannot build the model.
    """
    try:
        import transformers
        from transformers.core_model_loading import rename_source_key  # noqa: F401 - new in 5
    except ImportError as error:
        raise PlanError(
            f"--plan-with transformers needs transformers 5: pip install 'nf4conv[transformers]' "
            f"({error})"
        ) from error
    excess = excess_of(config, names)
    if excess is not None:
        raise _unbuildable(config, excess)
    try:
        model = _build(config)
        modules = _follow_names(names, model)
        layers = list(_linear_layers(model))
    except PlanError:
        raise
    except Exception as error:  # building a model runs code that may raise anything
        raise _unbuildable(config, str(error)[:300]) from error
    linear = frozenset(layer.path for layer in layers)
    transposed = frozenset(layer.path for layer in layers if layer.is_transposed)
    return Skeleton(modules, linear, transposed, transformers.__version__)


def _unbuildable(config: Mapping[str, Any], why: str) -> PlanError:
    """Returns the error of a model that the installed transformers cannot build."""
    import transformers

    return PlanError(
        f"--plan-with transformers: transformers {transformers.__version__} cannot build "
        f"{architecture_of(config) or 'a model'}: {why}"
    )


def _follow_names(names: Sequence[str], model: "PreTrainedModel") -> dict[str, str]:
    """Returns the path of the module whose weight a tensor becomes, by the tensor's name on disk.

    Tensors that become no weight of a module, and those that are converted, are left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

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


def _build(config: Mapping[str, Any]) -> "PreTrainedModel":
    """Builds a model without weights.

    Raises:
        PlanError: transformers has no class for it.
    """
    import torch
    import transformers

    architecture = architecture_of(config)
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise PlanError(
            f"--plan-with transformers: transformers {transformers.__version__} has no "
            f"{architecture or 'architecture'}"
        )
    parsed = parse_config(without_quantization(config), model_class.config_class)
    with torch.device("meta"):
        return model_class(parsed)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _LinearLayer:
    """Names a module that transformers replaces when it loads in 4-bit."""

    path: str
    is_transposed: bool  # a Conv1D, which stores [in, out]


def _linear_layers(model: "PreTrainedModel") -> Iterator[_LinearLayer]:
    """Yields the layers that transformers replaces; subclasses of `nn.Linear` are none of them."""
    import torch
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    protected = list(model._keep_in_fp32_modules or ())
    for path, module in model.named_modules():
        is_transposed = isinstance(module, Conv1D)
        is_linear = is_transposed or type(module) is torch.nn.Linear
        if is_linear and should_convert_module(path, protected):
            yield _LinearLayer(path, is_transposed)


def _correct(tensor: TensorInfo, decision: Pack | Keep, skeleton: Skeleton) -> Pack | Keep:
    """Returns what becomes of a decision of the rules by the module tree."""
    path = skeleton.modules.get(tensor.name)
    is_linear = path in skeleton.linear
    if isinstance(decision, Pack):
        if is_linear or is_of_experts(decision):
            return decision
        return Keep(f"not an nn.Linear in transformers {skeleton.version}", is_linear=True)
    if not is_linear:
        return decision
    if len(tensor.shape) != 2 or decision.why is not Why.UNSURE:
        return decision._replace(is_linear=True)

    rows, columns = tensor.shape
    if path in skeleton.transposed:
        matrix = PackedMatrix(tensor.name, (columns, rows), transpose=True)
    else:
        matrix = PackedMatrix(tensor.name, (rows, columns))
    return Pack((matrix,), f"nn.Linear in transformers {skeleton.version}")
