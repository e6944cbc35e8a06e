"""x · Wᵀ for one row of x, or two, that stay in registers: columns of W that are few enough.

This is the wide kernel of kernel.py with other loops. A *unit* is 8 rows of W with all their k, and
is read at once: in each of SHAPE.steps steps a warp takes two ranges of 128 k. So a lane loads its
part of x once for all units of its program, which are neighbours, and finds addresses by adding to
the ones before. Sums of SHAPE.held units wait in shared memory for each other.

Tensors have one element for each thread of a program, as in kernel.py.
"""

import triton
import triton.language as tl

import nf4conv.inference.kernels.product.assembly as text
from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.inference.kernels.product.common import (
    add_waiting,
    decode_scale,
    lane_bytes,
    lane_of,
    lay_out,
    meet,
    run_assembly,
    store_sums,
)


@kernel
def held_kernel(
    x_ptr,
    out_ptr,
    weight,
    pair_ptr,
    m: tl.int32,
    n: tl.int32,
    k: tl.int32,
    share: tl.int32,
    longer: tl.int32,
    block_shift: tl.int32,
    norm: tl.float32,
    SHAPE: tl.constexpr,
):
    """Computes the sums of `share` units, times norm; one more in the first `longer` programs.

    Pointers and scalars are those of product_kernel, but for these:
        m: 1 or 2.
        k: SHAPE.columns_most at most.
        block_shift: a block has 64 << block_shift elements.
    """
    program = tl.program_id(0)
    thread = tl.arange(0, 32 * SHAPE.warps)
    unit = program * share + tl.minimum(program, longer)
    end = unit + share + (program < longer).to(tl.int32)
    last = tl.minimum(end * 8, n)  # the row behind those of the program
    part = (weight, k, block_shift, last)
    x_rows = (x_ptr, m, k)
    result = (out_ptr, m, n, norm)
    thread, sums = _start(part, unit, pair_ptr, thread, SHAPE)
    offset = tl.load(weight.offset) if SHAPE.nested else 0.0
    address, left = _find(part, unit, thread, SHAPE)
    ahead = _load(part, unit, address, left, thread, SHAPE)
    x = ()
    for step in tl.static_range(0, 0 + SHAPE.steps, 0 + SHAPE.sharing):
        x = x + (_load_x(x_rows, step, thread, SHAPE),)
    thread = meet(weight.code, thread, SHAPE.nested, SHAPE)
    held = 0
    while unit < end:
        current = ahead
        address += k.to(tl.int64) * 4
        left -= 8
        ahead = _load(part, unit + 1, address, left, thread, SHAPE)
        totals = _add_unit(current, x, x_ptr, offset, weight.code, thread, SHAPE)
        _leave(totals, sums, held, thread, SHAPE)
        if (held == SHAPE.held - 1) | (unit == end - 1):
            _gather(result, sums, unit - held, last, held, thread, SHAPE)
        held = (held + 1) % SHAPE.held
        unit += 1


launch_held = Launcher(held_kernel)


@triton.jit
def _start(part, unit, pair_ptr, thread, SHAPE: tl.constexpr):
    """Lays out shared memory and waits for the kernel before; meanwhile brings the first unit's
    codes to L2, which stays up to date.

    Returns the thread, so that what uses it comes after this, and the address of `sums`.
    """
    ask: tl.constexpr = text.prefetch_assembly(0 + SHAPE.steps)
    address, left = _find(part, unit, thread, SHAPE)
    stride = thread.to(tl.int64) * 0 + part[1].to(tl.int64) * 2
    inputs: tl.constexpr = "ll" + "r" * SHAPE.steps
    lefts = _by_step(part, left, thread, SHAPE)
    run_assembly(ask, "r", inputs, (address, stride) + lefts)
    return lay_out(pair_ptr, thread, SHAPE.nested, SHAPE)


@triton.jit
def _first_k(step, thread, SHAPE: tl.constexpr):
    """Returns the first of the 128 k of each lane's range in a step."""
    return thread // 32 * (256 * SHAPE.steps) + step * 256 + thread // 4 % 2 * 128


@triton.jit
def _find(part, unit, thread, SHAPE: tl.constexpr):
    """Returns where a lane's codes of a unit begin, those of its first slot and step, and how many
    rows there are from that slot's on.
    """
    weight, k, _, last = part
    row = unit * 8 + thread // 8 % 4
    first = _first_k(0, thread, SHAPE) + thread % 4 * 32
    element = row.to(tl.int64) * k + first
    return weight.packed.to(tl.int64) + element // 2, last - row


@triton.jit
def _by_step(part, left, thread, SHAPE: tl.constexpr):
    """Returns for each step how many rows there are; none behind the last k."""
    lefts = ()
    for step in tl.static_range(0 + SHAPE.steps):
        first = _first_k(step, thread, SHAPE) + thread % 4 * 32
        lefts = lefts + (tl.where(first < part[1], left, 0),)
    return lefts


