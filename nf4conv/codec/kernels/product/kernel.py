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
8 / ranges apart. SHAPE is a launches.Shape. `0 + SHAPE.x` makes a constexpr of an attribute, where
Triton asks for one.

tests/emulator.py runs what this compiles to.
"""

import triton
import triton.language as tl

import nf4conv.codec.kernels.product.assembly as text
from nf4conv.codec.kernels.arithmetic import multiply
from nf4conv.codec.kernels.launch import Launcher, kernel


@kernel
def product_kernel(
    x_ptr,
    out_ptr,
    packed_ptr,
    absmax_ptr,
    code_ptr,
    nested_absmax_ptr,
    offset_ptr,
    pair_ptr,
    m: tl.int32,
    n: tl.int32,
    k: tl.int32,
    steps: tl.int32,
    share: tl.int32,
    split_shift: tl.int32,
    block_shift: tl.int32,
    norm: tl.float32,
    SHAPE: tl.constexpr,
):
    """Compute the sums of units, times norm.

    A wide program computes rows program_id * share … + share of W; a unit is known by its first
    row. Any other computes units program_id, program_id + programs, … of `share`: unit u is part
    u % splits of k and tile u // splits of rows, splits = 1 << split_shift.

    Pointers to tensors:
        x_ptr: [m, k] bfloat16 or float16.
        out_ptr: [splits, m, n] bfloat16, float16 or float32, written.
        packed_ptr: [n, k / 2] uint8.
        absmax_ptr, code_ptr, nested_absmax_ptr, offset_ptr: Decoding.pointers().
        pair_ptr: [256] int32, tables.pair_table.

    Scalars:
        m, n, k: rows of x, rows of W, columns of both.
        steps: stages of a unit.
        share: rows of a wide program; otherwise units of all programs.
        split_shift: log2 of the parts of k; 0 if wide.
        block_shift: a block has 64 << block_shift elements.
        norm: what the sums are multiplied with: 1 / tables.MULTIPLES.
    """
    thread = tl.arange(0, 32 * SHAPE.warps)
    unit = tl.program_id(0) * share if SHAPE.wide else tl.program_id(0)
    stride = SHAPE.unit_rows if SHAPE.wide else tl.num_programs(0)
    end = tl.minimum(unit + share, n) if SHAPE.wide else share
    split_shift = 0 if SHAPE.wide else split_shift
    weight = (packed_ptr, absmax_ptr, nested_absmax_ptr, n, k, block_shift, end)
    # what follows must come after it: the kernel before may have written all else
    thread, tiles = _start(weight, unit, steps, split_shift, pair_ptr, thread, SHAPE)
    offset = tl.load(offset_ptr) if SHAPE.nested else 0.0
    ahead = _load_stage(weight, unit, 0, steps, split_shift, thread, SHAPE)
    meet: tl.constexpr = text.meet_assembly(SHAPE.wide and SHAPE.nested)
    thread = run_assembly(meet, "r", "lr", (code_ptr.to(tl.int64), thread))[0]
    if not SHAPE.wide:
        first = _first_k(unit, 0, steps, split_shift, thread, SHAPE)
        _copy_x(x_ptr, tiles, first, m, k, thread, SHAPE)
    totals = ()
    for _ in tl.static_range(0 + SHAPE.totals):
        totals = totals + (tl.zeros(thread.shape, tl.float32),)
    step = 0
    parity = 0  # which tile of x, or how many units' sums wait
    stages = (end - unit + stride - 1) // stride * steps
    for stage in range(stages):
        current = ahead
        first = _first_k(unit, step, steps, split_shift, thread, SHAPE)
        done = step == steps - 1
        next_unit = tl.where(done, unit + stride, unit)
        next_step = tl.where(done, 0, step + 1)
        ahead = _load_stage(weight, next_unit, next_step, steps, split_shift, thread, SHAPE)
        following = _first_k(next_unit, next_step, steps, split_shift, thread, SHAPE)
        scales = _scales(current, offset, code_ptr, SHAPE)
        lane_bytes = (thread % 32 * 0x04040404,)  # 4 * lane in each byte
        operands = current[: SHAPE.words] + scales + lane_bytes
        if SHAPE.wide:
            whole = unit + SHAPE.unit_rows // 2 < end
            totals = _wide_stage(totals, operands, x_ptr, m, k, first, whole, thread, SHAPE)
        else:
            totals = _tile_stage(
                totals, operands, x_ptr, m, k, first, following, tiles, parity, thread, SHAPE
            )
        if done:
            if SHAPE.wide:
                leave(totals, tiles, parity, thread, SHAPE)
                if (parity == SHAPE.held - 1) | (stage == stages - 1):
                    first_row = unit - parity * SHAPE.unit_rows
                    _gather(out_ptr, tiles, m, n, norm, first_row, end, parity, thread, SHAPE)
            else:
                split = unit & ((1 << split_shift) - 1)
                part_ptr = out_ptr + split.to(tl.int64) * m * n
                _finish(totals, part_ptr, m, n, norm, unit >> split_shift, thread, SHAPE)
        kept = ()
        for i in tl.static_range(0 + SHAPE.totals):
            kept = kept + (tl.where(done, 0.0, totals[i]),)
        totals = kept
        if SHAPE.wide:
            parity = tl.where(done, (parity + 1) % SHAPE.held, parity)
        else:
            parity = tl.where(SHAPE.parts % 2 == 1, 1 - parity, parity)
        unit = next_unit
        step = next_step


launch_product = Launcher(product_kernel)


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
def _start(weight, unit, steps, split_shift, pair_ptr, thread, SHAPE: tl.constexpr):
    """Lay out shared memory and wait for the kernel before; meanwhile bring words to L2, which
    stays up to date.

    Returns the thread, so that what uses it comes after this, and the address of `tiles`.
    """
    packed_ptr, _, _, n, k, _, _ = weight
    first = _first_k(unit, 0, steps, split_shift, thread, SHAPE) + thread % 4 * 32
    first = tl.minimum(first, k - 1)
    for slot in tl.static_range(0 + SHAPE.slots * SHAPE.wide):
        row = _first_row(unit >> split_shift, thread, SHAPE) + slot * SHAPE.apart
        row = tl.minimum(row, n - 1)
        address = packed_ptr.to(tl.int64) + (row.to(tl.int64) * k + first) // 2
        run_assembly("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "r", "l", (address,))
    fill: tl.constexpr = text.fill_assembly(
        SHAPE.warps, SHAPE.shared_bytes, SHAPE.wide and SHAPE.nested, SHAPE.early
    )
    return run_assembly(fill, "rr", "lr", (pair_ptr.to(tl.int64), thread))


@triton.jit
def _first_k(unit, step, steps, split_shift, thread, SHAPE: tl.constexpr):
    """Return the first k of each lane's stage, [threads] int32.

    In a wide kernel each warp has its own, and in the warp each of its ranges.
    """
    split = unit & ((1 << split_shift) - 1)
    first = (split * steps + step) * SHAPE.span + thread * 0
    if SHAPE.wide:
        first += thread // 32 * (128 * SHAPE.ranges) + thread // 4 % SHAPE.ranges * 128
    return first


@triton.jit
def _first_row(tile, thread, SHAPE: tl.constexpr):
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
def _load_stage(weight, unit, step, steps, split_shift, thread, SHAPE: tl.constexpr):
    """Load a stage as it is stored.

    Behind the last row and the last k the last ones are read again: there the sums are not stored,
    and x is 0.

    Returns 2 * blocks words of each slot; then what a lane loads of absmax, and of nested absmax. A
    quad needs slots * blocks scales; lane t loads those of index t, t + 4, …, for all four.
    """
    packed_ptr, absmax_ptr, nested_absmax_ptr, n, k, block_shift, end = weight
    # a lane's load is 16 bytes, half a block, if wide, and 8 bytes, a quarter, otherwise
    LOADS: tl.constexpr = 1 if SHAPE.wide else 0 + SHAPE.blocks
    read: tl.constexpr = text.words_assembly(2 * SHAPE.blocks // LOADS, LOADS, SHAPE.wide)
    outputs: tl.constexpr = "r" * (2 * SHAPE.blocks)
    inputs: tl.constexpr = "lrr" if SHAPE.wide else "l" + "r" * LOADS
    t = thread % 4
    first = _first_k(unit, step, steps, split_shift, thread, SHAPE)
    row = _first_row(unit >> split_shift, thread, SHAPE)
    words = ()
    for slot in tl.static_range(0 + SHAPE.slots):
        # in pieces of 8 bytes, which are 16 k
        line = tl.minimum(row + slot * SHAPE.apart, n - 1) * (k >> 4)
        operands = (packed_ptr.to(tl.int64),)
        for part in tl.static_range(LOADS):
            if SHAPE.wide:
                piece = line + (tl.minimum(first + t * 32, k - 32) >> 4)
            else:
                piece = line + (tl.minimum(first + part * 64, k - 64) >> 4) + t
            operands = operands + (piece,)
        if SHAPE.wide:
            asked = unit + slot // 2 * (SHAPE.unit_rows // 2) < end
            operands = operands + (thread * 0 + asked.to(tl.int32),)
        words = words + run_assembly(read, outputs, inputs, operands)
    codes = ()
    nested = ()
    for i in tl.static_range(0 + SHAPE.scales):
        index = t + 4 * i
        slot_of_scale = index // SHAPE.blocks
        line = tl.minimum(row + slot_of_scale * SHAPE.apart, n - 1) * (k >> 6)
        group = tl.minimum(first + index % SHAPE.blocks * 64, k - 64) >> 6
        block = (line + group) >> block_shift
        codes = codes + (tl.load(absmax_ptr + block),)
        nested = nested + (tl.load(nested_absmax_ptr + (block >> 8)) if SHAPE.nested else block,)
    return words + codes + nested


@triton.jit
def _scales(stage, offset, code_ptr, SHAPE: tl.constexpr):
    """Decode the absmax of a stage, as `_load_stage` returns it: a tuple of [threads] float32."""
    read: tl.constexpr = """{
        .reg .b32 a;
        mov.u32 a, codes;
        mad.lo.u32 a, $1, 4, a;
        ld.shared.f32 $0, [a];
        }"""
    out = ()
    for i in tl.static_range(0 + SHAPE.scales):
        scale = stage[SHAPE.words + i]
        if SHAPE.nested:
            code = scale.to(tl.int32)
            value = (
                run_assembly(read, "f", "r", (code,))[0] if SHAPE.wide else tl.load(code_ptr + code)
            )
            nested_absmax = stage[SHAPE.words + SHAPE.scales + i]
            scale = multiply(value, nested_absmax, True) + offset
        out = out + (scale,)
    return out


@triton.jit
def _wide_stage(totals, operands, x_ptr, m, k, first, whole, thread, SHAPE: tl.constexpr):
    """Add a stage to the totals of the slots, and return them.

    Column 2 * (ranges * row of x + range) + block: a lane (g, t) gives x to column g, and finds the
    sums of row of x t // ranges and range t % ranges; they are meant for it if its rows are of that
    range. Slots 2 and 3 are left out if the unit is not whole.
    """
    g = thread // 4 % 8
    t = thread % 4
    row = g // 2 // SHAPE.ranges
    at = first + (g // 2 % SHAPE.ranges - g % SHAPE.ranges) * 128 + t * 32
    given = (g % 2 == t // 2) & (row < m) & (at < k)
    address = x_ptr.to(tl.int64) + (row.to(tl.int64) * k + at) * 2
    address = tl.where(given, address, 0)
    add: tl.constexpr = text.wide_assembly(x_ptr.dtype.element_ty)
    inputs: tl.constexpr = "ffff" + "r" * 16 + "ffrlr"
    whole = thread * 0 + whole.to(tl.int32)
    return run_assembly(add, "ffff", inputs, totals + operands + (address, whole))


@triton.jit
def _tile_stage(
    totals, operands, x_ptr, m, k, first, following, tiles, parity, thread, SHAPE: tl.constexpr
):
    """Add a stage to the totals, and return them: per row and column tile two of row g, then two of
    row g + 8.

    Two tiles of x take turns. The next part of x is copied while one is worked on; behind the last
    part of this stage comes the first of the next, which begins at k = following.
    """
    wait: tl.constexpr = "cp.async.wait_all; bar.sync 0; mov.b32 $0, $1;"
    outputs: tl.constexpr = "f" * SHAPE.totals
    inputs: tl.constexpr = outputs + "r" * SHAPE.words + "f" * SHAPE.scales + "rr"
    for part in tl.static_range(0 + SHAPE.parts):
        run_assembly(wait, "r", "r", (thread,))
        next_k = first + (part + 1) * 64 * SHAPE.copied if part < SHAPE.parts - 1 else following
        other_tile = tiles + (1 - parity) * (SHAPE.shared_bytes // 2)
        _copy_x(x_ptr, other_tile, next_k, m, k, thread, SHAPE)
        tile = tiles + parity * (SHAPE.shared_bytes // 2)
        # a name for this text would be a constexpr that is defined again in each turn
        totals = run_assembly(
            text.tile_assembly(x_ptr.dtype.element_ty, SHAPE, part),
            outputs,
            inputs,
            totals + operands + (tile,),
        )
        parity = 1 - parity
    return totals


@triton.jit
def _copy_x(x_ptr, tiles, first, m, k, thread, SHAPE: tl.constexpr):
    """Begin to copy 64 * copied k of x to shared memory; zeros where there is none."""
    copy: tl.constexpr = "cp.async.cg.shared.global [$2], [$1], 16, $3; mov.b32 $0, 0;"
    for i in tl.static_range(SHAPE.copied * SHAPE.column_tiles * 2 // SHAPE.warps):
        index = thread + i * 32 * SHAPE.warps  # of 16 bytes
        piece = index % 8
        row = index // 8 % (8 * SHAPE.column_tiles)
        at = first + index // (64 * SHAPE.column_tiles) * 64
        given = (row < m) & (at < k)
        start = tl.where(given, (row.to(tl.int64) * k + at) * 2, 0)
        source = x_ptr.to(tl.int64) + start + piece * 16
        target = tiles + index // 8 * 128 + ((piece ^ row) % 8 << 4)
        size = given.to(tl.int32) * 16
        run_assembly(copy, "r", "lrr", (source, target, size))


@triton.jit
def leave(totals, sums, held, thread, SHAPE: tl.constexpr):
    """Leave the totals of a wide unit in shared memory, behind those of `held` others."""
    g = thread // 4 % 8
    t = thread % 4
    place = (g // SHAPE.ranges * (4 // SHAPE.ranges) + t // SHAPE.ranges) * 16
    range_of_warp = (held * SHAPE.warps + thread // 32) * SHAPE.ranges + g % SHAPE.ranges
    place += range_of_warp * (4 * SHAPE.sums)
    store: tl.constexpr = """{
        .reg .pred p;
        setp.ne.b32 p, $6, 0;
        @p st.shared.v4.f32 [$5], {$1, $2, $3, $4};
        mov.b32 $0, 0;
        }"""
    meant = (g % SHAPE.ranges == t % SHAPE.ranges).to(tl.int32)
    run_assembly(store, "r", "ffffrr", totals + (sums + place, meant))


@triton.jit
def _gather(out_ptr, sums, m, n, norm, first, end, held, thread, SHAPE: tl.constexpr):
    """Add up what all ranges and warps have left of `held` + 1 wide units, and store it.

    The first unit begins at row `first`. A unit has SHAPE.sums threads, of which thread
    4 * (columns * row + column) + slot stores that row of the slot, and that column: a row of x.
    """
    COLUMNS: tl.constexpr = 4 // SHAPE.ranges
    add: tl.constexpr = text.gather_assembly(SHAPE.warps * SHAPE.ranges, SHAPE.sums)
    unit = thread // SHAPE.sums
    place = unit * (SHAPE.sums * SHAPE.warps * SHAPE.ranges) + thread % SHAPE.sums
    has_unit = (thread < SHAPE.sums * SHAPE.held).to(tl.int32)
    found = run_assembly(add, "f", "rr", (sums + place * 4, has_unit))[0]
    column = thread // 4 % COLUMNS
    row_of_slot = thread % SHAPE.sums // 4 // COLUMNS
    row = first + unit * SHAPE.unit_rows + thread % 4 * SHAPE.apart + row_of_slot
    meant = (unit <= held) & (column < m) & (row < end)
    _store(found * norm, out_ptr, row, column, meant, n)


@triton.jit
def _finish(totals, out_ptr, m, n, norm, tile, thread, SHAPE: tl.constexpr):
    """Store the sums of a unit that is not wide."""
    first = _first_row(tile, thread, SHAPE)
    for i in tl.static_range(0 + SHAPE.totals):
        column = thread % 4 * 2 + (i // 4 % SHAPE.column_tiles * 8 + i % 2)
        row = first + (i // 2 % 2 + i // (4 * SHAPE.column_tiles) * 2) * 8
        _store(totals[i] * norm, out_ptr, row, column, column < m, n)


@triton.jit
def _store(found, out_ptr, row, column, wanted, n):
    """Store the wanted sums at [column, row] of out, [m, n]; rows behind the last are left out."""
    found = found.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + column.to(tl.int64) * n + row, found, mask=wanted & (row < n))
