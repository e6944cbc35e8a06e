"""x · Wᵀ for few rows on Hopper: each row with the experts that it chose, by tensor cores.

This is the wide kernel of product/ with other addresses. A *unit* is 8 rows of W for one *group* of
terms: going up, a pair of a token and an expert, with gate and up at once; going down, a token with
all its experts, whose rows of x and columns of W stand one behind the other. All warps share a
unit's rows and divide its k: in a *step* a warp takes two ranges of 128. A program's units are
neighbours, and what it reads is DEPTH *stages* of STEPS steps ahead.

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
    parts: tl.int32,
    own_units: tl.int32,
    norm: tl.float32,
    TERMS: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    NESTED: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Compute own_units units of a group, times norm.

    Pointers and scalars are those of rows_kernel, but for these:
        x_ptr: bfloat16 or float16.
        pair_ptr: [256] int32, tables.pair_table.
        rows: a multiple of 8.
        parts: programs of a group.
        norm: what sums are multiplied with: 1 / tables.MULTIPLES.

    Constexprs:
        STEPS: of a stage.
        DEPTH: stages that are loaded ahead; 0 if each program has one stage.
        EARLY: True to let the kernel behind begin at once.
        SHAPE: the launches.Shape of a wide kernel for two rows of x.
    """
    PADDED: tl.constexpr = (ROW_CHUNKS + 1) // 2 * 128
    STAGES: tl.constexpr = (TERMS * PADDED + SHAPE.span * STEPS - 1) // (SHAPE.span * STEPS)
    HELD_X: tl.constexpr = STAGES * STEPS == 1
    STACKS: tl.constexpr = 2 if GATED else 1
    thread = tl.arange(0, 32 * SHAPE.warps)
    if EARLY:
        signal: tl.constexpr = "griddepcontrol.launch_dependents; mov.u32 $0, $1;"
        thread = run_assembly(signal, "r", "r", (thread,))[0]
    group = tl.program_id(0) // parts
    tile = tl.program_id(0) % parts * own_units
    end = tl.minimum(tile + own_units, rows // 8)
    sizes = (experts, row_step, expert_chunks, blocks, nested_blocks, offset_step, block_shift)
    stack = (codes_ptr, absmax_ptr, nested_absmax_ptr, offset_ptr, first_row)
    up_stack = (up_codes_ptr, up_absmax_ptr, up_nested_absmax_ptr, up_offset_ptr, up_first_row)
    weight = (stack, up_stack, ids_ptr, factor_ptr, sizes)
    begin: tl.constexpr = text.start_assembly(SHAPE.warps, SHAPE.shared_bytes, NESTED)
    wait: tl.constexpr = text.wait_assembly(not EARLY)
    # codes and the choice of experts are older than the kernel before, if that went up; x is not
    if not GATED:
        places = _find(
            weight, group, 0, thread, TERMS, ROW_CHUNKS, STEPS, STACKS, WEIGHTED, NESTED, SHAPE
        )
        ahead = _load(places, weight, tile, end, STEPS, STACKS, ROW_CHUNKS, NESTED)
    operands = (pair_ptr.to(tl.int64), nested_code_ptr.to(tl.int64), thread)
    thread, sums = run_assembly(begin, "rr", "llr", operands)
    thread = run_assembly(wait, "r", "r", (thread,))[0]
    if HELD_X:
        x = _load_x(x_ptr, group, share, 0, thread, TERMS, ROW_CHUNKS, SHAPE)
    if GATED:
        places = _find(
            weight, group, 0, thread, TERMS, ROW_CHUNKS, STEPS, STACKS, WEIGHTED, NESTED, SHAPE
        )
        ahead = _load(places, weight, tile, end, STEPS, STACKS, ROW_CHUNKS, NESTED)
    LOADED: tl.constexpr = STEPS * STACKS * 10
    for i in tl.static_range(1, DEPTH):
        ahead = ahead + _load(places, weight, tile + i, end, STEPS, STACKS, ROW_CHUNKS, NESTED)
    totals = ()
    for _ in tl.static_range(2 * STACKS):
        totals = totals + (tl.zeros(thread.shape, tl.float32),)
    held = 0
    stage = 0
    target = (out_ptr, out_columns, up_column, column_step)
    lane_bytes = thread % 32 * 0x04040404
    add: tl.constexpr = text.stacks_assembly(x_ptr.dtype.element_ty, STACKS)
    outputs: tl.constexpr = "f" * (2 * STACKS)
    inputs: tl.constexpr = "f" * (2 * STACKS) + "r" * (8 * STACKS) + "f" * STACKS + "r" * 17
    for _ in range((end - tile) * STAGES if DEPTH > 0 else 1):
        current = ahead[:LOADED]
        found = places
        done = stage == STAGES - 1
        if DEPTH > 0:
            next_tile = tile + DEPTH
            if STAGES > 1:
                next_tile = tl.where(done, tile + 1, tile)
                following = tl.where(done, 0, stage + 1)
                places = _find(
                    weight, group, following, thread,
                    TERMS, ROW_CHUNKS, STEPS, STACKS, WEIGHTED, NESTED, SHAPE,
                )  # fmt: skip
            loaded = _load(places, weight, next_tile, end, STEPS, STACKS, ROW_CHUNKS, NESTED)
            ahead = ahead[LOADED:] + loaded
        for i in tl.static_range(STEPS):
            if not HELD_X:
                step = stage * STEPS + i
                x = _load_x(x_ptr, group, share, step, thread, TERMS, ROW_CHUNKS, SHAPE)
            words = ()
            scale = ()
            for which in tl.static_range(STACKS):
                words = words + current[(i * STACKS + which) * 10 : (i * STACKS + which) * 10 + 8]
                scale = scale + (
                    _scale(
                        current[(i * STACKS + which) * 10 + 8],
                        current[(i * STACKS + which) * 10 + 9],
                        found[(i * STACKS + which) * 7 + 5],
                        found[(i * STACKS + which) * 7 + 6],
                        NESTED,
                    ),
                )
            totals = run_assembly(
                add, outputs, inputs, totals + words + scale + (lane_bytes,) + x
            )
        if done:
            leave(totals if GATED else totals + totals, sums, held, thread, SHAPE)
            if (held == SHAPE.held - 1) | (tile == end - 1):
                sum = _gather(sums, norm, thread, SHAPE)
                _store(sum, target, group, tile - held, held, thread, GATED, SILU, SHAPE)
        held = tl.where(done, (held + 1) % SHAPE.held, held)
        kept = ()
        for i in tl.static_range(2 * STACKS):
            kept = kept + (tl.where(done, 0.0, totals[i]),)
        totals = kept
        tile = tl.where(done, tile + 1, tile)
        stage = tl.where(done, 0, stage + 1)


launch_wide = Launcher(wide_kernel)


@triton.jit
def _place(
    step, of_range, thread, TERMS: tl.constexpr, ROW_CHUNKS: tl.constexpr, SHAPE: tl.constexpr
):
    """Return the term, and in its row the first of 128 k, of each lane's range of a step."""
    PADDED: tl.constexpr = (ROW_CHUNKS + 1) // 2 * 128
    first = step * SHAPE.span + thread // 32 * 256 + of_range * 128
    if TERMS == 1:
        return thread * 0, first
    return first // PADDED, first % PADDED


@triton.jit
def _find(
    weight, group, stage, thread, TERMS: tl.constexpr, ROW_CHUNKS: tl.constexpr,
    STEPS: tl.constexpr, STACKS: tl.constexpr, WEIGHTED: tl.constexpr, NESTED: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Find where a lane reads: for each step and stack the address of its codes in the first unit,
    the chunk of its scale there, blocks and nested blocks before the expert, whether it is there;
    then the offset and the factor of its scales.

    Behind the last k the last ones are read again; x is 0 there.
    """
    stack, up_stack, ids_ptr, factor_ptr, sizes = weight
    experts, row_step, expert_chunks, blocks, nested_blocks, offset_step, _ = sizes
    t = thread % 4
    lane_row = thread // 8 % 4
    places = ()
    for i in tl.static_range(STEPS):
        step = stage * STEPS + i
        term, first = _place(step, thread // 4 % 2, thread, TERMS, ROW_CHUNKS, SHAPE)
        pair = group * TERMS + tl.minimum(term, TERMS - 1)
        expert = tl.load(ids_ptr + pair).to(tl.int32)
        there = (term < TERMS) & (expert >= 0) & (expert < experts)
        expert = tl.where(there, expert, 0)
        if WEIGHTED:
            factor = tl.load(factor_ptr + pair, mask=there, other=0.0).to(tl.float32)
        else:
            factor = there.to(tl.float32)
        column = tl.minimum(first + t * 32, ROW_CHUNKS * 64 - 32)
        chunk = tl.minimum((first >> 6) + t % 2, ROW_CHUNKS - 1)
        for which in tl.static_range(STACKS):
            own = up_stack if which == 1 else stack
            before = expert.to(tl.int64) * expert_chunks
            before += (own[4] + lane_row * row_step) * ROW_CHUNKS
            address = own[0].to(tl.int64) + before * 32 + column // 2
            row = own[4] + (t // 2 * 4 + lane_row) * row_step
            if NESTED:
                offset = tl.load(own[3] + expert * offset_step)
            else:
                offset = factor
            places = places + (
                address, row * ROW_CHUNKS + chunk, expert * blocks, expert * nested_blocks,
                there.to(tl.int32), offset, factor,
            )  # fmt: skip
    return places


@triton.jit
def _load(
    places, weight, tile, end, STEPS: tl.constexpr, STACKS: tl.constexpr,
    ROW_CHUNKS: tl.constexpr, NESTED: tl.constexpr,
):  # fmt: skip
    """Load a stage of a unit as it is stored: for each step and stack eight words of codes, absmax,
    and nested absmax; nothing behind the last unit.
    """
    stack, up_stack, _, _, sizes = weight
    _, row_step, _, _, nested_blocks, _, block_shift = sizes
    read: tl.constexpr = text.words_assembly(4, 1, True)
    first = tile * 8 * row_step * ROW_CHUNKS
    asked = tile < end
    loaded = ()
    for i in tl.static_range(STEPS * STACKS):
        own = up_stack if i % STACKS == 1 else stack
        address = places[i * 7] + first.to(tl.int64) * 32
        there = (places[i * 7 + 4] != 0) & asked
        for slot in tl.static_range(2):
            piece = places[i * 7 + 4] * 0 + slot * 16 * row_step * ROW_CHUNKS
            loaded = loaded + run_assembly(read, "rrrr", "lrr", (address, piece, there.to(tl.int32)))
        block = (places[i * 7 + 1] + first) >> block_shift
        absmax = tl.load(own[1] + places[i * 7 + 2] + block, mask=there, other=0)
        if NESTED:
            of_stack = (places[i * 7 + 2] + block) >> 8
            nested_block = tl.where(nested_blocks > 0, places[i * 7 + 3] + (block >> 8), of_stack)
            loaded = loaded + (absmax, tl.load(own[2] + nested_block, mask=there, other=0.0))
        else:
            loaded = loaded + (absmax, absmax)
    return loaded


@triton.jit
def _load_x(
    x_ptr, group, share, step, thread, TERMS: tl.constexpr, ROW_CHUNKS: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Load what a lane gives to its column of x: 16 words, 0 where there is none.

    Column 2 · range + block has the k of that block, and 0 for the other one.
    """
    read: tl.constexpr = text.x_assembly()
    g = thread // 4 % 8
    t = thread % 4
    term, first = _place(step, g // 2 % 2, thread, TERMS, ROW_CHUNKS, SHAPE)
    column = first + t * 32
    given = (g % 2 == t // 2) & (g < 4) & (term < TERMS) & (column < ROW_CHUNKS * 64)
    row = (group * TERMS + term) // share
    address = x_ptr.to(tl.int64) + (row.to(tl.int64) * (ROW_CHUNKS * 64) + column) * 2
    return run_assembly(read, "r" * 16, "l", (tl.where(given, address, 0),))


@triton.jit
def _scale(absmax, nested_absmax, offset, factor, NESTED: tl.constexpr):
    """Return absmax as it decodes, times the factor."""
    read: tl.constexpr = """{
        .reg .b32 a;
        mov.u32 a, codes;
        mad.lo.u32 a, $1, 4, a;
        ld.shared.f32 $0, [a];
        }"""
    if NESTED:
        value = run_assembly(read, "f", "r", (absmax.to(tl.int32),))[0]
        return (multiply(value, nested_absmax, True) + offset) * factor
    else:
        return absmax * factor


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
    found, target, group, first, held, thread, GATED: tl.constexpr, SILU: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Store what was gathered of `held` + 1 units, `first` and those behind it."""
    out_ptr, out_columns, up_column, column_step = target
    tile = first + thread // SHAPE.sums
    slot = thread % 4
    row = tile * 8 + slot % 2 * 4 + thread % SHAPE.sums // 8
    to = group.to(tl.int64) * out_columns + row * column_step
    meant = (thread // SHAPE.sums <= held) & (thread // 4 % 2 == 0)
    if SILU:
        swap: tl.constexpr = "shfl.sync.bfly.b32 $0, $1, 2, 31, -1;"
        up = run_assembly(swap, "f", "f", (found,))[0]
        found = found / (1.0 + tl.exp(-found)) * up
    elif GATED:
        to += slot // 2 * up_column
    if SILU or not GATED:
        meant = meant & (slot < 2)
    tl.store(out_ptr + to, found.to(out_ptr.dtype.element_ty), mask=meant)
