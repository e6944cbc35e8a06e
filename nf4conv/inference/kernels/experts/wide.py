"""x · Wᵀ for few rows on Hopper: each row with the experts that it chose, by tensor cores.

This is the wide kernel of product/ with other addresses. A *unit* is 8 rows of W for one *group* of
terms: going up, a pair of a token and an expert, with gate and up at once; going down, a token with
all its experts, whose rows of x and columns of W stand one behind the other. All warps share a
unit's rows and divide its k: in a *step* a warp takes two ranges of 128. A program's units are
neighbours, and a *stage* is what it reads at once: some steps of a unit.

Tensors have one element for each thread of a program, as in product/.
"""

from dataclasses import dataclass, field
from functools import cache

import triton
import triton.language as tl

import nf4conv.inference.kernels.product.assembly as text
from nf4conv.codec.kernels.arithmetic import multiply
from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.inference.kernels.product.common import run_assembly, shared_value
from nf4conv.inference.kernels.product.wide import leave


@dataclass(eq=False)  # told apart by identity, which is faster
class Shape:
    """The shape of a product: wide_kernel is compiled once for each.

    Triton's cache on disk tells by repr() alone for which shape a kernel was compiled, so repr has
    all attributes that the kernel reads.

    Attributes:
        terms: of a group.
        row_chunks: chunks of 64 k in a row.
        steps: of a stage.
        ahead: True to load a stage ahead; False if each program has one stage.
        stacks: 2 for gate and up, 1 otherwise.
        silu: True to write silu(gate) · up.
        weighted: True going down: terms are weighted and added up.
        nested: True if absmax is uint8 codes.
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
    warps: int = 8
    ranges: int = 2
    span: int = 2048
    sums: int = 32
    held: int = 4
    shared_bytes: int = 8192
    padded: int = field(init=False)
    stages: int = field(init=False)
    holds_x: bool = field(init=False)

    def __post_init__(self) -> None:
        self.padded = -(-self.row_chunks // 2) * 128
        self.stages = -(-self.terms * self.padded // (self.span * self.steps))
        self.holds_x = self.stages * self.steps == 1


shape_of = cache(Shape)
"""Returns the Shape of some attributes, always the same one."""


@kernel
def wide_kernel(
    x_ptr,
    ids_ptr,
    factor_ptr,
    out_ptr,
    pair_ptr,
    nested_code_ptr,
    codes_ptr,
    absmax_ptr,
    nested_absmax_ptr,
    offset_ptr,
    up_codes_ptr,
    up_absmax_ptr,
    up_nested_absmax_ptr,
    up_offset_ptr,
    share: tl.int32,
    experts: tl.int32,
    rows: tl.int32,
    first_row: tl.int32,
    up_first_row: tl.int32,
    row_step: tl.int32,
    expert_chunks: tl.int32,
    blocks: tl.int32,
    nested_blocks: tl.int32,
    offset_step: tl.int32,
    block_shift: tl.int32,
    out_columns: tl.int32,
    up_column: tl.int32,
    column_step: tl.int32,
    parts: tl.int32,
    own_units: tl.int32,
    norm: tl.float32,
    SHAPE: tl.constexpr,
):
    """Computes own_units units of a group, times norm.

    Pointers and scalars are those of rows_kernel, but for these:
        x_ptr: bfloat16 or float16.
        pair_ptr: [256] int32, tables.pair_table.
        rows: a multiple of 8.
        parts: programs of a group.
        norm: what sums are multiplied with: 1 / tables.MULTIPLES.
    """
    thread = tl.arange(0, 32 * SHAPE.warps)
    group = tl.program_id(0) // parts
    unit = tl.program_id(0) % parts * own_units
    end = tl.minimum(unit + own_units, rows // 8)
    sizes = (experts, row_step, expert_chunks, blocks, nested_blocks, offset_step, block_shift)
    stack = (codes_ptr, absmax_ptr, nested_absmax_ptr, offset_ptr, first_row)
    up_stack = (up_codes_ptr, up_absmax_ptr, up_nested_absmax_ptr, up_offset_ptr, up_first_row)
    weight = (stack, up_stack, ids_ptr, factor_ptr, sizes)
    tables = (pair_ptr.to(tl.int64), nested_code_ptr.to(tl.int64))
    thread, sums, places, ahead = _start(weight, tables, group, unit, end, thread, SHAPE)
    x_rows = (x_ptr, group, share)
    x = ()
    if SHAPE.holds_x:
        x = _load_x(x_rows, 0, thread, SHAPE)
    totals = ()
    for _ in tl.static_range(2 * SHAPE.stacks):
        totals = totals + (tl.zeros(thread.shape, tl.float32),)
    held = 0
    stage = 0
    target = (out_ptr, out_columns, up_column, column_step, norm)
    for _ in range((end - unit) * SHAPE.stages if SHAPE.ahead else 1):
        current = ahead
        found = places
        done = stage == SHAPE.stages - 1
        if SHAPE.ahead:
            following = tl.where(done, 0, stage + 1)
            if SHAPE.stages > 1:
                places = _find(weight, group, following, thread, SHAPE)
            ahead = _load(places, weight, tl.where(done, unit + 1, unit), end, SHAPE)
        totals = _add_stage(totals, current, found, x, x_rows, stage, thread, SHAPE)
        if done:
            leave(totals if SHAPE.stacks == 2 else totals + totals, sums, held, thread, SHAPE)
            if (held == SHAPE.held - 1) | (unit == end - 1):
                _gather(target, sums, group, unit - held, held, thread, SHAPE)
        held = tl.where(done, (held + 1) % SHAPE.held, held)
        kept = ()
        for i in tl.static_range(2 * SHAPE.stacks):
            kept = kept + (tl.where(done, 0.0, totals[i]),)
        totals = kept
        unit = tl.where(done, unit + 1, unit)
        stage = tl.where(done, 0, stage + 1)


launch_wide = Launcher(wide_kernel)


@triton.jit
def _start(weight, tables, group, unit, end, thread, SHAPE: tl.constexpr):
    """Fills shared memory, waits for the kernel before, and loads the first stage.

    Going down, codes and the choice of experts are older than the kernel before, and only x is not.
    The kernel behind may begin at once then: it is known to wait before it reads what others write.

    Returns the thread, so that what uses it comes after this; the address of sums; and what `_find`
    and `_load` return.
    """
    signal: tl.constexpr = "griddepcontrol.launch_dependents; mov.u32 $0, $1;"
    begin: tl.constexpr = text.start_assembly(SHAPE.warps, SHAPE.shared_bytes, SHAPE.nested)
    wait: tl.constexpr = text.wait_assembly(not SHAPE.weighted)
    if SHAPE.weighted:
        thread = run_assembly(signal, "r", "r", (thread,))[0]
        places = _find(weight, group, 0, thread, SHAPE)
        ahead = _load(places, weight, unit, end, SHAPE)
        thread, sums = run_assembly(begin, "rr", "llr", tables + (thread,))
        thread = run_assembly(wait, "r", "r", (thread,))[0]
        return thread, sums, places, ahead
    else:
        thread, sums = run_assembly(begin, "rr", "llr", tables + (thread,))
        thread = run_assembly(wait, "r", "r", (thread,))[0]
        places = _find(weight, group, 0, thread, SHAPE)
        return thread, sums, places, _load(places, weight, unit, end, SHAPE)


@triton.jit
def _place(step, of_range, thread, SHAPE: tl.constexpr):
    """Returns the term, and in its row the first of 128 k, of each lane's range of a step."""
    first = step * SHAPE.span + thread // 32 * 256 + of_range * 128
    if SHAPE.terms == 1:
        return thread * 0, first
    else:
        return first // SHAPE.padded, first % SHAPE.padded


