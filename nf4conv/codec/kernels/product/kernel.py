"""x · Wᵀ with a packed weight: every code is decoded once, in registers, for up to 64 rows of x.

A program takes *units*, rows of W and all k or a part of them, one after the other, and a unit in
*stages*; codes and scales of the next stage are on their way. Weights are the left operand of a
tensor core's product. The sums over 64 k are multiplied with the scale of their block in float32,
which no weight is, so two blocks must not meet in one sum:

    wide   1, 2 or 4 rows of x. A lane loads 16 bytes, half a block, and four lanes two blocks of a row. x is given in
           two columns, in either with zeros for the other block. The columns that are left hold
           another range of k. All warps share the rows, and meet when the sums of C.held units are
           complete. A program's units are neighbours, and it leaves out the second half of the last
           one where that is another's.
    tile   8 * column_tiles rows of x, copied to shared memory. A lane loads 8 bytes, four lanes one block of a row.

Tensors have one element for each thread of a program, so an asm statement is the code of one
thread. A lane (g, t) holds *slots*, rows of W that are 8 / ranges apart. C is a launches.Shape.
tests/emulator.py runs what this compiles to.
"""

import triton
import triton.language as tl

import nf4conv.codec.kernels.product.assembly as text
from nf4conv.codec.kernels.arithmetic import multiply
from nf4conv.codec.kernels.launch import Launcher, kernel


