"""Pieces of programs that several kernels of this room have in common."""

import triton
import triton.language as tl

import nf4conv.codec.kernels.product.assembly as text
from nf4conv.codec.kernels.arithmetic import multiply


@triton.jit
def run_assembly(TEXT: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, operands):
    """Run an asm statement and return its results, a tuple.

    Results and operands have a letter each: f float32, r int32, l int64.
    """
    TYPES: tl.constexpr = text.result_types(OUTPUTS)
    CONSTRAINTS: tl.constexpr = text.constraints(OUTPUTS, INPUTS)
    return tl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, operands, dtype=TYPES, is_pure=False, pack=1
    )


@triton.jit
def shared_value(code):
    """Return the value of an absmax code from the table in shared memory."""
    read: tl.constexpr = """{
        .reg .b32 a;
        mov.u32 a, codes;
        mad.lo.u32 a, $1, 4, a;
        ld.shared.f32 $0, [a];
        }"""
    return run_assembly(read, "f", "r", (code,))[0]


@triton.jit
def decode_scale(
    absmax, nested_absmax, offset, code_ptr, SHARED: tl.constexpr, SHAPE: tl.constexpr
):
    """Decode absmax, codes or not; with SHARED their values are in shared memory."""
    if SHAPE.nested:
        code = absmax.to(tl.int32)
        value = shared_value(code) if SHARED else tl.load(code_ptr + code)
        return multiply(value, nested_absmax, True) + offset
    else:
        return absmax


@triton.jit
def first_row(tile, thread, SHAPE: tl.constexpr):
    """Return the row of W in each lane's first slot, [threads] int32.

    In a wide kernel `tile` is the first row of the unit, and all warps have the same rows.
    """
    row = thread // 4 % 8 // SHAPE.ranges
    if SHAPE.wide:
        row += tile
    else:
        row += tile * SHAPE.unit_rows + thread // 32 * (8 * SHAPE.slots)
    return row


@triton.jit
def store_sums(found, out_ptr, row, column, wanted, n):
    """Store the wanted sums at [column, row] of out, [m, n]; rows behind the last are left out."""
    found = found.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + column.to(tl.int64) * n + row, found, mask=wanted & (row < n))
