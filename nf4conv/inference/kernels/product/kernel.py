"""x · Wᵀ with a packed weight: every code is decoded once, in registers, for up to 64 rows of x.

A program takes *units*, rows of W and all k or a part of them, one after the other, and a unit in
*stages*; codes and scales of the next stage are on their way meanwhile. Weights are the left
operand of a tensor core's product. The sums over 64 k are multiplied with the scale of their block
in float32, which no weight is, so two blocks must not meet in one sum:

wide  1, 2 or 4 rows of x. A lane loads 16 bytes, half a block, and four lanes two blocks of a row.
      x is given in two columns, in either with zeros for the other block. The columns that are left
      hold another range of k. All warps share the rows, and meet when the sums of SHAPE.held units
      are complete. A program's units are neighbours, and it leaves out the second half of the last
      one where that is another's.
tile  8 * column_tiles rows of x, copied to shared memory. A lane loads 8 bytes, four lanes one
      block of a row.

Tensors have one element for each thread of a program, so an asm statement is the code of one
thread. A lane (g, t) of a warp, g = lane // 4 and t = lane % 4, holds *slots*, rows of W that are
8 / ranges apart. SHAPE is a shapes.Shape. `0 + SHAPE.x` makes a constexpr of an attribute, where
Triton asks for one.
"""

import triton
import triton.language as tl

import nf4conv.inference.kernels.product.assembly as text
from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.inference.kernels.product.common import (
    add_waiting,
    decode_scale,
    first_row,
    lane_bytes,
    lane_of,
    lay_out,
    leave,
    meet,
    run_assembly,
    store_sums,
    zero_if,
)
from nf4conv.inference.kernels.product.tile import copy_x, finish, tile_stage


@kernel
def product_kernel(
    x_ptr,
    out_ptr,
    weight,
    pair_ptr,
    m: tl.int32,
    n: tl.int32,
    k: tl.int32,
    steps: tl.int32,
    share: tl.int32,
    programs: tl.int32,
    split_shift: tl.int32,
    block_shift: tl.int32,
    norm: tl.float32,
    SHAPE: tl.constexpr,
):
    """Computes the sums of units, times norm.

    A wide program computes rows program * share … + share of W; a unit is known by its first row.
    Any other computes units program, program + programs, … of `share`: unit u is part u % splits of
    k and tile u // splits of rows, splits = 1 << split_shift.

    weight: a PackedWeight, [n, k].

    Pointers to tensors:
        x_ptr: [m, k] bfloat16 or float16.
        out_ptr: [splits, m, n] bfloat16, float16 or float32, written.
        pair_ptr: [256] int32, tables.pair_table.

    Scalars:
        m, n, k: rows of x, rows of W, columns of both.
        steps: stages of a unit.
        share: rows of a wide program; otherwise units of all programs.
        programs: their number.
        split_shift: log2 of the parts of k; 0 if wide.
        block_shift: a block has 64 << block_shift elements.
        norm: what the sums are multiplied with: 1 / tables.MULTIPLES.
    """
    program = tl.program_id(0)
    thread = tl.arange(0, 32 * SHAPE.warps)
    unit = program * share if SHAPE.wide else program
    stride = SHAPE.unit_rows if SHAPE.wide else programs
    end = tl.minimum(unit + share, n) if SHAPE.wide else share
    split_shift = 0 if SHAPE.wide else split_shift
    part = (weight, n, k, block_shift, end)
    division = (steps, split_shift)
    x_rows = (x_ptr, m, k)
    result = (out_ptr, m, n, norm)
    # what follows must come after it: the kernel before may have written all else
    thread, tiles = _start(part, unit, division, pair_ptr, thread, SHAPE)
    offset = tl.load(weight.offset) if SHAPE.nested else 0.0
    ahead = _load_stage(part, unit, 0, division, thread, SHAPE)
    thread = meet(weight.code, thread, SHAPE.wide and SHAPE.nested, SHAPE)
    if not SHAPE.wide:
        first = _first_k(unit, 0, division, thread, SHAPE)
        copy_x(x_rows, tiles, first, thread, SHAPE)
    totals = ()
    for _ in tl.static_range(0 + SHAPE.totals):
        totals = totals + (tl.zeros(thread.shape, tl.float32),)
    step = 0
    parity = 0  # which tile of x, or how many units' sums wait
    stages = (end - unit + stride - 1) // stride * steps
    for stage in range(stages):
        current = ahead
        first = _first_k(unit, step, division, thread, SHAPE)
        done = step == steps - 1
        next_unit = tl.where(done, unit + stride, unit)
        next_step = tl.where(done, 0, step + 1)
        ahead = _load_stage(part, next_unit, next_step, division, thread, SHAPE)
        following = _first_k(next_unit, next_step, division, thread, SHAPE)
        operands, absmax, nested = current
        for i in tl.static_range(0 + SHAPE.scales):
            scale = decode_scale(absmax[i], nested[i], offset, weight.code, SHAPE.wide, SHAPE)
            operands = operands + (scale,)
        operands = operands + (lane_bytes(thread),)
        if SHAPE.wide:
            whole = unit + SHAPE.unit_rows // 2 < end
            totals = wide_stage(totals, operands, x_rows, first, whole, thread, SHAPE)
        else:
            totals = tile_stage(
                totals, operands, x_rows, first, following, tiles, parity, thread, SHAPE
            )
        if done:
            if SHAPE.wide:
                leave(totals, tiles, parity, thread, SHAPE)
                if (parity == SHAPE.held - 1) | (stage == stages - 1):
                    first_of_held = unit - parity * SHAPE.unit_rows
                    gather(result, tiles, first_of_held, end, parity, thread, SHAPE)
            else:
                finish(totals, result, unit, split_shift, thread, SHAPE)
        totals = zero_if(done, totals)
        if SHAPE.wide:
            parity = tl.where(done, (parity + 1) % SHAPE.held, parity)
        else:
            parity = tl.where(SHAPE.parts % 2 == 1, 1 - parity, parity)
        unit = next_unit
        step = next_step


