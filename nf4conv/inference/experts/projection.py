"""Rows of packed experts that kernels multiply with, and how the kernels find them."""

from typing import Any, NamedTuple

import torch

from nf4conv.codec.backends import has_kernels
from nf4conv.inference.experts.packed import PackedExperts


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


class Projection(NamedTuple):
    """Rows of packed experts, and where their results go.

    Attributes:
        stack: the packed experts, the first of two if they are gated.
        operand: all of it as kernels take it.
        table: the values of codes.
        is_gated: True for a second stack, multiplied with the same rows.
        silu: True to write silu(first) · second instead of both.
    """

    stack: PackedExperts
    operand: Operand
    table: torch.Tensor
    is_gated: bool
    silu: bool


def project(
    stack: PackedExperts,
    up: PackedExperts | None = None,
    *,
    rows: int | None = None,
    up_first_row: int = 0,
    row_step: int = 1,
    up_column: int = 0,
    column_step: int = 1,
    silu: bool = False,
) -> Projection:
    """Returns the projection by `rows` of each matrix, all by default, of one stack or of two of
    the same shape and format.

    `up_first_row` is the first of them in the second stack; it is 0 in the first one. What else is
    not told by Projection, Operand tells.
    """
    from nf4conv.codec.kernels.tables import value_table  # importing Triton takes a second

    rows = rows or stack.rows
    code = stack.nested_quant_map
    operand = Operand(
        nested_code=stack.absmax if code is None else code,
        stack=_stack(stack, 0),
        up=_stack(up or stack, up_first_row),
        rows=rows,
        row_step=row_step,
        expert_chunks=stack.codes.stride(0) // 32,
        blocks=stack.absmax.stride(0),
        nested_blocks=stack.nested_blocks_per_expert or 0,
        offset_step=offset_step(stack),
        block_shift=(stack.blocksize // 64).bit_length() - 1,
        out_columns=rows if up is None or silu else 2 * rows,
        up_column=up_column,
        column_step=column_step,
    )
    table = value_table(stack.quant_type, stack.device)
    return Projection(stack, operand, table, up is not None, silu)


def _stack(packed: PackedExperts, first_row: int) -> Stack:
    """Returns a stack as kernels read it."""
    nested, offset = packed.nested_absmax, packed.nested_offset
    if nested is None or offset is None:
        nested = offset = packed.absmax
    return Stack(packed.codes, packed.absmax, nested, offset, first_row)


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
