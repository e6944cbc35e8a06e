"""A kernel for sizes whose tiles do not divide evenly over the multiprocessors.

As many programs as multiprocessors share the turns of all tiles evenly, so a program may begin and
end inside tiles. The program that has a tile's last turns owns the tile: it adds what programs
before it have left in memory, and stores the tile. Each program computes its last tile first and
the tile that it owns by its end last. So what it waits for was left long ago. It only waits for
programs with lower numbers, which began earlier, so it does not wait for ever. Sums are added in
the same order each time.

A flag for each program says that its sums are complete. Who reads them sets it back, so that flags
are zero between launches. Two streams must not share them.
"""

from typing import Any

import triton
import triton.language as tl

from benchmarks.panels.assembly import straight_loop
from benchmarks.panels.ending import AT_ONCE, leave, load_assembly, store_tile
from benchmarks.panels.scaling import scaled_loop
from nf4conv.codec.kernels.launch import kernel
from nf4conv.codec.kernels.product.assembly import constraints
from nf4conv.codec.kernels.product.panels import inputs
from nf4conv.codec.kernels.product.panels.sums import store_assembly

LOAD = tl.constexpr("ld.global.v4.f32 {$0, $1, $2, $3}, [$4];")

KEEP = tl.constexpr("st.shared.v4.f32 [$5], {$1, $2, $3, $4}; mov.b32 $0, 0;")

# all threads have left their sums before the flag is set, and read them before it is set back
SET = tl.constexpr(
    "{ .reg .pred p; bar.sync 0; setp.eq.u32 p, $1, 0; @p st.release.gpu.global.u32 [$2], $3; "
    "mov.b32 $0, 0; }"
)

AWAIT = tl.constexpr(
    "{ .reg .pred p; .reg .b32 a; $$Lset: ld.acquire.gpu.global.u32 a, [$2]; "
    "setp.eq.u32 p, a, 0; @p bra.uni $$Lset; mov.b32 $0, $1; }"
)


@triton.constexpr_function
def segment_loop(dtype: tl.dtype, shape: Any, scaled: bool) -> str:
    """Return straight_loop for one of several segments: barriers are set up for each."""
    begin = "griddepcontrol.wait;"
    stage = range(2 * shape.stages)
    forget = [f"@q mbarrier.inval.shared.b64 [gates0+{8 * i}];" for i in stage]
    sums = leave(shape, 1)
    done = sums.index("bar.sync 0;")  # nobody waits at a barrier any more
    first = f"setp.eq.u32 q, {inputs.operand('thread')}, 0;"
    end = [*sums[: done + 1], first, *forget, *sums[done + 1 :]]
    loop = scaled_loop if scaled else straight_loop
    text: str = loop(dtype, shape, end)
    # what stood in the place of tiles was read and written by other means than copies
    text = text.replace(begin, "fence.proxy.async.shared::cta;\nbar.sync 0;\n" + begin)
    return text.replace("candidate_kernel", "stream_kernel")