@triton.jit
def _find(weight, group, stage, thread, SHAPE: tl.constexpr):
    """Finds where a lane reads: for each step and stack the address of its codes in the first unit,
    the chunk of its scale there, blocks and nested blocks before the expert, whether it is there;
    then the offset and the factor of its scales.

    Behind the last k the last ones are read again; x is 0 there.
    """
    stack, up_stack, ids_ptr, factor_ptr, sizes = weight
    experts, row_step, expert_chunks, blocks, nested_blocks, offset_step, _ = sizes
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
            factor = tl.load(factor_ptr + pair, mask=there, other=0.0).to(tl.float32)
        column = tl.minimum(first + t * 32, SHAPE.row_chunks * 64 - 32)
        chunk = tl.minimum((first >> 6) + t % 2, SHAPE.row_chunks - 1)
        for which in tl.static_range(0 + SHAPE.stacks):
            own = up_stack if which == 1 else stack
            before = expert.to(tl.int64) * expert_chunks
            before += (own[4] + lane_row * row_step) * SHAPE.row_chunks
            address = own[0].to(tl.int64) + before * 32 + column // 2
            chunk_of_row = (own[4] + (t // 2 * 4 + lane_row) * row_step) * SHAPE.row_chunks + chunk
            offset = tl.load(own[3] + expert * offset_step) if SHAPE.nested else factor
            places = places + (
                address, chunk_of_row, expert.to(tl.int64) * blocks, expert * nested_blocks,
                there.to(tl.int32), offset, factor,
            )  # fmt: skip
    return places


@triton.jit
def _load(places, weight, unit, end, SHAPE: tl.constexpr):
    """Loads a stage of a unit as it is stored: for each step and stack eight words of codes,
    absmax, and nested absmax; nothing behind the last unit.
    """
    stack, up_stack, _, _, sizes = weight
    _, row_step, _, _, nested_blocks, _, block_shift = sizes
    read: tl.constexpr = text.words_assembly(4, 1, True)
    first = unit * 8 * row_step * SHAPE.row_chunks
    loaded = ()
    for i in tl.static_range(SHAPE.steps * SHAPE.stacks):
        own = up_stack if i % SHAPE.stacks == 1 else stack
        address = places[i * 7] + first.to(tl.int64) * 32
        there = (places[i * 7 + 4] != 0) & (unit < end)
        for slot in tl.static_range(2):
            piece = places[i * 7 + 4] * 0 + slot * 16 * row_step * SHAPE.row_chunks
            operands = (address, piece, there.to(tl.int32))
            loaded = loaded + run_assembly(read, "rrrr", "lrr", operands)
        block = (places[i * 7 + 1] + first) >> block_shift
        before = places[i * 7 + 2]
        absmax = tl.load(own[1] + before + block, mask=there, other=0)
        nested_absmax = absmax
        if SHAPE.nested:
            of_stack = ((before + block) >> 8).to(tl.int32)
            nested_block = tl.where(nested_blocks > 0, places[i * 7 + 3] + (block >> 8), of_stack)
            nested_absmax = tl.load(own[2] + nested_block, mask=there, other=0.0)
        loaded = loaded + (absmax, nested_absmax)
    return loaded


@triton.jit
def _load_x(x_rows, step, thread, SHAPE: tl.constexpr):
    """Loads what a lane gives to its column of x: 16 words, 0 where there is none.

    Column 2 · range + block has the k of that block, and 0 for the other one.
    """
    x_ptr, group, share = x_rows
    read: tl.constexpr = text.x_assembly()
    g = thread // 4 % 8
    t = thread % 4
    term, first = _place(step, g // 2 % 2, thread, SHAPE)
    column = first + t * 32
    given = (g % 2 == t // 2) & (g < 4) & (term < SHAPE.terms) & (column < SHAPE.row_chunks * 64)
    row = (group * SHAPE.terms + term) // share
    address = x_ptr.to(tl.int64) + (row.to(tl.int64) * (SHAPE.row_chunks * 64) + column) * 2
    return run_assembly(read, "r" * 16, "l", (tl.where(given, address, 0),))


@triton.jit
def _add_stage(totals, loaded, places, held_x, x_rows, stage, thread, SHAPE: tl.constexpr):
    """Adds a stage to the totals of the slots, two of each stack, and returns them."""
    add: tl.constexpr = text.stacks_assembly(x_rows[0].dtype.element_ty, SHAPE.stacks)
    outputs: tl.constexpr = "f" * (2 * SHAPE.stacks)
    inputs: tl.constexpr = outputs + "r" * (8 * SHAPE.stacks) + "f" * SHAPE.stacks + "r" * 17
    lane_bytes = (thread % 32 * 0x04040404,)  # 4 * lane in each byte
    for i in tl.static_range(0 + SHAPE.steps):
        x = held_x
        if not SHAPE.holds_x:
            x = _load_x(x_rows, stage * SHAPE.steps + i, thread, SHAPE)
        words = ()
        scale = ()
        for which in tl.static_range(0 + SHAPE.stacks):
            own = loaded[(i * SHAPE.stacks + which) * 10 : (i * SHAPE.stacks + which) * 10 + 10]
            place = places[(i * SHAPE.stacks + which) * 7 : (i * SHAPE.stacks + which) * 7 + 7]
            words = words + own[:8]
            scale = scale + (_scale(own, place, SHAPE),)
        totals = run_assembly(add, outputs, inputs, totals + words + scale + lane_bytes + x)
    return totals


@triton.jit
def _scale(loaded, place, SHAPE: tl.constexpr):
    """Returns absmax as it decodes, times the factor."""
    if SHAPE.nested:
        value = shared_value(loaded[8].to(tl.int32))
        return (multiply(value, loaded[9], True) + place[5]) * place[6]
    else:
        return loaded[8] * place[6]


@triton.jit
def _gather(target, sums, group, first, held, thread, SHAPE: tl.constexpr):
    """Adds up what all ranges and warps have left of `held` + 1 units, `first` and those behind it,
    and stores it.

    A unit has SHAPE.sums threads; thread 8 * row + slot has that row of the slot.
    """
    out_ptr, out_columns, up_column, column_step, norm = target
    add: tl.constexpr = text.gather_assembly(SHAPE.warps * SHAPE.ranges, SHAPE.sums)
    unit = thread // SHAPE.sums
    place = unit * (SHAPE.sums * SHAPE.warps * SHAPE.ranges) + thread % SHAPE.sums
    has_unit = (thread < SHAPE.sums * SHAPE.held).to(tl.int32)
    found = run_assembly(add, "f", "rr", (sums + place * 4, has_unit))[0] * norm
    slot = thread % 4
    row = (first + unit) * 8 + slot % 2 * 4 + thread % SHAPE.sums // 8
    to = group.to(tl.int64) * out_columns + row * column_step
    meant = (unit <= held) & (thread // 4 % 2 == 0)
    if SHAPE.silu:
        swap: tl.constexpr = "shfl.sync.bfly.b32 $0, $1, 2, 31, -1;"
        found = found / (1.0 + tl.exp(-found)) * run_assembly(swap, "f", "f", (found,))[0]
    elif SHAPE.stacks == 2:
        to += slot // 2 * up_column
    if SHAPE.silu or SHAPE.stacks == 1:
        meant = meant & (slot < 2)
    tl.store(out_ptr + to, found.to(out_ptr.dtype.element_ty), mask=meant)
