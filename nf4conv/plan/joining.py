"""Puts experts that are stored one by one back into the stacks that their family has on disk.

Nothing is read: a stack is a tensor with the encoding StackedExperts, and is put together expert by
expert when it is written.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nf4conv.errors import SourceError
from nf4conv.models.experts import SingleExpert, single_expert, stack_name
from nf4conv.models.families import experts_in, stacked_layouts
from nf4conv.models.family_table import GPT_OSS, ExpertLayout, ExpertStack
from nf4conv.sources.arranged import StackedExperts
from nf4conv.sources.tensors import TensorInfo


class _Stack(NamedTuple):
    """A tensor that is to be put together."""

    name: str  # in the result
    kind: ExpertStack  # how the experts lie in it
    matrices: dict[tuple[int, str], TensorInfo]  # by expert and projection


def join_experts(
    tensors: Sequence[TensorInfo],
    config: Mapping[str, Any],
    layouts: Sequence[ExpertLayout] | None = None,
) -> tuple[TensorInfo, ...]:
    """Joins the experts of families that store them stacked, and gives them the names they had.

    A stack is in the place of its first matrix. Without layouts, stacks are those that the family
    has on disk. Raises a SourceError for experts that are incomplete or cannot be stacked.
    """
    if layouts is None:
        layouts = stacked_layouts(config)
    if not layouts:
        return tuple(tensors)
    stacks: dict[str, _Stack] = {}
    found: list[TensorInfo | _Stack] = []
    for tensor in tensors:
        single = single_expert(tensor.name)
        place = None if single is None else _place_of(single, layouts)
        if single is None or place is None:
            if GPT_OSS in layouts:  # the routers of Unsloth get the names that they have elsewhere
                name = tensor.name.replace(".router.linear.", ".router.")
                tensor = tensor._replace(name=name)
            found.append(tensor)
            continue
        name, kind = place
        stack = stacks.setdefault(name, _Stack(name, kind, {}))
        stack.matrices[single.expert, single.projection] = tensor
        if single.expert == 0 and single.projection == kind.projections[0]:
            found.append(stack)
    joined = {name: _joined(stack, experts_in(config)) for name, stack in stacks.items()}
    return tuple(joined[one.name] if isinstance(one, _Stack) else one for one in found)


def _place_of(
    single: SingleExpert, layouts: Sequence[ExpertLayout]
) -> tuple[str, ExpertStack] | None:
    """Returns the name and the kind of the stack that a tensor belongs to; None if to none."""
    is_weight = single.leaf == "weight"
    if single.is_of_unsloth:
        if GPT_OSS not in layouts:
            return None
        name = f"{single.experts}.{single.projection}"
        kind = ExpertStack("", "", (single.projection,), is_transposed=is_weight)
        return (name if is_weight else f"{name}_bias"), kind
    for layout in layouts:
        for kind in layout.stacks:
            stacked_as = stack_name(single.experts, kind, layout)
            if is_weight and stacked_as is not None and single.projection in kind.projections:
                return stacked_as, kind
    return None


def _joined(stack: _Stack, numbers: frozenset[int]) -> TensorInfo:
    """Returns the tensor that stacks matrices, given the numbers of experts that a config names."""
    count = 1 + max(expert for expert, _ in stack.matrices)
    if len(numbers) == 1:
        count = max(count, *numbers)
    experts = []
    for expert in range(count):
        for projection in stack.kind.projections:
            if (expert, projection) not in stack.matrices:
                raise SourceError(
                    f"{stack.name}: expert {expert} has no {projection}, so the {count:,} experts "
                    f"of this layer cannot be stacked; the checkpoint is incomplete"
                )
        experts.append(tuple(stack.matrices[expert, name] for name in stack.kind.projections))
    first = experts[0]
    shape = first[0].shape
    kinds = {tuple((one.shape, one.dtype) for one in projections) for projections in experts}
    inputs = {matrix.shape[1:] for matrix in first}
    heights = [matrix.shape[0] for matrix in first if matrix.shape]
    is_uneven = stack.kind.is_interleaved and len(set(heights)) > 1
    if len(kinds) > 1 or len(inputs) > 1 or not 0 < len(shape) < 3 or is_uneven:
        raise SourceError(
            f"{first[0].file}: {stack.name}: its experts differ in shape or dtype, or do not fit "
            f"each other, so they cannot be stacked"
        )
    shape = (sum(heights), *shape[1:])
    if stack.kind.is_transposed:
        shape = shape[::-1]
    encoding = StackedExperts(tuple(experts), stack.kind.is_transposed, stack.kind.is_interleaved)
    return first[0]._replace(name=stack.name, shape=(count, *shape), encoding=encoding)
