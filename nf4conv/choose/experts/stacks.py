"""Cuts stacks of experts into the weights of single experts."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nf4conv.choose.decisions import PackedMatrix
from nf4conv.errors import PlanError
from nf4conv.models.experts import FoundStack
from nf4conv.models.families import experts_in
from nf4conv.sources.tensors import TensorInfo


class Sizes(NamedTuple):
    """The sizes that all stacks of a layer share. They are only compared with each other."""

    experts: int
    inner: int  # width between the projections
    outer: int  # width of the model


def sizes_of(
    tensor: TensorInfo, found: FoundStack, is_transposed: bool, config: Mapping[str, Any]
) -> Sizes:
    """Returns the sizes that a stack has if its matrices are stored in this orientation."""
    experts, rows, columns = _shape_of(tensor, found, config)
    outputs, inputs = (columns, rows) if is_transposed else (rows, columns)
    if found.stack.is_last:
        return Sizes(experts, inner=inputs, outer=outputs)
    return Sizes(experts, inner=outputs // len(found.stack.projections), outer=inputs)


def _shape_of(
    tensor: TensorInfo, found: FoundStack, config: Mapping[str, Any]
) -> tuple[int, int, int]:
    """Returns [experts, rows, columns] of a stack, as each matrix is stored.

    Raises:
        PlanError: the stack does not divide into experts, or into as many as the config says.
    """
    numbers = experts_in(config)
    if not found.stack.is_flat:
        experts, rows, columns = tensor.shape
        if numbers and experts not in numbers:
            raise PlanError.about(
                tensor.file,
                tensor.name,
                f"a stack of {experts} experts, but config.json "
                f"says {' or '.join(map(str, sorted(numbers)))}",
            )
        return experts, rows, columns
    rows, columns = tensor.shape
    experts = min(numbers, default=0)
    if not experts or rows % experts:
        raise PlanError.about(
            tensor.file,
            tensor.name,
            f"{rows} rows do not divide into {experts} experts, which is the number in config.json",
        )
    return experts, rows // experts, columns


def cut_stack(
    tensor: TensorInfo, found: FoundStack, is_transposed: bool, config: Mapping[str, Any]
) -> tuple[PackedMatrix, ...]:
    """Returns the weights of single experts that a stack holds, expert by expert.

    Args:
        tensor: the stack.
        found: how experts are stacked in it.
        is_transposed: True if its matrices are [in, out].
        config: the content of config.json.

    Raises:
        PlanError: its rows, or columns, do not divide into those of its projections.
    """
    stack = found.stack
    experts, rows, columns = _shape_of(tensor, found, config)
    outputs, inputs = (columns, rows) if is_transposed else (rows, columns)
    parts = len(stack.projections)
    if outputs % parts:
        raise PlanError.about(
            tensor.file,
            tensor.name,
            f"{outputs} outputs of an expert do not divide into "
            f"those of {' and '.join(stack.projections)}",
        )
    size = outputs // parts
    matrices = []
    for expert in range(experts):
        for place, projection in enumerate(stack.projections):
            name = found.name_of(expert, projection)
            matrix = PackedMatrix(name, (size, inputs), is_transposed)
            if stack.is_flat:
                first_row = expert * rows
                matrix = matrix._replace(rows=(first_row, first_row + rows))
            else:
                taken = (place * size, (place + 1) * size)
                if stack.is_interleaved:
                    taken = (place, outputs)
                    matrix = matrix._replace(step=parts)
                matrix = _with_outputs(matrix._replace(expert=expert), taken)
            matrices.append(matrix)
    return tuple(matrices)


def _with_outputs(matrix: PackedMatrix, taken: tuple[int, int]) -> PackedMatrix:
    """Returns the weight that takes some outputs of an expert, which are rows or columns of it."""
    if matrix.transpose:
        return matrix._replace(columns=taken)
    return matrix._replace(rows=taken)
