"""x · Wᵀ for few rows on Hopper: each row with the experts that it chose, by tensor cores.

This is the wide kernel of product/ with other addresses, and with its texts. A *unit* is 8 rows of
W for one *group* of terms: going up, a pair of a token and an expert, with gate and up at once;
going down, a token with all its experts, whose rows of x and columns of W stand one behind the
other. All warps share a unit's rows and divide its k. A program's units are neighbours, and what is
read from memory is a *stage* ahead: up to STEPS steps, in each of which a warp takes 256 k.

Tensors have one element for each thread of a program, as in product/.
"""

import triton
import triton.language as tl

import nf4conv.codec.kernels.product.assembly as text
from nf4conv.codec.kernels.arithmetic import multiply
from nf4conv.codec.kernels.launch import Launcher, kernel
from nf4conv.codec.kernels.product.kernel import leave, run_assembly


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
    units: tl.int32,
    own_units: tl.int32,
    norm: tl.float32,
    TERMS: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    ONCE: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    NESTED: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Compute own_units units, times norm.

    Pointers and scalars are those of rows_kernel, but for these:
        x_ptr: bfloat16 or float16.
        pair_ptr: [256] int32, tables.pair_table.
        units: of all programs.
        norm: what sums are multiplied with: 1 / tables.MULTIPLES.

    Constexprs:
        STEPS: of a stage.
        ONCE: True if each program has one unit of one stage.
        SHAPE: the launches.Shape of a wide kernel for two rows of x.
    """
    PADDED: tl.constexpr = (ROW_CHUNKS + 1) // 2 * 128
    STAGES: tl.constexpr = (TERMS * PADDED + SHAPE.span * STEPS - 1) // (SHAPE.span * STEPS)
    thread = tl.arange(0, 32 * SHAPE.warps)
    unit = tl.program_id(0) * own_units
    end = tl.minimum(unit + own_units, units)
    sizes = (share, experts, rows, end, row_step, blocks, nested_blocks, offset_step, block_shift)
    stack = (codes_ptr, absmax_ptr, nested_absmax_ptr, offset_ptr, first_row)
    up_stack = (up_codes_ptr, up_absmax_ptr, up_nested_absmax_ptr, up_offset_ptr, up_first_row)
    weight = (stack, up_stack, ids_ptr, factor_ptr, sizes, expert_chunks)
    _bring(nested_code_ptr, thread)
    # codes and the choice of experts are older than the kernel before, if that went up; x is not
    if not GATED:
        ahead = _load_stage(
            weight, unit, 0, thread, TERMS, ROW_CHUNKS, STEPS, GATED, WEIGHTED, NESTED, SHAPE
        )
    fill: tl.constexpr = text.fill_assembly(SHAPE.warps, SHAPE.shared_bytes, NESTED)
    thread, sums = run_assembly(fill, "rr", "lr", (pair_ptr.to(tl.int64), thread))
    if GATED:
        ahead = _load_stage(
            weight, unit, 0, thread, TERMS, ROW_CHUNKS, STEPS, GATED, WEIGHTED, NESTED, SHAPE
        )
    meet: tl.constexpr = text.meet_assembly(NESTED)
    thread = run_assembly(meet, "r", "lr", (nested_code_ptr.to(tl.int64), thread))[0]
    zero = tl.zeros(thread.shape, tl.float32)
    totals = (zero, zero, zero, zero)
    target = (out_ptr, out_columns, up_column, column_step)
    if ONCE:
        totals = _add_stage(
            totals, ahead, x_ptr, sizes, unit, 0, thread,
            TERMS, ROW_CHUNKS, STEPS, GATED, NESTED, SHAPE,
        )  # fmt: skip
        leave(totals, sums, 0, thread, SHAPE)
        found = _gather(sums, norm, thread, SHAPE)
        _store(found, target, sizes, unit, 0, thread, GATED, SILU, SHAPE)
        return
    stage = 0
    held = 0
    for _ in range((end - unit) * STAGES):
        current = ahead
        done = stage == STAGES - 1
        next_unit = tl.where(done, unit + 1, unit)
        next_stage = tl.where(done, 0, stage + 1)
        ahead = _load_stage(
            weight, next_unit, next_stage, thread,
            TERMS, ROW_CHUNKS, STEPS, GATED, WEIGHTED, NESTED, SHAPE,
        )  # fmt: skip
        totals = _add_stage(
            totals, current, x_ptr, sizes, unit, stage, thread,
            TERMS, ROW_CHUNKS, STEPS, GATED, NESTED, SHAPE,
        )  # fmt: skip
        if done:
            leave(totals, sums, held, thread, SHAPE)
            if (held == SHAPE.held - 1) | (next_unit == end):
                found = _gather(sums, norm, thread, SHAPE)
                _store(found, target, sizes, unit - held, held, thread, GATED, SILU, SHAPE)
        held = tl.where(done, (held + 1) % SHAPE.held, held)
        totals = (
            tl.where(done, 0.0, totals[0]),
            tl.where(done, 0.0, totals[1]),
            tl.where(done, 0.0, totals[2]),
            tl.where(done, 0.0, totals[3]),
        )
        unit = next_unit
        stage = next_stage


launch_wide = Launcher(wide_kernel)


@triton.jit
def _bring(nested_code_ptr, thread):
    """Bring the 256 values of nested absmax to L2: every layer has its own."""
    address = nested_code_ptr.to(tl.int64) + thread % 32 * 32
    run_assembly("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "r", "l", (address,))


@triton.jit
def _place(step, of_range, thread, TERMS: tl.constexpr, ROW_CHUNKS: tl.constexpr, SHAPE: tl.constexpr):
    """Return the term, and in its row the first of 128 k, of each lane's range of a step."""
    PADDED: tl.constexpr = (ROW_CHUNKS + 1) // 2 * 128
    first = step * SHAPE.span + thread // 32 * 256 + of_range * 128
    if TERMS == 1:
        return thread * 0, first
    return first // PADDED, first % PADDED