@triton.jit
def _load(part, unit, address, left, thread, SHAPE: tl.constexpr):
    """Loads a unit as it is stored, and nothing behind the last row and the last k.

    Returns for each step four words of each slot; then for each step what a lane loads of absmax,
    and of nested absmax. A quad needs two scales of each slot, of which lane t loads one.
    """
    weight, k, block_shift, last = part
    read: tl.constexpr = text.unit_assembly(0 + SHAPE.steps)
    outputs: tl.constexpr = "r" * (8 * SHAPE.steps)
    inputs: tl.constexpr = "ll" + "r" * SHAPE.steps
    stride = thread.to(tl.int64) * 0 + k.to(tl.int64) * 2
    lefts = _by_step(part, left, thread, SHAPE)
    words = run_assembly(read, outputs, inputs, (address, stride) + lefts)
    chunks = k >> 6
    t = thread % 4
    codes = ()
    nested = ()
    for step in tl.static_range(0 + SHAPE.steps):
        row = unit * 8 + thread // 8 % 4
        chunk = _first_k(step, thread, SHAPE) >> 6
        row += t // 2 * 4
        chunk += t % 2
        there = (row < last) & (chunk < chunks)
        block = (row * chunks + chunk) >> block_shift
        code = tl.load(weight.absmax + block, mask=there, other=0)
        codes = codes + (code,)
        if SHAPE.nested:
            nested_block = block >> 8
            one = tl.load(weight.nested_absmax + nested_block, mask=there, other=0.0)
            nested = nested + (one,)
        else:
            nested = nested + (block,)
    return words, codes, nested


@triton.jit
def _load_x(x_rows, step, thread, SHAPE: tl.constexpr):
    """Loads what a lane gives to its column of x: 16 words, 0 where there is none.

    Column 2 · (2 · row + range) + block has the k of that block of 64, and 0 for the other one. If
    two steps share, the row stands for this step or the one behind it.
    """
    x_ptr, m, k = x_rows
    read: tl.constexpr = text.x_assembly()
    g, t = lane_of(thread)
    row = g // 4
    column_range = g // 2 % 2
    given = g % 2 == t // 2
    if SHAPE.sharing == 2:
        step += row
        row = g * 0
    at = _first_k(step, thread, SHAPE) + (column_range - g % 2) * 128
    at += t * 32
    given = given & (row < m) & (at < k)
    place = row.to(tl.int64) * k + at
    address = tl.where(given, x_ptr.to(tl.int64) + place * 2, 0)
    return run_assembly(read, "r" * 16, "l", (address,))


@triton.jit
def _add_unit(loaded, x, x_ptr, offset, code_ptr, thread, SHAPE: tl.constexpr):
    """Returns the totals of a unit's two slots."""
    add: tl.constexpr = text.stacks_assembly(x_ptr.dtype.element_ty, 1)
    inputs: tl.constexpr = "ff" + "r" * 8 + "f" + "r" * 17
    words, absmax, nested = loaded
    zero = tl.zeros(thread.shape, tl.float32)
    totals = (zero, zero)
    others = (zero, zero)  # of the second of two steps that are paired
    for step in tl.static_range(0 + SHAPE.steps):
        scale = decode_scale(absmax[step], nested[step], offset, code_ptr, True, SHAPE)
        own_words = words[8 * step : 8 * step + 8]
        operands = own_words + (scale, lane_bytes(thread))
        operands = operands + x[step // SHAPE.sharing]
        if step % SHAPE.sharing == 1:
            others = run_assembly(add, "ff", inputs, others + operands)
        else:
            totals = run_assembly(add, "ff", inputs, totals + operands)
    if SHAPE.sharing == 2:
        is_other = thread % 4 >= 2
        upper = tl.where(is_other, others[0], totals[0])
        lower = tl.where(is_other, others[1], totals[1])
        totals = (upper, lower)
    if SHAPE.rows == 1:  # two lanes have sums of the same row and range
        swap: tl.constexpr = text.add_across(2)
        upper = run_assembly(swap, "f", "f", (totals[0],))[0]
        lower = run_assembly(swap, "f", "f", (totals[1],))[0]
        totals = (upper, lower)
    return totals


@triton.jit
def _leave(totals, sums, held, thread, SHAPE: tl.constexpr):
    """Leaves the totals of a unit in shared memory, behind those of `held` others."""
    g, t = lane_of(thread)
    store: tl.constexpr = """{
        .reg .pred p;
        setp.ne.b32 p, $4, 0;
        @p st.shared.v2.f32 [$3], {$1, $2};
        mov.b32 $0, 0;
        }"""
    if SHAPE.rows == 1:
        place = g // 2 * 8
        meant = t == g % 2
    else:
        place = (g // 2 * 2 + t // 2) * 8
        meant = t % 2 == g % 2
    range_of_warp = (held * SHAPE.warps + thread // 32) * 2 + g % 2
    place += range_of_warp * (4 * SHAPE.sums)
    run_assembly(store, "r", "ffrr", totals + (sums + place, meant.to(tl.int32)))


@triton.jit
def _gather(result, sums, first, last, held, thread, SHAPE: tl.constexpr):
    """Adds up what all ranges and warps have left of `held` + 1 units, `first` and those behind it,
    and stores it.

    A unit has SHAPE.sums threads; thread 2 * (rows * row + row of x) + slot has that row of the
    slot.
    """
    out_ptr, m, n, norm = result
    found = add_waiting(sums, thread, SHAPE.warps * 2, SHAPE)
    unit = thread // SHAPE.sums
    index = thread % SHAPE.sums
    column = index // 2 % SHAPE.rows
    row = (first + unit) * 8 + index % 2 * 4
    row += index // (2 * SHAPE.rows)
    meant = (unit <= held) & (column < m) & (row < last)
    store_sums(found * norm, out_ptr, row, column, meant, n)
