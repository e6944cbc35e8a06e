"""Checks that the experts of each layer are whole, and packed alike.

Loaders put the quant states of a layer's experts together: nf4conv those of a projection, vLLM
those of all. So all of them must have one data type, one nesting, one block size and one shape.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from nf4conv.check.structure import Structure, unlike_most
from nf4conv.models.experts import find_stack, single_expert
from nf4conv.models.families import experts_in, has_uneven_experts, layouts_of
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.tensors import TensorInfo

_CHECK: Final = "experts"
_MOST_NUMBERS: Final = 8  # in a line


@dataclass
class _Layer:
    """The weights of a layer's experts, one by one: by projection and number."""

    experts: str
    projections: dict[str, dict[int, TensorInfo]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Returns how many experts there are, by the largest number."""
        return max(max(numbers) for numbers in self.projections.values()) + 1


def check_experts(structure: Structure, config: Mapping[str, Any]) -> None:
    """Notes experts that are missing, or unlike the others of their layer."""
    numbers = experts_in(config)
    is_uneven = has_uneven_experts(config)
    for layer in _layers(structure):
        if not is_uneven:
            _check_whole(structure, layer, max(numbers) if len(numbers) == 1 else 0)
        _check_alike(structure, layer)
    for weight in structure.weights.values():
        if (
            len(weight.shape) == 3
            and find_stack(weight.values.name, layouts_of(config)) is not None
        ):
            _check_stack(structure, weight, set() if is_uneven else set(numbers))


def _layers(structure: Structure) -> list[_Layer]:
    layers: dict[str, _Layer] = {}
    for name, tensor in structure.tensors.items():
        single = single_expert(name)
        if single is None or single.leaf != "weight":
            continue
        layer = layers.setdefault(single.experts, _Layer(single.experts))
        layer.projections.setdefault(single.projection, {})[single.expert] = tensor
    return list(layers.values())


def _check_whole(structure: Structure, layer: _Layer, known: int) -> None:
    """Notes the experts that a layer lacks, of as many as the config knows."""
    count = max(layer.count, known)
    for projection, tensors in layer.projections.items():
        missing = count - len(tensors)
        if not missing:
            continue
        # a name may have any number in it, so no more of them are looked at than needed
        absent = (number for number in range(count) if number not in tensors)
        listed = ", ".join(map(str, islice(absent, _MOST_NUMBERS)))
        if missing > _MOST_NUMBERS:
            listed += ", …"
        text = f"the {projection} of {missing:,} of {count:,} experts is missing: {listed}"
        file = next(iter(tensors.values())).file
        structure.note(_CHECK, file, layer.experts, text)


def _check_alike(structure: Structure, layer: _Layer) -> None:
    """Notes an expert that is stored in another way than most of its layer."""
    everything: dict[str, Hashable] = {}
    for projection, tensors in layer.projections.items():
        shapes: dict[str, Hashable] = {}
        for tensor in tensors.values():
            weight = structure.weights.get(tensor.name)
            if weight is not None:
                shapes[tensor.name] = f"in 4 bits, {list(weight.shape)}"
                everything[tensor.name] = _format_of(weight)
            elif tensor.name in structure.plain:
                shapes[tensor.name] = f"{tensor.dtype} {list(tensor.shape)}"
        what = f"the {projection} of {layer.experts}"
        for name, text in _unlike(shapes, what):
            structure.note(_CHECK, structure.tensors[name].file, name, text)
    for name, text in _unlike(everything, layer.experts):
        structure.note(_CHECK, structure.tensors[name].file, name, text)


def _format_of(weight: Bitsandbytes4bit) -> str:
    """Returns what loaders expect to be one for all experts of a layer."""
    format = weight.format
    return (
        f"{format.quant_type}, blocks of {format.blocksize}, {format.nesting}, from {format.dtype}"
    )


def _unlike(kinds: Mapping[str, Hashable], what: str) -> Iterator[tuple[str, str]]:
    """Yields a weight of each kind but the commonest, and what is to be said about it."""
    for name, kind, count, commonest in unlike_most(kinds):
        text = f"is {kind}, while most of {what} are {commonest}; loaders join them"
        if count > 1:
            text += f" ({count:,} are like it)"
        yield name, text


def _check_stack(structure: Structure, weight: Bitsandbytes4bit, numbers: set[int]) -> None:
    """Notes a stack that has another number of experts, or whose experts do not fill blocks."""
    experts, rows, columns = weight.shape
    if numbers and experts not in numbers:
        known = " or ".join(map(str, sorted(numbers)))
        text = f"a stack of {experts} experts, but config.json says {known}"
        structure.note(_CHECK, weight.values.file, weight.values.name, text)
    if rows * columns % weight.format.blocksize:
        text = (
            f"experts of {rows} × {columns} do not fill blocks of {weight.format.blocksize}: "
            f"nf4conv does not load this stack"
        )
        structure.note(_CHECK, weight.values.file, weight.values.name, text, is_fault=False)