@triton.jit
def _load_stage(
    weight, unit, stage, thread, TERMS: tl.constexpr, ROW_CHUNKS: tl.constexpr,
    STEPS: tl.constexpr, GATED: tl.constexpr, WEIGHTED: tl.constexpr, NESTED: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Load the codes and scales of a stage as they are stored: for each step eight words of each
    stack, then of each stack absmax, nested absmax and offset, then the factor. There is none of
    the second stack unless GATED.

    Behind the last k the last ones are read again; x is 0 there.
    """
    stack, up_stack, ids_ptr, factor_ptr, sizes, expert_chunks = weight
    _, experts, rows, end, row_step, blocks, nested_blocks, offset_step, block_shift = sizes
    read: tl.constexpr = text.words_assembly(4, 1, True)
    tiles = tl.cdiv(rows, 8)
    group = unit // tiles
    tile = unit % tiles
    t = thread % 4
    asked = (thread * 0 + unit) < end
    loaded = ()
    for i in tl.static_range(STEPS):
        step = stage * STEPS + i
        term, first = _place(step, thread // 4 % 2, thread, TERMS, ROW_CHUNKS, SHAPE)
        pair = group * TERMS + tl.minimum(term, TERMS - 1)
        expert = tl.load(ids_ptr + pair, mask=asked, other=0).to(tl.int32)
        there = asked & (term < TERMS) & (expert >= 0) & (expert < experts)
        expert = tl.where(there, expert, 0)
        piece = tl.minimum(first + t * 32, ROW_CHUNKS * 64 - 32) >> 4
        chunk = tl.minimum((first >> 6) + t % 2, ROW_CHUNKS - 1)
        block_before = expert.to(tl.int64) * blocks
        for half in tl.static_range(2 if GATED else 1):
            own = up_stack if half == 1 else stack
            address = own[0].to(tl.int64) + expert.to(tl.int64) * expert_chunks * 32
            for slot in tl.static_range(2):
                row = tile * 8 + slot * 4 + thread // 8 % 4
                row = own[4] + tl.minimum(row, rows - 1) * row_step
                operands = (address, row * (ROW_CHUNKS * 4) + piece, there.to(tl.int32))
                loaded = loaded + run_assembly(read, "rrrr", "lrr", operands)
            row = tile * 8 + t // 2 * 4 + thread // 8 % 4
            row = own[4] + tl.minimum(row, rows - 1) * row_step
            block = (row * ROW_CHUNKS + chunk) >> block_shift
            absmax = tl.load(own[1] + block_before + block, mask=there, other=0)
            loaded = loaded + (absmax,)
            if NESTED:
                of_expert = expert * nested_blocks + (block >> 8)
                of_stack = ((block_before + block) >> 8).to(tl.int32)
                nested_block = tl.where(nested_blocks > 0, of_expert, of_stack)
                nested_absmax = tl.load(own[2] + nested_block, mask=there, other=0.0)
                offset = tl.load(own[3] + expert * offset_step, mask=there, other=0.0)
                loaded = loaded + (nested_absmax, offset)
        if WEIGHTED:
            factor = tl.load(factor_ptr + pair, mask=there, other=0.0).to(tl.float32)
            loaded = loaded + (factor,)
        else:
            loaded = loaded + (there.to(tl.float32),)
    return loaded


@triton.jit
def _add_stage(
    totals, loaded, x_ptr, sizes, unit, stage, thread,
    TERMS: tl.constexpr, ROW_CHUNKS: tl.constexpr, STEPS: tl.constexpr, GATED: tl.constexpr,
    NESTED: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Add a stage to the totals of the slots, and return them. Slots 0 and 1 are of the first
    stack, 2 and 3 of the second one.
    """
    share, _, rows, _, _, _, _, _, _ = sizes
    add: tl.constexpr = text.wide_assembly(x_ptr.dtype.element_ty)
    inputs: tl.constexpr = "ffff" + "r" * 16 + "ffrlr"
    SCALES: tl.constexpr = 3 if NESTED else 1
    STACK: tl.constexpr = 8 + SCALES
    STEP: tl.constexpr = (2 * STACK if GATED else STACK) + 1
    group = unit // tl.cdiv(rows, 8)
    g = thread // 4 % 8
    t = thread % 4
    lane_bytes = thread % 32 * 0x04040404
    for i in tl.static_range(STEPS):
        own = loaded[i * STEP : (i + 1) * STEP]
        factor = own[STEP - 1]
        scale = _scale(own[8:STACK], NESTED) * factor
        words = own[:8]
        if GATED:
            up_scale = _scale(own[STACK + 8 : 2 * STACK], NESTED) * factor
            words = words + own[STACK : STACK + 8]
        else:
            up_scale = scale
            words = words + words
        step = stage * STEPS + i
        term, first = _place(step, g // 2 % 2, thread, TERMS, ROW_CHUNKS, SHAPE)
        given = (g % 2 == t // 2) & (g < 4) & (term < TERMS) & (first + t * 32 < ROW_CHUNKS * 64)
        row = (group * TERMS + term) // share
        address = x_ptr.to(tl.int64) + (row.to(tl.int64) * (ROW_CHUNKS * 64) + first + t * 32) * 2
        address = tl.where(given, address, 0)
        both = thread * 0 + (1 if GATED else 0)
        operands = totals + words + (scale, up_scale, lane_bytes, address, both)
        totals = run_assembly(add, "ffff", inputs, operands)
    return totals


@triton.jit
def _scale(loaded, NESTED: tl.constexpr):
    """Return absmax as it decodes."""
    read: tl.constexpr = """{
        .reg .b32 a;
        mov.u32 a, codes;
        mad.lo.u32 a, $1, 4, a;
        ld.shared.f32 $0, [a];
        }"""
    if NESTED:
        value = run_assembly(read, "f", "r", (loaded[0].to(tl.int32),))[0]
        return multiply(value, loaded[1], True) + loaded[2]
    else:
        return loaded[0]


@triton.jit
def _gather(sums, norm, thread, SHAPE: tl.constexpr):
    """Add up what all ranges and warps have left, times norm.

    Thread 8 * row + slot of the SHAPE.sums threads of a unit has that row of the slot.
    """
    add: tl.constexpr = text.gather_assembly(SHAPE.warps * SHAPE.ranges, SHAPE.sums)
    unit = thread // SHAPE.sums
    place = unit * (SHAPE.sums * SHAPE.warps * SHAPE.ranges) + thread % SHAPE.sums
    has_unit = (thread < SHAPE.sums * SHAPE.held).to(tl.int32)
    return run_assembly(add, "f", "rr", (sums + place * 4, has_unit))[0] * norm


@triton.jit
def _store(
    found, target, sizes, first, held, thread, GATED: tl.constexpr, SILU: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Store what was gathered of `held` + 1 units, `first` and those behind it."""
    out_ptr, out_columns, up_column, column_step = target
    _, _, rows, _, _, _, _, _, _ = sizes
    tiles = tl.cdiv(rows, 8)
    unit = first + thread // SHAPE.sums
    group = unit // tiles
    slot = thread % 4
    row = unit % tiles * 8 + slot % 2 * 4 + thread % SHAPE.sums // 8
    to = group.to(tl.int64) * out_columns + row * column_step
    meant = (thread // SHAPE.sums <= held) & (thread // 4 % 2 == 0) & (row < rows)
    if SILU:
        swap: tl.constexpr = "shfl.sync.bfly.b32 $0, $1, 2, 31, -1;"
        up = run_assembly(swap, "f", "f", (found,))[0]
        found = found / (1.0 + tl.exp(-found)) * up
    elif GATED:
        to += slot // 2 * up_column
    if SILU or not GATED:
        meant = meant & (slot < 2)
    tl.store(out_ptr + to, found.to(out_ptr.dtype.element_ty), mask=meant)