launch_product = Launcher(product_kernel)


@triton.jit
def _start(part, unit, division, pair_ptr, thread, SHAPE: tl.constexpr):
    """Lays out shared memory and waits for the kernel before; meanwhile brings words to L2, which
    stays up to date.

    Returns the thread, so that what uses it comes after this, and the address of `tiles`.
    """
    weight, n, k, _, _ = part
    first = _first_k(unit, 0, division, thread, SHAPE) + thread % 4 * 32
    first = tl.minimum(first, k - 1)
    for slot in tl.static_range(0 + SHAPE.slots * SHAPE.wide):
        row = first_row(unit >> division[1], thread, SHAPE) + slot * SHAPE.apart
        row = tl.minimum(row, n - 1)
        element = row.to(tl.int64) * k + first
        address = weight.packed.to(tl.int64) + element // 2
        run_assembly("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "r", "l", (address,))
    return lay_out(pair_ptr, thread, SHAPE.wide and SHAPE.nested, SHAPE)


@triton.jit
def _first_k(unit, step, division, thread, SHAPE: tl.constexpr):
    """Returns the first k of each lane's stage, [threads] int32.

    In a wide kernel each warp has its own, and in the warp each of its ranges.
    """
    steps, split_shift = division
    split = unit & ((1 << split_shift) - 1)
    first = (split * steps + step) * SHAPE.span + thread * 0
    if SHAPE.wide:
        first += thread // 32 * (128 * SHAPE.ranges) + thread // 4 % SHAPE.ranges * 128
    return first


@triton.jit
def _load_stage(part, unit, step, division, thread, SHAPE: tl.constexpr):
    """Loads a stage as it is stored.

    Behind the last row and the last k the last ones are read again: there the sums are not stored,
    and x is 0.

    Returns 2 * blocks words of each slot; then what a lane loads of absmax, and of nested absmax. A
    quad needs slots * blocks scales; lane t loads those of index t, t + 4,
    …, for all four.
    """
    weight, n, k, block_shift, end = part
    # a lane's load is 16 bytes, half a block, if wide, and 8 bytes, a quarter, otherwise
    LOADS: tl.constexpr = 1 if SHAPE.wide else 0 + SHAPE.blocks
    read: tl.constexpr = text.words_assembly(2 * SHAPE.blocks // LOADS, LOADS, SHAPE.wide)
    outputs: tl.constexpr = "r" * (2 * SHAPE.blocks)
    inputs: tl.constexpr = "lrr" if SHAPE.wide else "l" + "r" * LOADS
    t = thread % 4
    first = _first_k(unit, step, division, thread, SHAPE)
    row = first_row(unit >> division[1], thread, SHAPE)
    words = ()
    for slot in tl.static_range(0 + SHAPE.slots):
        # in pieces of 8 bytes, which are 16 k
        row_of_slot = tl.minimum(row + slot * SHAPE.apart, n - 1)
        line = row_of_slot * (k >> 4)
        operands = (weight.packed.to(tl.int64),)
        for i in tl.static_range(LOADS):
            if SHAPE.wide:
                piece = line + (tl.minimum(first + t * 32, k - 32) >> 4)
            else:
                column = tl.minimum(first + i * 64 + t * 16, k - 16)
                piece = line + (column >> 4)
            operands = operands + (piece,)
        if SHAPE.wide:
            is_own = unit + slot // 2 * (SHAPE.unit_rows // 2) < end
            asked = is_own & (first + t * 32 < k)
            operands = operands + (asked.to(tl.int32),)
        words = words + run_assembly(read, outputs, inputs, operands)
    codes = ()
    nested = ()
    for i in tl.static_range(0 + SHAPE.scales):
        index = t + 4 * i
        slot_of_scale = index // SHAPE.blocks
        row_of_slot = tl.minimum(row + slot_of_scale * SHAPE.apart, n - 1)
        line = row_of_slot * (k >> 6)
        chunk = tl.minimum((first >> 6) + index % SHAPE.blocks, (k >> 6) - 1)
        block = (line + chunk) >> block_shift
        codes = codes + (tl.load(weight.absmax + block),)
        of_code = block
        if SHAPE.nested:
            of_code = tl.load(weight.nested_absmax + (block >> 8))
        nested = nested + (of_code,)
    return words, codes, nested


# ---------------------------------------------------------------- one to four rows of x


@triton.jit
def wide_stage(totals, operands, x_rows, first, whole, thread, SHAPE: tl.constexpr):
    """Adds a stage to the totals of the slots, and returns them.

    Column 2 * (ranges * row of x + range) + block: a lane (g, t) gives x to column g, and finds the
    sums of row of x t // ranges and range t % ranges; they are meant for it if its rows are of that
    range. Slots 2 and 3 are left out if the unit is not whole.
    """
    x_ptr, m, k = x_rows
    g, t = lane_of(thread)
    row = g // 2 // SHAPE.ranges
    range_apart = g // 2 % SHAPE.ranges - g % SHAPE.ranges
    at = first + range_apart * 128 + t * 32
    given = (g % 2 == t * 2 // 4) & (at < k)
    place = (row.to(tl.int64) * k + at) * 2
    address = tl.where(given & (row < m), x_ptr.to(tl.int64) + place, 0)
    outputs: tl.constexpr = "f" * SHAPE.totals
    add: tl.constexpr = text.wide_assembly(x_ptr.dtype.element_ty)
    inputs: tl.constexpr = outputs + "r" * 16 + "f" * SHAPE.scales + "rlr"
    whole = thread * 0 + whole.to(tl.int32)
    return run_assembly(add, outputs, inputs, totals + operands + (address, whole))


@triton.jit
def gather(result, sums, first, end, held, thread, SHAPE: tl.constexpr):
    """Adds up what all ranges and warps have left of `held` + 1 wide units, and stores it.

    The first unit begins at row `first`. A unit has SHAPE.sums threads, of which thread
    4 * (columns * row + column) + slot stores that row of the slot, and that column: a row of x.
    """
    COLUMNS: tl.constexpr = SHAPE.columns
    out_ptr, m, n, norm = result
    found = add_waiting(sums, thread, SHAPE.warps * SHAPE.ranges, SHAPE)
    unit = thread // SHAPE.sums
    column = thread // 4 % COLUMNS
    row_of_slot = thread % SHAPE.sums // 4 // COLUMNS
    row = first + unit * SHAPE.unit_rows + thread % 4 * SHAPE.apart + row_of_slot
    meant = (unit <= held) & (column < m) & (row < end)
    store_sums(found * norm, out_ptr, row, column, meant, n)
