"""Makes converters for transformers' loading: packed tensors of experts become Experts4bit.

A converter of transformers takes the tensors whose names match its source patterns, and makes the
parameter that its target names. The first that matches a name has it, so ours come first: for each
of the model's own converters of experts one that takes the components as well, and others for names
that the model has no converter for.

Imports transformers, and is imported when it is loading a checkpoint.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from transformers.core_model_loading import (
    MergeModulelist,
    SkipParameters,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from nf4conv.errors import CodecError
from nf4conv.inference.moe.loading.headers import (
    AGAIN,
    PackedNames,
    check_components,
    check_numbers,
    grouped,
)
from nf4conv.inference.moe.loading.operations import (
    ExpertsDeserialize,
    RouterDeserialize,
    SharedExpertsDeserialize,
    readable,
)

_SINGLE: Final = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
"""By the name of a parameter, the projections of single experts that it holds."""


class ExpertsConverter(WeightConverter):
    """A converter that is cheap to copy.

    transformers copies it for every tensor, and uses only the first copy for a parameter.
    """

    _copied: "ExpertsConverter | None" = None  # the last copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertsConverter":
        """Returns a copy that collects tensors of its own: the last one if it is unused."""
        if self._copied is None or self._copied.collected_tensors:
            copied = copy.copy(self)
            copied.collected_tensors = defaultdict(list)
            copied.layer_targets = defaultdict(set)
            self._copied = copied
        return self._copied

    def convert(self, *args: Any, **kwargs: Any) -> Any:
        """Converts what was collected.

        Raises an error of nf4conv as it is. transformers would print it among other lines, and
        raise one that does not say what is wrong.
        """
        try:
            return super().convert(*args, **kwargs)
        except SkipParameters:
            refused = getattr(self.operations[0], "refused", None)
            if refused is None:
                raise
        raise refused


def converters_of_experts(
    conversions: Sequence[Any], parameters: Iterable[str], names: PackedNames, hf_quantizer: Any
) -> list[Any]:
    """Makes the converters and renamings to put before the model's own, `conversions`, given the
    names of its 3-D parameters of experts and what is packed in the files.
    """
    made: list[Any] = []
    leaves = {f".{name}".rpartition(".experts.")[2] for name in parameters}
    for converter in conversions:
        if _makes_experts(converter, leaves):
            sources = [re.sub(r"\*(?=\.)", r"\\d+", each) for each in converter.source_patterns]
            made.append(_converter(sources, converter, hf_quantizer))
    if names.is_unsloth_gpt_oss:
        made += _of_unsloth_gpt_oss(hf_quantizer)
    for leaf in sorted(leaves):
        target = f"experts.{leaf}"
        single = [rf"(?<!\w)experts\.\d+\.{name}\.weight" for name in _SINGLE.get(leaf, ())]
        for sources in (single, [rf"(?<!\w)experts\.{leaf}"]):
            if sources:
                made.append(_plain_converter(sources, target, hf_quantizer))
    return made


def _makes_experts(converter: Any, leaves: set[str]) -> bool:
    """Returns whether a converter of the model makes stacks of routed experts."""
    if not isinstance(converter, WeightConverter):
        return False
    return all(
        "experts." in target and target.rpartition("experts.")[2] in leaves
        for target in converter.target_patterns
    )


def _converter(sources: Sequence[str], own: Any, hf_quantizer: Any) -> Any:
    """Makes a converter that stands before one of the model's own."""
    is_shared = len(own.target_patterns) > 1
    kind = SharedExpertsDeserialize if is_shared else ExpertsDeserialize
    operation = kind(sources, own.source_patterns, own.operations, hf_quantizer)
    made = ExpertsConverter(operation.patterns, list(own.target_patterns), [operation])
    for name in ("scope_prefix", "base_model_prefix"):  # transformers has them from 5.12 on
        if hasattr(own, name):
            setattr(made, name, getattr(own, name))
    return made


def _plain_converter(sources: Sequence[str], target: str, hf_quantizer: Any) -> Any:
    """Makes a converter for names that the model has none for."""
    operation = ExpertsDeserialize(sources, sources, (), hf_quantizer)
    return ExpertsConverter(operation.patterns, target, [operation])


