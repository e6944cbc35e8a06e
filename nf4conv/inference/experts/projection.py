"""Rows of packed experts that kernels multiply with, and how the kernels find them."""

from dataclasses import dataclass
from functools import cached_property

import torch

from nf4conv.codec.backends import has_kernels
from nf4conv.inference.experts.packed import PackedExperts


@dataclass(frozen=True, eq=False)
class Projection:
    """Rows of packed experts, and where their results go.

    Attributes:
        stack: the packed experts.
        up: a second stack of the same shape and format, multiplied with the same rows; None
            without one.
        rows: of each matrix that are multiplied, of either stack.
        first_row, up_first_row: the first of them.
        row_step: from one to the next.
        up_column: the column of the result where that of the second stack begins.
        column_step: from one column of a stack's result to the next.
        silu: True to write silu(first) · second instead of both.
    """

    stack: PackedExperts
    up: PackedExperts | None
    rows: int
    first_row: int = 0
    up_first_row: int = 0
    row_step: int = 1
    up_column: int = 0
    column_step: int = 1
    silu: bool = False

    @cached_property
    def out_columns(self) -> int:
        """The columns of the result."""
        both = self.up is not None and not self.silu
        return 2 * self.rows if both else self.rows

    @cached_property
    def pointers(self) -> tuple[torch.Tensor, ...]:
        """The tensors that kernels read: values of codes, nested values, and both stacks."""
        return _pointers(self)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes, in the order of rows_kernel and groups_kernel."""
        return _sizes(self)


def project(packed: PackedExperts) -> Projection:
    """Returns the projection by whole matrices."""
    return Projection(packed, None, packed.rows)


def suits_kernels(packed: PackedExperts) -> bool:
    """Returns True if the kernels can multiply with these experts."""
    if not has_kernels(packed.device):
        return False
    if packed.columns % 64 or packed.blocksize < 64 or packed.nested_blocksize != 256:
        return False
    if packed.rows * packed.columns % packed.blocksize:
        return False
    if not all(tensor.is_contiguous() for tensor in packed.tensors().values()):
        return False
    return packed.codes.data_ptr() % 16 == 0


def suits_together(gate: PackedExperts, up: PackedExperts) -> bool:
    """Returns True if one launch can read both stacks."""
    return gate.settings() == up.settings() and offset_step(gate) == offset_step(up)


def offset_step(packed: PackedExperts) -> int:
    """Returns from one expert's nested offset to the next; 0 if all have the same one."""
    offset = packed.nested_offset
    if offset is None or offset.numel() == 1 < packed.experts:
        return 0
    return offset.stride(0)


def _nested_step(packed: PackedExperts) -> int:
    """Returns from one expert's nested absmax to the next; 0 if nested blocks run over borders."""
    nested_absmax = packed.nested_absmax
    if nested_absmax is None or packed.nested_blocks_per_expert is None:
        return 0
    if nested_absmax.dim() == 2:
        return nested_absmax.stride(0)
    return packed.nested_blocks_per_expert


def _pointers(projection: Projection) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of a projection, as kernels read them."""
    from nf4conv.codec.kernels.tables import value_table  # importing Triton takes a second

    first = projection.stack
    second = projection.up or first
    code = first.nested_quant_map
    table = value_table(first.quant_type, first.device)
    return (table, first.absmax if code is None else code, *_stack(first), *_stack(second))


def _stack(packed: PackedExperts) -> tuple[torch.Tensor, ...]:
    """Returns codes, absmax, nested absmax and offset; absmax in the place of what is not there."""
    nested, offset = packed.nested_absmax, packed.nested_offset
    if nested is None or offset is None:
        return packed.codes, packed.absmax, packed.absmax, packed.absmax
    return packed.codes, packed.absmax, nested, offset


def _sizes(projection: Projection) -> tuple[int, ...]:
    """Returns the sizes of a projection, in the order of rows_kernel and groups_kernel."""
    packed = projection.stack
    in_stacks = (
        packed.codes.stride(0) // 32,
        packed.absmax.stride(0),
        _nested_step(packed),
        offset_step(packed),
    )
    block_shift = (packed.blocksize // 64).bit_length() - 1
    return (
        projection.rows, projection.first_row, projection.up_first_row, projection.row_step,
        *in_stacks, block_shift,
        projection.out_columns, projection.up_column, projection.column_step,
    )  # fmt: skip
