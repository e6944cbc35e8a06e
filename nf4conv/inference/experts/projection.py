"""Rows of packed experts that kernels multiply with, and how the kernels find them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

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
        up_first_row: the first of them in the second stack; 0 in the first one.
        row_step: from one to the next.
        up_column: the column of the result where that of the second stack begins.
        column_step: from one column of a stack's result to the next.
        silu: True to write silu(first) · second instead of both.
    """

    stack: PackedExperts
    up: PackedExperts | None
    rows: int
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
    def table(self) -> torch.Tensor:
        """The values of codes."""
        from nf4conv.codec.kernels.tables import value_table  # importing Triton takes a second

        return value_table(self.stack.quant_type, self.stack.device)

    @cached_property
    def operand(self) -> "Operand":
        """It as kernels take it."""
        first = self.stack
        code = first.nested_quant_map
        return Operand(
            nested_code=first.absmax if code is None else code,
            stack=_stack(first, 0),
            up=_stack(self.up or first, self.up_first_row),
            rows=self.rows,
            row_step=self.row_step,
            expert_chunks=first.codes.stride(0) // 32,
            blocks=first.absmax.stride(0),
            nested_blocks=first.nested_blocks_per_expert or 0,
            offset_step=offset_step(first),
            block_shift=(first.blocksize // 64).bit_length() - 1,
            out_columns=self.out_columns,
            up_column=self.up_column,
            column_step=self.column_step,
        )


def project(packed: PackedExperts) -> Projection:
    """Returns the projection by whole matrices."""
    return Projection(packed, None, packed.rows)


def suits_kernels(packed: PackedExperts) -> bool:
    """Returns True if the kernels can multiply with these experts."""
    if not has_kernels(packed.device):
        return False
    if packed.columns % 64 or packed.blocksize < 64:
        return False
    if packed.rows * packed.columns % packed.blocksize:
        return False
    if not all(tensor.is_contiguous() for tensor in packed.tensors().values()):
        return False
    return packed.codes.data_ptr() % 16 == 0


def suits_together(gate: PackedExperts, up: PackedExperts) -> bool:
    """Returns True if one launch can read both stacks."""
    return _layout_of(gate) == _layout_of(up)


def _layout_of(packed: PackedExperts) -> tuple[object, ...]:
    shape = (packed.rows, packed.columns, packed.nested_blocks_per_expert, offset_step(packed))
    return packed.quant_type, packed.blocksize, packed.nested, *shape


def offset_step(packed: PackedExperts) -> int:
    """Returns from one expert's nested offset to the next; 0 if all have the same one."""
    offset = packed.nested_offset
    if offset is None or offset.numel() == 1 < packed.experts:
        return 0
    return offset.stride(0)


class Stack(NamedTuple):
    """A stack of experts as kernels read it.

    Attributes:
        codes, absmax: those of PackedExperts.
        nested_absmax, offset: likewise; absmax in their place without double quantization.
        first_row: of each matrix, the first that is multiplied.
    """

    codes: Any
    absmax: Any
    nested_absmax: Any
    offset: Any
    first_row: int

    def addresses(self) -> tuple[int, ...]:
        """Returns the stack as it is launched with."""
        codes, absmax, nested_absmax, offset, first_row = self
        nested = (nested_absmax.data_ptr(), offset.data_ptr())
        return codes.data_ptr(), absmax.data_ptr(), *nested, first_row


class Operand(NamedTuple):
    """A projection as kernels take it; a chunk is 64 elements of a row.

    Attributes:
        nested_code: [256], the values of 8-bit absmax; absmax in its place otherwise.
        stack: the first stack.
        up: the second; the first again without one.
        rows: of each matrix, how many are multiplied.
        row_step: rows of the matrix between two that follow each other in the result: 2 where gate
            and up take turns.
        expert_chunks: from one expert to the next.
        blocks: absmax from one expert to the next.
        nested_blocks: nested absmax from one expert to the next; 0 if they run over borders.
        offset_step: offsets from one expert to the next; 0 if all experts share one.
        block_shift: a block has 64 << block_shift elements.
        out_columns: of the result.
        up_column: the column of the result where that of the second stack begins.
        column_step: from one column of a stack's result to the next.
    """

    # first: the order decides which numbers the assembler loads in pairs. Elsewhere groups_kernel
    # took 171 registers on Hopper with Triton 3.6, and two programs fit a multiprocessor, not three
    nested_code: Any
    stack: Stack
    up: Stack
    rows: int
    row_step: int
    expert_chunks: int
    blocks: int
    nested_blocks: int
    offset_step: int
    block_shift: int
    out_columns: int
    up_column: int
    column_step: int

    def addresses(self) -> tuple[Any, ...]:
        """Returns the operand as it is launched with."""
        nested_code, stack, up, *numbers = self
        return nested_code.data_ptr(), stack.addresses(), up.addresses(), *numbers


def _stack(packed: PackedExperts, first_row: int) -> Stack:
    """Returns a stack as kernels read it."""
    nested, offset = packed.nested_absmax, packed.nested_offset
    if nested is None or offset is None:
        nested = offset = packed.absmax
    return Stack(packed.codes, packed.absmax, nested, offset, first_row)
