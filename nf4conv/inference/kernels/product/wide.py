"""Multiplies up to four rows of x: a program's work on a stage, and on the sums of a unit.

kernel.py says how they divide the work.
"""

import triton
import triton.language as tl

import nf4conv.inference.kernels.product.assembly as text
from nf4conv.inference.kernels.product.common import add_waiting, run_assembly, store_sums


@triton.jit
def wide_stage(totals, operands, x_ptr, m, k, first, whole, thread, SHAPE: tl.constexpr):
    """Adds a stage to the totals of the slots, and returns them.

    Column 2 * (ranges * row of x + range) + block: a lane (g, t) gives x to column g, and finds the
    sums of row of x t // ranges and range t % ranges; they are meant for it if its rows are of that
    range. Slots 2 and 3 are left out if the unit is not whole.
    """
    g = thread // 4 % 8
    t = thread % 4
    row = g // 2 // SHAPE.ranges
    at = first + (g // 2 % SHAPE.ranges - g % SHAPE.ranges) * 128 + t * 32
    given = (g % 2 == t * 2 // 4) & (at < k)
    address = x_ptr.to(tl.int64) + (row.to(tl.int64) * k + at) * 2
    address = tl.where(given & (row < m), address, 0)
    outputs: tl.constexpr = "f" * SHAPE.totals
    add: tl.constexpr = text.wide_assembly(x_ptr.dtype.element_ty)
    inputs: tl.constexpr = outputs + "r" * 16 + "f" * SHAPE.scales + "rlr"
    whole = thread * 0 + whole.to(tl.int32)
    return run_assembly(add, outputs, inputs, totals + operands + (address, whole))


@triton.jit
def leave(totals, sums, held, thread, SHAPE: tl.constexpr):
    """Leaves the totals of a unit in shared memory, behind those of `held` others."""
    g = thread // 4 % 8
    t = thread % 4
    place = (g // SHAPE.ranges * (4 // SHAPE.ranges) + t // SHAPE.ranges) * 16
    range_of_warp = (held * SHAPE.warps + thread // 32) * SHAPE.ranges + g % SHAPE.ranges
    place += range_of_warp * (4 * SHAPE.sums)
    meant = (g % SHAPE.ranges == t % SHAPE.ranges).to(tl.int32)
    _store_totals(totals, sums + place, meant)


@triton.jit
def _store_totals(totals, place, meant):
    """Stores four totals at a place of shared memory, if they are meant."""
    store: tl.constexpr = """{
        .reg .pred p;
        setp.ne.b32 p, $6, 0;
        @p st.shared.v4.f32 [$5], {$1, $2, $3, $4};
        mov.b32 $0, 0;
        }"""
    run_assembly(store, "r", "ffffrr", totals + (place, meant))


@triton.jit
def gather(out_ptr, sums, m, n, norm, first, end, held, thread, SHAPE: tl.constexpr):
    """Adds up what all ranges and warps have left of `held` + 1 wide units, and stores it.

    The first unit begins at row `first`. A unit has SHAPE.sums threads, of which thread
    4 * (columns * row + column) + slot stores that row of the slot, and that column: a row of x.
    """
    COLUMNS: tl.constexpr = SHAPE.columns
    found = add_waiting(sums, thread, SHAPE.warps * SHAPE.ranges, SHAPE)
    unit = thread // SHAPE.sums
    column = thread // 4 % COLUMNS
    row_of_slot = thread % SHAPE.sums // 4 // COLUMNS
    row = first + unit * SHAPE.unit_rows + thread % 4 * SHAPE.apart + row_of_slot
    meant = (unit <= held) & (column < m) & (row < end)
    store_sums(found * norm, out_ptr, row, column, meant, n)
