"""Describes how each pair of tensors of two checkpoints compares."""

from dataclasses import dataclass
from enum import Enum


class Status(str, Enum):  # noqa: UP042 - prints as before
    """Names how the tensors of one name in two checkpoints compare; the worst comes first."""

    ONLY_A = "only in A"
    ONLY_B = "only in B"
    SHAPE = "another shape"
    DIFFERENT = "different"
    EQUAL = "equal in value"
    IDENTICAL = "identical"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class ComparedRow:
    """Describes how the tensors of one name in two checkpoints compare.

    Attributes:
        name: the name of both tensors.
        stack: the path of their stack of layers, such as "model.layers". Empty outside of a stack.
        layer: the number of their layer. None outside of a stack.
        kind: the path of their module inside a layer, such as "mlp.down_proj".
        parameters: the number of elements of the tensor.
        format_a: how the first checkpoint stores it, in a few words. None where it lacks the
            tensor.
        format_b: how the second checkpoint stores it, in a few words. None where it lacks the
            tensor.
        shape_a: the shape in the first checkpoint. None where it lacks the tensor.
        shape_b: the shape in the second checkpoint. None where it lacks the tensor.
        status: how the two compare.
        differing: the number of values that are not equal. None where no values were compared.
        relative_error: ‖A - B‖ / ‖A‖. None where no values were compared.
        snr_db: the relative error as signal to noise ratio, in decibels. None where no values were
            compared.
        largest_difference: the largest |a - b|. None where no values were compared.
        squared_difference: the sum of (a - b)². None where no values were compared.
        squared_values: the sum of a². None where no values were compared.
        passed: True if the tolerance that was given lets the difference pass.
    """

    name: str
    stack: str
    layer: int | None
    kind: str
    parameters: int
    format_a: str | None
    format_b: str | None
    shape_a: tuple[int, ...] | None
    shape_b: tuple[int, ...] | None
    status: Status
    differing: int | None = None
    relative_error: float | None = None
    snr_db: float | None = None
    largest_difference: float | None = None
    squared_difference: float | None = None
    squared_values: float | None = None
    passed: bool = False


@dataclass(frozen=True)
class ComparedKind:
    """Sums up the compared tensors of one kind in one stack of layers.

    Attributes:
        stack: the path of the stack of layers, such as "model.layers". Empty outside of a stack.
        kind: the path of the module inside a layer, such as "mlp.down_proj".
        tensors: the number of tensors.
        parameters: the number of elements of all of them.
        identical: the number of tensors whose bytes are all equal.
        differing: the number of values that are not equal.
        relative_error: ‖A - B‖ / ‖A‖ of all of them taken together. None if no values were
            compared.
        largest_relative_error: the largest relative error of one of them. None if no values were
            compared.
    """

    stack: str
    kind: str
    tensors: int
    parameters: int
    identical: int
    differing: int
    relative_error: float | None
    largest_relative_error: float | None
