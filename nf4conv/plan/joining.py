"""Puts experts that are stored one by one back into the stacks that their family has on disk.

Nothing is read: a stack is a tensor with the encoding StackedExperts, and is put together expert by
expert when it is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nf4conv.errors import SourceError
from nf4conv.models.experts import single_expert, stack_name
from nf4conv.models.families import experts_in, is_gpt_oss, stacked_layouts
from nf4conv.models.family_table import ExpertLayout, ExpertStack
from nf4conv.sources.arranged import StackedExperts
from nf4conv.sources.tensors import TensorInfo


class _Stack(NamedTuple):
    """A tensor that is to be put together."""

    name: str  # in the result
    kind: ExpertStack  # how the experts lie in it
    leaf: str = "weight"  # or "bias"


@dataclass
class _Layer:
    """The tensors of the experts of a layer, by (projection, leaf) and number."""

    experts: str
    is_of_unsloth: bool
    tensors: dict[tuple[str, str], dict[int, TensorInfo]] = field(default_factory=dict)

    def has(self, stack: _Stack) -> bool:
        """Returns True if the layer has any of the matrices of a stack."""
        return any((name, stack.leaf) in self.tensors for name in stack.kind.projections)


def join_experts(
    tensors: Sequence[TensorInfo],
    config: Mapping[str, Any],
    layouts: Sequence[ExpertLayout] | None = None,
) -> tuple[TensorInfo, ...]:
    """Joins the experts of families that store them stacked, and gives them the names they had.

    A stack is in the place of its first matrix. Without layouts, stacks are those that the family
    has on disk.
    """
    layers = _layers(tensors)
    if not layers:
        return tuple(tensors)
    if layouts is None:
        layouts = stacked_layouts(config)
    joined: dict[str, TensorInfo] = {}  # by the name of the first matrix
    used: set[str] = set()
    for layer in layers:
        for stack in _stacks_of(layer, layouts, config):
            experts = _matrices(layer, stack, config)
            joined[experts[0][0].name] = _stacked(stack, experts)
            used.update(matrix.name for matrices in experts for matrix in matrices)
    found = []
    for tensor in tensors:
        if tensor.name in joined:
            found.append(joined[tensor.name])
        elif tensor.name not in used:
            found.append(tensor)
    if is_gpt_oss(config):  # the routers of Unsloth get the names that they have elsewhere
        found = [
            one._replace(name=one.name.replace(".router.linear.", ".router.")) for one in found
        ]
    return tuple(found)


def _layers(tensors: Sequence[TensorInfo]) -> list[_Layer]:
    """Returns the layers of experts that are stored one by one."""
    layers: dict[str, _Layer] = {}
    for tensor in tensors:
        single = single_expert(tensor.name)
        if single is None:
            continue
        layer = layers.setdefault(single.experts, _Layer(single.experts, single.is_of_unsloth))
        matrices = layer.tensors.setdefault((single.projection, single.leaf), {})
        matrices[single.expert] = tensor
    return list(layers.values())


def _stacks_of(
    layer: _Layer, layouts: Sequence[ExpertLayout], config: Mapping[str, Any]
) -> Iterator[_Stack]:
    """Yields the stacks that the experts of a layer belong to."""
    if layer.is_of_unsloth:
        if not is_gpt_oss(config):
            return
        for projection, leaf in layer.tensors:
            name = f"{layer.experts}.{projection}"
            if leaf == "bias":
                name += "_bias"
            kind = ExpertStack("", "", (projection,), is_transposed=leaf == "weight")
            yield _Stack(name, kind, leaf)
        return
    for layout in layouts:
        found = []
        for kind in layout.stacks:
            stacked_as = stack_name(layer.experts, kind, layout)
            if stacked_as is None:
                continue
            stack = _Stack(stacked_as, kind)
            if layer.has(stack):
                found.append(stack)
        if found:
            yield from found
            return


def _matrices(
    layer: _Layer, stack: _Stack, config: Mapping[str, Any]
) -> list[tuple[TensorInfo, ...]]:
    """Returns the matrices of each expert that a stack is put together from."""
    found = [layer.tensors.get((name, stack.leaf), {}) for name in stack.kind.projections]
    count = max(max(matrices, default=-1) for matrices in found) + 1
    numbers = experts_in(config)
    if len(numbers) == 1:
        count = max(count, *numbers)
    experts = []
    for number in range(count):
        projections = []
        for name, matrices in zip(stack.kind.projections, found, strict=True):
            matrix = matrices.get(number)
            if matrix is None:
                raise SourceError(
                    f"{layer.experts}: expert {number} has no {name}.{stack.leaf}, so the "
                    f"{count:,} experts of this layer cannot be stacked; the checkpoint is "
                    f"incomplete"
                )
            projections.append(matrix)
        experts.append(tuple(projections))
    _check_alike(layer, stack, experts)
    return experts


def _check_alike(layer: _Layer, stack: _Stack, experts: Sequence[tuple[TensorInfo, ...]]) -> None:
    """Raises a SourceError if experts differ in shape or dtype, or projections do not fit."""
    first = experts[0]
    kinds = {tuple((one.shape, one.dtype) for one in projections) for projections in experts}
    if len(kinds) > 1:
        raise SourceError(
            f"{first[0].file}: {layer.experts}: its experts differ in shape or dtype, so they "
            f"cannot be stacked"
        )
    dimensions = 2 if stack.leaf == "weight" else 1
    inputs = {matrix.shape[1:] for matrix in first}
    heights = {matrix.shape[0] for matrix in first if matrix.shape}
    fits = len(inputs) == 1 and all(len(matrix.shape) == dimensions for matrix in first)
    if not fits or (stack.kind.is_interleaved and len(heights) > 1):
        shapes = " and ".join(str(list(matrix.shape)) for matrix in first)
        raise SourceError(
            f"{first[0].file}: {layer.experts}: {' and '.join(stack.kind.projections)} of {shapes} "
            f"cannot be stacked"
        )


def _stacked(stack: _Stack, experts: Sequence[tuple[TensorInfo, ...]]) -> TensorInfo:
    """Returns the tensor that stacks matrices."""
    first = experts[0][0]
    height = sum(matrix.shape[0] for matrix in experts[0])
    shape = (height, *first.shape[1:])
    if stack.kind.is_transposed:
        shape = shape[::-1]
    shape = (len(experts), *shape)
    encoding = StackedExperts(tuple(experts), stack.kind.is_transposed, stack.kind.is_interleaved)
    return first._replace(name=stack.name, shape=shape, encoding=encoding)