def _of_unsloth_gpt_oss(hf_quantizer: Any) -> list[Any]:
    """Returns converters for gpt-oss under the names that Unsloth gives its tensors.

    Unsloth has a Linear for each expert, and the router one level deeper.
    """
    made: list[Any] = []
    for name in ("gate_up_proj", "down_proj"):
        sources = [rf"experts\.{name}s\.\d+\.weight"]
        made.append(_plain_converter(sources, f"experts.{name}", hf_quantizer))
        biases = rf"experts\.{name}s\.\d+\.bias"
        made.append(WeightConverter(biases, f"experts.{name}_bias", [MergeModulelist(0)]))
    made.append(WeightRenaming("router.linear.", "router."))
    return made


def decode_routers(conversions: Iterable[Any]) -> None:
    """Makes the converters of transformers decode packed weights of what is no Linear4bit."""
    for converter in conversions:
        if isinstance(converter, WeightConverter):
            converter.operations = [
                RouterDeserialize(operation)
                if type(operation).__name__ == "Bnb4bitDeserialize"
                else operation
                for operation in converter.operations
            ]


def parameters_of_packed(
    conversions: Sequence[Any], names: PackedNames, model: Any, parameters: Iterable[str]
) -> set[str]:
    """Returns which parameters of a model, without weights, the packed experts of the files become.

    Raises CodecError if an expert, a projection or a component is missing, by the model's config.
    """
    mapping = _Mapping(conversions, model)
    packed: dict[tuple[str, ...], dict[str, list[int]]] = defaultdict(dict)
    # by the parameters that a converter makes: of each of its sources, one name
    sources: dict[tuple[str, ...], Sequence[str]] = {}
    for name in names.experts:
        check_components(name, names)
    for name, numbers in grouped(names.experts).items():
        converter, source, targets = mapping.ends_in(name, ".absmax")
        if not isinstance(converter, ExpertsConverter):  # linear layers of shared experts
            continue
        operation: Any = converter.operations[0]
        sources[targets] = operation.sources
        packed[targets][source] = numbers
        if numbers:
            expected = sum(mapping.parameters[target].shape[0] for target in targets)
            check_numbers(name, numbers, expected)
    for targets, found in packed.items():
        for source in sources[targets]:
            if source not in found:
                raise CodecError(
                    f"{targets[0]}: {readable(source)} is missing beside "
                    f"{readable(next(iter(found)))}; {AGAIN}"
                )
    is_packed = {target for targets in packed for target in targets}
    if is_packed:
        plain: set[str] = set()
        for name in grouped(names.plain_experts()):
            plain.update(mapping.ends_in(name, "")[2])
        # the files have parameters once that are those of other layers, too
        there = is_packed | plain | set(model.all_tied_weights_keys)
        for name in parameters:
            if name not in there:
                raise CodecError(f"{name} is missing: the files have no experts for it; {AGAIN}")
    return is_packed


class _Mapping:
    """Says what transformers makes of the tensors of a checkpoint."""

    def __init__(self, conversions: Sequence[Any], model: Any) -> None:
        self.parameters = dict(model.named_parameters())
        self._prefix = model.base_model_prefix
        self._renamings = [each for each in conversions if not isinstance(each, WeightConverter)]
        self._converters = [each for each in conversions if isinstance(each, WeightConverter)]

    def ends_in(self, name: str, suffix: str) -> tuple[Any, str, tuple[str, ...]]:
        """Returns the converter of a tensor, the source that it matches, and the parameters.

        The converter is None, and the source empty, if a tensor becomes a parameter by its name.
        """
        # a renaming may be a class that changes state, such as GroupWeightRename
        target, pattern = rename_source_key(
            f"{name}{suffix}",
            copy.deepcopy(self._renamings),
            self._converters,
            self._prefix,
            self.parameters,
        )
        for converter in self._converters:
            if pattern in converter.source_patterns:
                first = converter.target_patterns[0]
                targets = [target.replace(first, other) for other in converter.target_patterns]
                found = tuple(each for each in targets if each in self.parameters)
                if found:
                    return converter, pattern.removesuffix(suffix), found
        return None, "", (target,)
