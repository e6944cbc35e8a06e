"""x · Wᵀ for few rows: each row with the experts that it chose, by tensor cores.

This is the wide kernel of product/ with other addresses. A *unit* is 8 rows of W for one *group* of
terms. Going up, a group is a pair of a token and an expert, with gate and up at once and the
activation behind them. Going down, it is a token with all its experts, whose rows of x and columns
of W stand one behind the other; results are weighted and added up here. So nothing is written that
is read again but the values between the two launches.

All warps share a unit's rows and divide its k: in a *step* a warp takes two ranges of 128. A
program's units are neighbours, and a *stage* is what it reads at once: some steps of a unit.

Tensors have one element for each thread of a program, as in product/.
"""

from dataclasses import dataclass
from functools import cache

import triton
import triton.language as tl

import nf4conv.inference.kernels.product.assembly as text
from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.inference.kernels.product.common import (
    add_waiting,
    decode_scale,
    lane_bytes,
    lane_of,
    leave,
    run_assembly,
    zero_if,
)
from nf4conv.inference.kernels.product.shapes import Compiled


@dataclass(eq=False, repr=False)  # told apart by identity, which is faster
class Shape(Compiled):
    """The shape of a product: rows_kernel is compiled once for each.

    Attributes:
        terms: of a group.
        row_chunks: chunks of 64 k in a row.
        steps: of a stage.
        ahead: True to load a stage ahead; False if each program has one stage.
        stacks: 2 for gate and up, 1 otherwise.
        silu: True to write silu(gate) · up.
        weighted: True going down: terms are weighted and added up.
        nested: True if absmax is uint8 codes.
        early: True to begin before the kernel before has ended.
        warps, ranges, span, sums, held, shared_bytes: those of a wide product.Shape for two rows.
        padded: k of a term, with what fills its last range.
        stages: of a unit.
        holds_x: True if x stays in registers.
    """

    terms: int
    row_chunks: int
    steps: int
    ahead: bool
    stacks: int
    silu: bool
    weighted: bool
    nested: bool
    early: bool
    warps: int = 8
    ranges: int = 2
    span: int = 2048
    sums: int = 32
    held: int = 4
    shared_bytes: int = 8192

    def __post_init__(self) -> None:
        self.padded = -(-self.row_chunks // 2) * 128
        self.stages = -(-self.terms * self.padded // (self.span * self.steps))
        self.holds_x = self.stages * self.steps == 1


shape_of = cache(Shape)
"""Returns the Shape of some attributes, always the same one."""


@kernel
def rows_kernel(
    x_ptr,
    ids_ptr,
    factor_ptr,
    out_ptr,
    pair_ptr,
    weight,
    share: tl.int32,
    experts: tl.int32,
    parts: tl.int32,
    own_units: tl.int32,
    norm: tl.float32,
    SHAPE: tl.constexpr,
):
    """Computes own_units units of a group: the sums over its terms of x · Wᵀ, times norm, weighted.

    Term t of group g has expert ids[g · terms + t] and row (g · terms + t) // share of x, where
    share is 1 unless `terms` is. Experts that do not exist contribute 0.

    weight: an Operand; its rows are a multiple of 8.

    Pointers to tensors:
        x_ptr: [.., 64 · row_chunks] bfloat16 or float16.
        ids_ptr: [groups · terms] int64.
        factor_ptr: [groups · terms], of any float dtype; read if `weighted`.
        out_ptr: [groups, out_columns], written: row r of W in column r · column_step. With two
            stacks, up goes to up_column + r · column_step, or with `silu` both become one value.
        pair_ptr: [256] int32, tables.pair_table.

    Scalars:
        experts: of the stack.
        parts: programs of a group.
        norm: what sums are multiplied with: 1 / tables.MULTIPLES.
    """
    thread = tl.arange(0, 32 * SHAPE.warps)
    group = tl.program_id(0) // parts
    unit = tl.program_id(0) % parts * own_units
    end = tl.minimum(unit + own_units, weight.rows // 8)
    chosen = (group, ids_ptr, factor_ptr, experts)
    thread, sums, places, ahead = _start(weight, chosen, pair_ptr, unit, end, thread, SHAPE)
    x_rows = (x_ptr, group, share)
    x = ()
    if SHAPE.holds_x:
        x = _load_x(x_rows, 0, thread, SHAPE)
    totals = ()
    for _ in tl.static_range(2 * SHAPE.stacks):
        totals = totals + (tl.zeros(thread.shape, tl.float32),)
    held = 0
    stage = 0
    for _ in range((end - unit) * SHAPE.stages if SHAPE.ahead else 1):
        current = ahead
        found = places
        done = stage == SHAPE.stages - 1
        if SHAPE.ahead:
            following = tl.where(done, 0, stage + 1)
            if SHAPE.stages > 1:
                places = _find(weight, chosen, following, thread, SHAPE)
            ahead = _load(places, weight, tl.where(done, unit + 1, unit), end, SHAPE)
        totals = _add_stage(totals, current, found, x, x_rows, stage, thread, SHAPE)
        if done:
            leave(totals if SHAPE.stacks == 2 else totals + totals, sums, held, thread, SHAPE)
            if (held == SHAPE.held - 1) | (unit == end - 1):
                _gather(out_ptr, weight, norm, sums, group, unit - held, held, thread, SHAPE)
        held = tl.where(done, (held + 1) % SHAPE.held, held)
        totals = zero_if(done, totals)
        unit = tl.where(done, unit + 1, unit)
        stage = tl.where(done, 0, stage + 1)


launch_rows = Launcher(rows_kernel)


@triton.jit
def _start(weight, chosen, pair_ptr, unit, end, thread, SHAPE: tl.constexpr):
    """Fills shared memory, waits for the kernel before, and loads the first stage.

    Going down, codes and the choice of experts are older than the kernel before, and only x is not.
    The kernel behind may begin at once then: it is known to wait before it reads what others write.

    Returns the thread, so that what uses it comes after this; the address of sums; and what `_find`
    and `_load` return.
    """
    begin: tl.constexpr = text.start_assembly(SHAPE.warps, SHAPE.shared_bytes, SHAPE.nested)
    tables = (pair_ptr.to(tl.int64), weight.nested_code.to(tl.int64))
    if SHAPE.weighted:
        thread = _signal(thread, SHAPE)
        places = _find(weight, chosen, 0, thread, SHAPE)
        ahead = _load(places, weight, unit, end, SHAPE)
        thread, sums = run_assembly(begin, "rr", "llr", tables + (thread,))
        thread = _wait(thread, SHAPE)
        return thread, sums, places, ahead
    else:
        thread, sums = run_assembly(begin, "rr", "llr", tables + (thread,))
        thread = _wait(thread, SHAPE)
        places = _find(weight, chosen, 0, thread, SHAPE)
        return thread, sums, places, _load(places, weight, unit, end, SHAPE)


@triton.jit
def _signal(thread, SHAPE: tl.constexpr):
    """Lets the kernel behind begin."""
    signal: tl.constexpr = "griddepcontrol.launch_dependents; mov.u32 $0, $1;"
    if SHAPE.early:
        thread = run_assembly(signal, "r", "r", (thread,))[0]
    return thread


@triton.jit
def _wait(thread, SHAPE: tl.constexpr):
    """Waits for the kernel before, and lets the one behind begin if `_signal` has not."""
    wait: tl.constexpr = text.wait_assembly(not SHAPE.weighted)
    if SHAPE.early:
        thread = run_assembly(wait, "r", "r", (thread,))[0]
    return thread


@triton.jit
def _place(step, of_range, thread, SHAPE: tl.constexpr):
    """Returns the term, and in its row the first of 128 k, of each lane's range of a step."""
    first = step * SHAPE.span + thread // 32 * 256 + of_range * 128
    if SHAPE.terms == 1:
        return thread * 0, first
    else:
        return first // SHAPE.padded, first % SHAPE.padded


@triton.jit
def _find(weight, chosen, stage, thread, SHAPE: tl.constexpr):
    """Finds where a lane reads: for each step and stack the address of its codes in the first unit,
    the chunk of its scale there, blocks and nested blocks before the expert, whether it is there;
    then the offset and the factor of its scales.

    Behind the last k the last ones are read again; x is 0 there.
    """
    group, ids_ptr, factor_ptr, experts = chosen
    t = thread % 4
    lane_row = thread // 8 % 4
    places = ()
    for i in tl.static_range(0 + SHAPE.steps):
        term, first = _place(stage * SHAPE.steps + i, thread // 4 % 2, thread, SHAPE)
        pair = group * SHAPE.terms + tl.minimum(term, SHAPE.terms - 1)
        expert = tl.load(ids_ptr + pair).to(tl.int32)
        there = (term < SHAPE.terms) & (expert >= 0) & (expert < experts)
        expert = tl.where(there, expert, 0)
        factor = there.to(tl.float32)
        if SHAPE.weighted:
            factor = tl.load(factor_ptr + pair, mask=there, other=0.0)
            factor = factor.to(tl.float32)
        column = tl.minimum(first + t * 32, SHAPE.row_chunks * 64 - 32)
        chunk = tl.minimum((first >> 6) + t % 2, SHAPE.row_chunks - 1)
        for which in tl.static_range(0 + SHAPE.stacks):
            own = weight.up if which == 1 else weight.stack
            row = own.first_row + lane_row * weight.row_step
            before = expert.to(tl.int64) * weight.expert_chunks + row * SHAPE.row_chunks
            address = own.codes.to(tl.int64) + before * 32 + column // 2
            row = own.first_row + (t // 2 * 4 + lane_row) * weight.row_step
            offset = factor
            if SHAPE.nested:
                offset = tl.load(own.offset + expert * weight.offset_step)
            found = (
                address,
                row * SHAPE.row_chunks + chunk,
                expert.to(tl.int64) * weight.blocks,
                expert * weight.nested_blocks,
                there.to(tl.int32),
                offset,
                factor,
            )
            places = places + (found,)
    return places


@triton.jit
def _load(places, weight, unit, end, SHAPE: tl.constexpr):
    """Loads a stage of a unit as it is stored: for each step and stack eight words of codes,
    absmax, and nested absmax; nothing behind the last unit.
    """
    read: tl.constexpr = text.words_assembly(4, 1, True)
    first = unit * 8 * weight.row_step * SHAPE.row_chunks
    loaded = ()
    for i in tl.static_range(0 + SHAPE.steps * SHAPE.stacks):
        own = weight.up if i % SHAPE.stacks == 1 else weight.stack
        address, chunk, blocks_before, nested_before, is_there, _, _ = places[i]
        address += first.to(tl.int64) * 32
        there = (is_there != 0) & (unit < end)
        words = ()
        for slot in tl.static_range(2):
            piece = is_there * 0 + slot * 16 * weight.row_step * SHAPE.row_chunks
            operands = (address, piece, there.to(tl.int32))
            words = words + run_assembly(read, "rrrr", "lrr", operands)
        block = (chunk + first) >> weight.block_shift
        absmax = tl.load(own.absmax + blocks_before + block, mask=there, other=0)
        nested_absmax = absmax
        if SHAPE.nested:
            of_stack = ((blocks_before + block) >> 8).to(tl.int32)
            of_expert = nested_before + (block >> 8)
            nested_block = tl.where(weight.nested_blocks > 0, of_expert, of_stack)
            nested_absmax = tl.load(own.nested_absmax + nested_block, mask=there, other=0.0)
        loaded = loaded + ((words, absmax, nested_absmax),)
    return loaded


@triton.jit
def _load_x(x_rows, step, thread, SHAPE: tl.constexpr):
    """Loads what a lane gives to its column of x: 16 words, 0 where there is none.

    Column 2 · range + block has the k of that block, and 0 for the other one.
    """
    x_ptr, group, share = x_rows
    read: tl.constexpr = text.x_assembly()
    g, t = lane_of(thread)
    term, first = _place(step, g // 2 % 2, thread, SHAPE)
    column = first + t * 32
    columns: tl.constexpr = SHAPE.row_chunks * 64
    given = (g % 2 == t // 2) & (g < 4)
    given = given & (term < SHAPE.terms) & (column < columns)
    row = (group * SHAPE.terms + term) // share
    place = row.to(tl.int64) * columns + column
    address = tl.where(given, x_ptr.to(tl.int64) + place * 2, 0)
    return run_assembly(read, "r" * 16, "l", (address,))


@triton.jit
def _add_stage(totals, loaded, places, held_x, x_rows, stage, thread, SHAPE: tl.constexpr):
    """Adds a stage to the totals of the slots, two of each stack, and returns them."""
    add: tl.constexpr = text.stacks_assembly(x_rows[0].dtype.element_ty, SHAPE.stacks)
    outputs: tl.constexpr = "f" * (2 * SHAPE.stacks)
    inputs: tl.constexpr = outputs + "r" * (8 * SHAPE.stacks) + "f" * SHAPE.stacks + "r" * 17
    lane = (lane_bytes(thread),)
    for i in tl.static_range(0 + SHAPE.steps):
        x = held_x
        if not SHAPE.holds_x:
            x = _load_x(x_rows, stage * SHAPE.steps + i, thread, SHAPE)
        words = ()
        scale = ()
        for which in tl.static_range(0 + SHAPE.stacks):
            own_words, absmax, nested_absmax = loaded[i * SHAPE.stacks + which]
            _, _, _, _, _, offset, factor = places[i * SHAPE.stacks + which]
            words = words + own_words
            one = decode_scale(absmax, nested_absmax, offset, None, True, SHAPE)
            scale = scale + (one * factor,)
        totals = run_assembly(add, outputs, inputs, totals + words + scale + lane + x)
    return totals


@triton.jit
def _gather(out_ptr, weight, norm, sums, group, first, held, thread, SHAPE: tl.constexpr):
    """Adds up what all ranges and warps have left of `held` + 1 units, `first` and those behind it,
    and stores it.

    A unit has SHAPE.sums threads; thread 8 * row + slot has that row of the slot.
    """
    found = add_waiting(sums, thread, SHAPE.warps * SHAPE.ranges, SHAPE) * norm
    unit = thread // SHAPE.sums
    slot = thread % 4
    row = (first + unit) * 8 + slot % 2 * 4 + thread % SHAPE.sums // 8
    to = group.to(tl.int64) * weight.out_columns + row * weight.column_step
    meant = (unit <= held) & (thread // 4 % 2 == 0)
    if SHAPE.silu:
        swap: tl.constexpr = "shfl.sync.bfly.b32 $0, $1, 2, 31, -1;"
        activated = found / (1.0 + tl.exp(-found))
        found = activated * run_assembly(swap, "f", "f", (found,))[0]
    elif SHAPE.stacks == 2:
        to += slot // 2 * weight.up_column
    if SHAPE.silu or SHAPE.stacks == 1:
        meant = meant & (slot < 2)
    tl.store(out_ptr + to, found.to(out_ptr.dtype.element_ty), mask=meant)
