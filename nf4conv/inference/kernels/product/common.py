"""Pieces of programs that several kernels of this room have in common."""

import triton
import triton.language as tl

import nf4conv.inference.kernels.product.assembly as text
from nf4conv.codec.kernels.arithmetic import multiply


@triton.jit
def run_assembly(TEXT: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, operands):
    """Runs an asm statement and returns its results, a tuple.

    Results and operands have a letter each: f float32, r int32, l int64.
    """
    TYPES: tl.constexpr = text.result_types(OUTPUTS)
    CONSTRAINTS: tl.constexpr = text.constraints(OUTPUTS, INPUTS)
    return tl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, operands, dtype=TYPES, is_pure=False, pack=1
    )


@triton.jit
def shared_value(code):
    """Returns the value of an absmax code from the table in shared memory."""
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
    """Decodes absmax, codes or not; with SHARED their values are in shared memory, and code_ptr may
    be None.
    """
    if SHAPE.nested:
        code = absmax.to(tl.int32)
        value = shared_value(code) if SHARED else tl.load(code_ptr + code)
        return multiply(value, nested_absmax, True) + offset
    else:
        return absmax


@triton.jit
def lay_out(pair_ptr, thread, HAS_CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Lays out shared memory, fills the table of pairs, and waits for the kernel before.

    Returns the thread, so that what uses it comes after this, and the address of `tiles`.
    """
    fill: tl.constexpr = text.fill_assembly(
        0 + SHAPE.warps, 0 + SHAPE.shared_bytes, HAS_CODES, SHAPE.early
    )
    return run_assembly(fill, "rr", "lr", (pair_ptr.to(tl.int64), thread))


@triton.jit
def meet(code_ptr, thread, HAS_CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Fills the table of nested absmax if there is one, and waits until all threads have filled
    theirs; returns the thread, so that what uses it comes after this.
    """
    fill: tl.constexpr = text.meet_assembly(HAS_CODES, 0 + SHAPE.warps)
    return run_assembly(fill, "r", "lr", (code_ptr.to(tl.int64), thread))[0]


@triton.jit
def lane_of(thread):
    """Returns g and t of each lane (g, t) of a warp."""
    return thread // 4 % 8, thread % 4


@triton.jit
def zero_if(done, totals):
    """Returns the totals, or as many zeros."""
    kept = ()
    for i in tl.static_range(len(totals)):
        kept = kept + (tl.where(done, 0.0, totals[i]),)
    return kept


@triton.jit
def leave(totals, sums, held, thread, SHAPE: tl.constexpr):
    """Leaves the totals of a unit in shared memory, behind those of `held` others."""
    g, t = lane_of(thread)
    column = g // SHAPE.ranges * (4 // SHAPE.ranges)
    place = (column + t // SHAPE.ranges) * 16
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
def add_waiting(sums, thread, PARTS: tl.constexpr, SHAPE: tl.constexpr):
    """Adds up the sums that wait in shared memory, `PARTS` of each, for SHAPE.held units.

    A unit has SHAPE.sums threads, of which each returns one of its sums.
    """
    add: tl.constexpr = text.gather_assembly(PARTS, 0 + SHAPE.sums)
    unit = thread // SHAPE.sums
    place = unit * (SHAPE.sums * PARTS) + thread % SHAPE.sums
    has_unit = (thread < SHAPE.sums * SHAPE.held).to(tl.int32)
    return run_assembly(add, "f", "rr", (sums + place * 4, has_unit))[0]


@triton.jit
def lane_bytes(thread):
    """Returns 4 * lane in each byte, by which a lane finds its copy of the table of pairs."""
    return thread % 32 * 0x04040404


@triton.jit
def first_row(tile, thread, SHAPE: tl.constexpr):
    """Returns the row of W in each lane's first slot, [threads] int32.

    In a wide kernel `tile` is the first row of the unit, and all warps have the same rows.
    """
    row = thread // 4 % 8 // SHAPE.ranges
    if SHAPE.wide:
        row += tile
    else:
        row_of_unit = tile * SHAPE.unit_rows
        row += row_of_unit + thread // 32 * (8 * SHAPE.slots)
    return row


@triton.jit
def store_sums(found, out_ptr, row, column, wanted, n):
    """Stores the wanted sums at [column, row] of out, [m, n]; rows behind the last are left out."""
    found = found.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + column.to(tl.int64) * n + row, found, mask=wanted & (row < n))