@kernel
def stream_kernel(
    out_ptr,
    packed_ptr,
    absmax_ptr,
    code_ptr,
    nested_absmax_ptr,
    offset_ptr,
    x_address: tl.int64,
    map1: tl.int64,
    map2: tl.int64,
    map3: tl.int64,
    map4: tl.int64,
    map5: tl.int64,
    map6: tl.int64,
    map7: tl.int64,
    map8: tl.int64,
    map9: tl.int64,
    map10: tl.int64,
    map11: tl.int64,
    map12: tl.int64,
    map13: tl.int64,
    map14: tl.int64,
    map15: tl.int64,
    table_ptr,
    left_ptr,
    flags_ptr,
    m: tl.int32,
    n: tl.int32,
    k: tl.int32,
    block_shift: tl.int32,
    norm: tl.float32,
    PANEL: tl.constexpr,
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Compute a program's share of all turns.

    Pointers and scalars are as in candidate_kernel for "straight", and
        left_ptr: [programs, tile of sums] float32, written and read.
        flags_ptr: [programs] int32, zeros before and behind.
    """
    ROWS: tl.constexpr = 0 + PANEL.rows
    COLUMNS: tl.constexpr = 0 + PANEL.columns
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column_tiles = tl.cdiv(m, COLUMNS)
    all_turns = tl.cdiv(k, 128)
    total = column_tiles * tl.cdiv(n, ROWS) * all_turns
    begin = (program.to(tl.int64) * total // programs).to(tl.int32)
    stop = ((program + 1).to(tl.int64) * total // programs).to(tl.int32)
    thread = tl.arange(0, 2 * ROWS)
    TEXT: tl.constexpr = segment_loop(DTYPE, PANEL, SCALED)
    LETTERS: tl.constexpr = inputs.LETTERS
    CONSTRAINTS: tl.constexpr = constraints("r", LETTERS)
    while stop > begin:
        tile = (stop - 1) // all_turns
        start = tl.maximum(begin, tile * all_turns)
        first = start - tile * all_turns
        column = tile % column_tiles * COLUMNS
        row = tile // column_tiles * ROWS
        operands = (
            thread, packed_ptr.to(tl.int64), absmax_ptr.to(tl.int64), code_ptr.to(tl.int64),
            nested_absmax_ptr.to(tl.int64), offset_ptr.to(tl.int64), table_ptr.to(tl.int64),
            column.to(tl.int64), row, n, k, first, stop - start, block_shift, norm,
        )  # fmt: skip
        sums = tl.inline_asm_elementwise(
            TEXT, CONSTRAINTS, operands, dtype=tl.int32, is_pure=False, pack=1
        )
        if stop == (tile + 1) * all_turns:
            # programs that have turns of this tile, from the nearest to that of its first turn
            other = program - 1
            left = first
            while left > 0:
                _add(left_ptr, flags_ptr, sums, thread, other, ROWS, COLUMNS)
                before = (other.to(tl.int64) * total // programs).to(tl.int32)
                left = tl.maximum(before - tile * all_turns, 0)
                other -= 1
            store_tile(out_ptr, sums, thread, 0, 1, m, n, column, row, ROWS, COLUMNS, 1)
        else:
            _leave(left_ptr, flags_ptr, sums, thread, program, ROWS, COLUMNS)
        stop = start


@triton.jit
def _add(left_ptr, flags_ptr, sums, thread, other, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the sums that another program has left to those in shared memory."""
    ONE: tl.constexpr = load_assembly(1)
    FOURS: tl.constexpr = ROWS // 4
    flag = (flags_ptr + other).to(tl.int64)
    thread = tl.inline_asm_elementwise(
        AWAIT, "=&r,r,l", [thread, flag], dtype=tl.int32, is_pure=False, pack=1
    )
    left_ptr += other.to(tl.int64) * ROWS * COLUMNS
    for begin in range(0, FOURS * COLUMNS, 2 * ROWS * AT_ONCE):
        found = ()
        for i in tl.static_range(AT_ONCE):
            index = begin + i * 2 * ROWS + thread
            place = sums + (index // FOURS * (ROWS + 4) + index % FOURS * 4) * 4
            mine = tl.inline_asm_elementwise(
                ONE,
                "=&f,=&f,=&f,=&f,r,r",
                (place, place),
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
            theirs = tl.inline_asm_elementwise(
                LOAD,
                "=&f,=&f,=&f,=&f,l",
                [(left_ptr + index * 4).to(tl.int64)],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
            found += ((mine, theirs, place),)
        for i in tl.static_range(AT_ONCE):
            mine, theirs, place = found[i]
            four = (
                mine[0] + theirs[0],
                mine[1] + theirs[1],
                mine[2] + theirs[2],
                mine[3] + theirs[3],
            )
            tl.inline_asm_elementwise(
                KEEP, "=r,f,f,f,f,r", four + (place,), dtype=tl.int32, is_pure=False, pack=1
            )
    tl.inline_asm_elementwise(
        SET, "=r,r,l,r", [thread, flag, 0], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _leave(left_ptr, flags_ptr, sums, thread, program, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Leave the sums in memory for the program that owns the tile, and say so."""
    ONE: tl.constexpr = load_assembly(1)
    STORE: tl.constexpr = store_assembly(tl.float32)
    FOURS: tl.constexpr = ROWS // 4
    left_ptr += program.to(tl.int64) * ROWS * COLUMNS
    for begin in range(0, FOURS * COLUMNS, 2 * ROWS * AT_ONCE):
        loaded = ()
        for i in tl.static_range(AT_ONCE):
            index = begin + i * 2 * ROWS + thread
            place = sums + (index // FOURS * (ROWS + 4) + index % FOURS * 4) * 4
            four = tl.inline_asm_elementwise(
                ONE,
                "=&f,=&f,=&f,=&f,r,r",
                (place, place),
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
            loaded += (four,)
        for i in tl.static_range(AT_ONCE):
            index = begin + i * 2 * ROWS + thread
            to = (left_ptr + index * 4).to(tl.int64)
            tl.inline_asm_elementwise(
                STORE,
                "=r,f,f,f,f,l,r",
                loaded[i] + (to, thread * 0 + 1),
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
    flag = (flags_ptr + program).to(tl.int64)
    tl.inline_asm_elementwise(
        SET, "=r,r,l,r", [thread, flag, 1], dtype=tl.int32, is_pure=False, pack=1
    )