# fmt: off
@kernel
def product_kernel(
    x_ptr, out_ptr, packed_ptr, absmax_ptr, code_ptr, nested_absmax_ptr, offset_ptr, pair_ptr,
    m: tl.int32, n: tl.int32, k: tl.int32, steps: tl.int32, share: tl.int32, split_shift: tl.int32,
    block_shift: tl.int32, norm: tl.float32, C: tl.constexpr,
):
    # fmt: on
    """Compute units of `steps` stages each, times norm: if wide, of rows program_id * share … +
    share.

    Otherwise units program_id, program_id + programs, … of `share`: unit u is part u % splits of k
    and tile u // splits of rows, splits = 1 << split_shift. A wide unit is known by its first row.
    A block has 64 << block_shift elements. x_ptr: [m, k], from launches.order_kernel unless C.wide.
    packed_ptr: [n, k / 2] uint8. absmax_ptr … offset_ptr: Decoding.pointers(). pair_ptr:
    tables.pair_table. out_ptr: [splits, m, n], written.
    """
    thread = tl.arange(0, 32 * C.warps)
    unit = tl.program_id(0) * share if C.wide else tl.program_id(0)
    stride = C.unit_rows if C.wide else tl.num_programs(0)
    end = tl.minimum(unit + share, n) if C.wide else share
    weight = (packed_ptr, absmax_ptr, nested_absmax_ptr, n, k, block_shift, end)
    order = (steps, 0 if C.wide else split_shift)
    # what follows must come after it
    thread, tiles = _start(weight, unit, order, pair_ptr, thread, C)
    offset = tl.load(offset_ptr) if C.nested else 0.0
    ahead = _load_stage(weight, unit, 0, order, thread, C)
    meet: tl.constexpr = text.meet_assembly(C.wide and C.nested)
    thread = _asm(meet, "r", "lr", (code_ptr.to(tl.int64), thread))[0]
    if not C.wide:
        _copy_x(x_ptr, tiles, _first_k(unit, 0, order, thread, C), m, k, thread, C)
    totals = ()
    for _ in tl.static_range(0 + C.totals):
        totals = totals + (tl.zeros(thread.shape, tl.float32),)
    step = 0
    parity = 0  # which tile of x, or how many units' sums wait
    stages = (end - unit + stride - 1) // stride * steps
    for stage in range(stages):
        current = ahead
        first = _first_k(unit, step, order, thread, C)
        done = step == steps - 1
        next_unit = tl.where(done, unit + stride, unit)
        next_step = tl.where(done, 0, step + 1)
        ahead = _load_stage(weight, next_unit, next_step, order, thread, C)
        x = (x_ptr, m, k, first, _first_k(next_unit, next_step, order, thread, C))
        operands = current[: C.words] + _scales(current, offset, code_ptr, C) + (thread % 32 * 0x04040404,)
        if C.wide:
            totals = _wide_stage(totals, operands, x, unit + C.unit_rows // 2 < end, thread, C)
        else:
            totals = _tile_stage(totals, operands, x, tiles, parity, thread, C)
        if done:
            if C.wide:
                _leave(totals, tiles, parity, thread, C)
                if (parity == C.held - 1) | (stage == stages - 1):
                    _gather(out_ptr, tiles, m, n, norm, unit - parity * C.unit_rows, end, parity, thread, C)
            else:
                part_ptr = out_ptr + (unit & ((1 << order[1]) - 1)).to(tl.int64) * m * n
                _finish(totals, part_ptr, m, n, norm, unit >> order[1], thread, C)
        kept = ()
        for i in tl.static_range(0 + C.totals):
            kept = kept + (tl.where(done, 0.0, totals[i]),)
        totals = kept
        if C.wide:
            parity = tl.where(done, (parity + 1) % C.held, parity)
        else:
            parity = tl.where(C.parts % 2 == 1, 1 - parity, parity)
        unit = next_unit
        step = next_step


launch_product = Launcher(product_kernel)


@triton.jit
def _asm(TEXT: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, operands):
    """The tuple that a statement returns; operands by letter: f float32, r int32, l int64."""
    kinds: tl.constexpr = text.kinds(OUTPUTS)
    return tl.inline_asm_elementwise(TEXT, text.letters(OUTPUTS, INPUTS), operands, dtype=kinds, is_pure=False, pack=1)


@triton.jit
def _start(weight, unit, order, pair_ptr, thread, C: tl.constexpr):
    """Lay out shared memory and wait for the kernel before; meanwhile bring words to L2, which
    stays up to date.
    """
    packed_ptr, _, _, n, k, _, _ = weight
    first = tl.minimum(_first_k(unit, 0, order, thread, C) + thread % 4 * 32, k - 1)
    for slot in tl.static_range(0 + C.slots * C.wide):
        row = tl.minimum(_first_row(unit >> order[1], thread, C) + slot * C.apart, n - 1)
        address = packed_ptr.to(tl.int64) + (row.to(tl.int64) * k + first) // 2
        _asm("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "r", "l", (address,))
    fill: tl.constexpr = text.fill_assembly(C.warps, C.shared_bytes, C.wide and C.nested)
    return _asm(fill, "rr", "lr", (pair_ptr.to(tl.int64), thread))


@triton.jit
def _first_k(unit, step, order, thread, C: tl.constexpr):
    """[threads] int32: the first k of each lane's stage; warps of a wide kernel have their own."""
    first = ((unit & ((1 << order[1]) - 1)) * order[0] + step) * C.span + thread * 0
    return first + (thread // 32 * (128 * C.ranges) + thread // 4 % C.ranges * 128 if C.wide else 0)


@triton.jit
def _first_row(tile, thread, C: tl.constexpr):
    """[threads] int32: the row of W in each lane's first slot."""
    row = thread // 4 % 8 // C.ranges
    return row + (tile if C.wide else tile * C.unit_rows + thread // 32 * (8 * C.slots))


@triton.jit
def _load_stage(weight, unit, step, order, thread, C: tl.constexpr):
    """A stage as it is stored: 2 * blocks words of each slot; then what a lane loads of absmax, and
    of nested absmax.

    A quad needs slots * blocks scales; lane t loads those of index t, t + 4, …, for all four.
    Behind the last row and the last k the last ones are read again: there the sums are not stored,
    and x is 0.
    """
    packed_ptr, absmax_ptr, nested_absmax_ptr, n, k, block_shift, end = weight
    LOADS: tl.constexpr = 1 if C.wide else 0 + C.blocks
    read: tl.constexpr = text.words_assembly(2 * C.blocks // LOADS, LOADS, C.wide)
    t = thread % 4
    first = _first_k(unit, step, order, thread, C)
    row = _first_row(unit >> order[1], thread, C)
    words = ()
    for slot in tl.static_range(0 + C.slots):
        line = tl.minimum(row + slot * C.apart, n - 1) * (k >> 4)
        pieces = (packed_ptr.to(tl.int64),)
        for part in tl.static_range(LOADS):
            at = first + (t * 32 if C.wide else part * 64)
            pieces = pieces + (line + (tl.minimum(at, k - (32 if C.wide else 64)) >> 4) + (0 if C.wide else t),)
        if C.wide:
            pieces = pieces + (thread * 0 + (unit + slot // 2 * (C.unit_rows // 2) < end).to(tl.int32),)
        words = words + _asm(read, "r" * (2 * C.blocks), "l" + "r" * (len(pieces) - 1), pieces)
    codes = ()
    nested = ()
    for i in tl.static_range(0 + C.scales):
        index = t + 4 * i
        line = tl.minimum(row + index // C.blocks * C.apart, n - 1) * (k >> 6)
        block = (line + (tl.minimum(first + index % C.blocks * 64, k - 64) >> 6)) >> block_shift
        codes = codes + (tl.load(absmax_ptr + block),)
        nested = nested + (tl.load(nested_absmax_ptr + (block >> 8)) if C.nested else block,)
    return words + codes + nested


@triton.jit
def _scales(stage, offset, code_ptr, C: tl.constexpr):
    """The absmax of a stage, decoded."""
    read: tl.constexpr = "{ .reg .b32 a; mov.u32 a, codes; mad.lo.u32 a, $1, 4, a; ld.shared.f32 $0, [a]; }"
    out = ()
    for i in tl.static_range(0 + C.scales):
        scale = stage[C.words + i]
        if C.nested:
            code = scale.to(tl.int32)
            code = _asm(read, "f", "r", (code,))[0] if C.wide else tl.load(code_ptr + code)
            scale = multiply(code, stage[C.words + C.scales + i], True) + offset
        out = out + (scale,)
    return out


@triton.jit
def _wide_stage(totals, operands, x, whole, thread, C: tl.constexpr):
    """Add a stage to the totals of the slots.

    Column 2 * (ranges * row of x + range) + block: a lane (g, t) gives x to column g, and finds the
    sums of row of x t // ranges and range t % ranges; they are meant for it if its rows are of that
    range. Slots 2 and 3 are left out if the unit is not whole.
    """
    x_ptr, m, k, first, _ = x
    g = thread // 4 % 8
    t = thread % 4
    row = g // 2 // C.ranges
    at = first + (g // 2 % C.ranges - g % C.ranges) * 128 + t * 32
    given = (g % 2 == t // 2) & (row < m) & (at < k)
    address = tl.where(given, x_ptr.to(tl.int64) + (row.to(tl.int64) * k + at) * 2, 0)
    add: tl.constexpr = text.wide_assembly(x_ptr.dtype.element_ty)
    whole = thread * 0 + whole.to(tl.int32)
    return _asm(add, "ffff", "ffff" + "r" * 16 + "ffrlr", totals + operands + (address, whole))


@triton.jit
def _tile_stage(totals, operands, x, tiles, parity, thread, C: tl.constexpr):
    """Add a stage to the totals: per row and column tile two of row g, then two of row g + 8."""
    x_ptr, m, k, first, after = x
    inputs: tl.constexpr = "f" * C.totals + "r" * C.words + "f" * C.scales + "rr"
    for part in tl.static_range(0 + C.parts):
        _asm("cp.async.wait_all; fence.proxy.async.shared::cta; bar.sync 0; mov.b32 $0, $1;", "r", "r", (thread,))
        following = first + (part + 1) * 64 * C.copied if part < C.parts - 1 else after
        _copy_x(x_ptr, tiles + (1 - parity) * (C.shared_bytes // 2), following, m, k, thread, C)
        all_operands = totals + operands + (tiles + parity * (C.shared_bytes // 2),)
        totals = _asm(text.tile_assembly(x_ptr.dtype.element_ty, C, part), "f" * C.totals, inputs, all_operands)
        parity = 1 - parity
    return totals


@triton.jit
def _copy_x(x_ptr, tiles, first, m, k, thread, C: tl.constexpr):
    """Begin to copy 64 * copied k of x; zeros where there is none."""
    copy: tl.constexpr = "cp.async.cg.shared.global [$2], [$1], 16, $3; mov.b32 $0, 0;"
    for i in tl.static_range(C.copied * C.column_tiles * 2 // C.warps):
        index = thread + i * 32 * C.warps
        piece = index % 8
        row = index // 8 % (8 * C.column_tiles)
        at = first + index // (64 * C.column_tiles) * 64
        given = (row < m) & (at < k)
        source = x_ptr.to(tl.int64) + tl.where(given, (row.to(tl.int64) * k + at) * 2, 0) + piece * 16
        target = tiles + index // 8 * 128 + ((piece ^ row) % 8 << 4)
        _asm(copy, "r", "lrr", (source, target, given.to(tl.int32) * 16))


@triton.jit
def _leave(totals, sums, held, thread, C: tl.constexpr):
    """Leave the totals of a wide unit in shared memory, behind those of `held` others."""
    g = thread // 4 % 8
    t = thread % 4
    place = (g // C.ranges * (4 // C.ranges) + t // C.ranges) * 16
    place += ((held * C.warps + thread // 32) * C.ranges + g % C.ranges) * (4 * C.sums)
    leave: tl.constexpr = "setp.ne.b32 p, $6, 0; @p st.shared.v4.f32 [$5], {$1, $2, $3, $4}; mov.b32 $0, 0;"
    meant = (g % C.ranges == t % C.ranges).to(tl.int32)
    _asm("{ .reg .pred p; " + leave + "}", "r", "ffffrr", totals + (sums + place, meant))


@triton.jit
def _gather(out_ptr, sums, m, n, norm, first, end, held, thread, C: tl.constexpr):
    """Store the sums of all ranges and warps of up to `held` + 1 units, the first of which begins
    at a row.

    Thread 4 * (columns * row + column) + slot of the threads of a unit.
    """
    COLUMNS: tl.constexpr = 4 // C.ranges
    add: tl.constexpr = text.gather_assembly(C.warps * C.ranges, C.sums)
    place = sums + (thread // C.sums * (C.sums * C.warps * C.ranges) + thread % C.sums) * 4
    found = _asm(add, "f", "rr", (place, (thread < C.sums * C.held).to(tl.int32)))[0]
    column = thread // 4 % COLUMNS
    row = first + thread // C.sums * C.unit_rows + thread % 4 * C.apart + thread % C.sums // 4 // COLUMNS
    meant = (thread // C.sums <= held) & (column < m) & (row < end)
    _store(found * norm, out_ptr, row, column, meant, n)


@triton.jit
def _finish(totals, out_ptr, m, n, norm, tile, thread, C: tl.constexpr):
    """Store the sums of a unit that is not wide."""
    first = _first_row(tile, thread, C)
    for i in tl.static_range(0 + C.totals):
        column = thread % 4 * 2 + (i // 4 % C.column_tiles * 8 + i % 2)
        row = first + (i // 2 % 2 + i // (4 * C.column_tiles) * 2) * 8
        _store(totals[i] * norm, out_ptr, row, column, column < m, n)


@triton.jit
def _store(found, out_ptr, row, column, wanted, n):
    found = found.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + column.to(tl.int64) * n + row, found, mask=wanted & (row < n))
