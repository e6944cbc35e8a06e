"""PTX of kernels.py: what both loops of a program over k have in common.

Lanes are (g, t) as in product/assembly.py. A *turn* is 128 k: of each of its rows a lane has 16
bytes of codes, 32 k of one block of 64. Lanes exchange them, as `wgmma` takes them. A *unit* is a
half of a turn, 64 k of one block, for the 64 rows of a warpgroup.

A warpgroup decodes a unit into registers and gives it to the tensor cores. Nothing keeps
warpgroups together but tiles of x that are full or free. So some decode while others multiply.

Inputs of a loop are those that tiles.py names: the thread; the addresses of packed codes, absmax,
its code, nested absmax, the offset of the latter, and the table; the first row of x; the first row
of W; rows of W, columns; the first turn and the number of turns, at least 1; log2 of the blocks
that share a scale; what scales are multiplied with. $0 becomes the address of the sums in shared
memory: those of a column are shape.rows + 4 apart. `shape` is a plans.Panel.
"""

from typing import Any

import triton
import triton.language as tl

from nf4conv.inference.kernels.product.panels.decoding import (
    declare_exchange,
    exchange,
    fill_pairs,
    in_pairs,
    lane_scale,
    load_scale,
    load_words,
    look_scale_up,
    prepare_exchange,
    register_of,
)
from nf4conv.inference.kernels.product.panels.tiles import copy_first, find_map, next_stage, operand


@triton.constexpr_function
def begin(dtype: tl.dtype, shape: Any, registers: list[str]) -> list[str]:
    """Declares registers, and those of one loop; sets all up, and begins to copy tiles."""
    return [
        "{",
        *_declare_registers(shape),
        *declare_exchange(),
        *registers,
        *_prepare_shared(dtype, shape),
        *find_map(),
        # what follows must come after it: the kernel before may have written all else
        "griddepcontrol.wait;",
        "griddepcontrol.launch_dependents;",
        *copy_first(shape),
        *_prepare_lanes(dtype, shape),
        *prepare_exchange(),
        *_clear_sums(shape),
    ]


@triton.constexpr_function
def all_turns(shape: Any, turn: list[str]) -> list[str]:
    """Does `turn` for all turns. Before the first, loads what it needs, and asks for what the
    second does.
    """
    return [
        *load_words("n"),
        *load_scale(shape, 0),
        *exchange(),
        *look_scale_up(shape),
        *load_scale(shape, 2),
        "$$Lturn:",
        *turn,
        *next_stage(shape),
        f"setp.lt.u32 p, turn, {operand('turns')};",
        "@p bra.uni $$Lturn;",
    ]


@triton.constexpr_function
def begin_turn(shape: Any) -> list[str]:
    """Asks for what the next two turns need, and finds the stage of this one."""
    return [
        *lane_scale(shape),
        "add.u32 mine, mine, 2;",
        *load_words("n"),
        *look_scale_up(shape),
        *load_scale(shape, 2),
        "shl.b32 gate, stage, 3;",
        "add.u32 gate, gates0, gate;",
        "shr.u32 low, tiles, 4;",
        f"mad.lo.u32 low, stage, {shape.turn_bytes // 16}, low;",
        "add.u32 low, low, 0x10000;",
    ]


@triton.constexpr_function
def multiply_unit(dtype: tl.dtype, shape: Any, half: int, sums: str, added: list[str]) -> list[str]:
    """Begins the products of a unit: a step takes two chunks of eight k.

    `added` says of each step whether what stands in the registers `sums` is added.
    """
    kind = dtype.name.replace("fp", "f")
    wgmma = f"wgmma.mma_async.sync.aligned.m64n{shape.columns}k16.f32.{kind}.{kind}"
    targets = ", ".join(f"{sums}{i}" for i in range(shape.totals))
    lines = ["wgmma.fence.sync.aligned;"]
    for step in range(4):
        left = []
        for chunk in (2 * step, 2 * step + 1):
            first = 16 * (half % shape.sets) + register_of(chunk)
            left += [f"v{first}", f"v{first + 8}"]
        lines += [
            f"add.u32 a, low, {half * shape.turn_bytes // 32 + 2 * step};",
            "mov.b64 y, {a, high};",
            f"{wgmma} {{{targets}}}, {{{', '.join(left)}}}, y, {added[step]}, 1, 1, 0;",
        ]
    return [*lines, "wgmma.commit_group.sync.aligned;"]


@triton.constexpr_function
def wait_for_products(left: int) -> str:
    """Waits until no more than so many units are being multiplied."""
    return f"wgmma.wait_group.sync.aligned {left};"


@triton.constexpr_function
def _clear_sums(shape: Any) -> list[str]:
    """Begins sums at zero; `one` says that products are added to them."""
    return ["setp.eq.b32 one, 0, 0;", *[f"mov.f32 c{i}, 0f00000000;" for i in range(shape.totals)]]


@triton.constexpr_function
def _declare_registers(shape: Any) -> list[str]:
    """Declares registers, and the barriers; all else lies behind them in shared memory."""
    return [
        f".shared .align 16 .b8 gates[{16 * shape.stages}];",
        ".reg .pred p, q, one, odd, leader, producer, waits;",
        ".reg .b16 x0, x1;",
        ".reg .b32 a, b, l, h, lane, g, t, first, row, blocks, turn, mine, value, warp;",
        ".reg .b32 gates0, codes, pairs, tiles, gate, low, high, sbase, code;",
        ".reg .b32 column, block, zero;",
        # of this turn, of the one before, and of the one before that
        ".reg .b32 stage, stage1, stage2, parity, parity1, parity2;",
        f".reg .b32 w<8>, n<8>, v<{16 * shape.sets}>;",
        f".reg .f32 e, f, s, s0, s1, found, nested, nnested, offset, c<{shape.totals}>;",
        ".reg .b64 o, y, r0, r1, source, state;",
    ]


@triton.constexpr_function
def _prepare_shared(dtype: tl.dtype, shape: Any) -> list[str]:
    """Sets up barriers and tables: these are older than the kernel before.

    gates0 + 8 i becomes complete when stage i has been copied, gates0 + 8 (stages + i) when all
    warps have multiplied it. Behind the barriers, at a multiple of 1024, are the values of nested
    absmax, then the table of pairs, then the tiles.
    """
    thread = operand("thread")
    lines = [
        f"setp.eq.u32 leader, {thread}, 0;",
        "mov.u32 gates0, gates;",
        f"add.u32 codes, gates0, {16 * shape.stages + 1023};",
        "and.b32 codes, codes, 0xfffffc00;",
        "add.u32 pairs, codes, 1024;",
        "add.u32 tiles, pairs, 32768;",
    ]
    for stage in range(shape.stages):
        free = 8 * (shape.stages + stage)
        lines += [
            f"@leader mbarrier.init.shared.b64 [gates0+{8 * stage}], 1;",
            f"@leader mbarrier.init.shared.b64 [gates0+{free}], {4 * shape.groups};",
        ]
    lines += ["fence.mbarrier_init.release.cluster;"]
    if shape.nested:
        lines += [
            f"and.b32 a, {thread}, 255;",
            f"mad.wide.u32 o, a, 4, {operand('code')};",
            "ld.global.b32 b, [o];",
            "mad.lo.u32 a, a, 4, codes;",
            "st.shared.b32 [a], b;",
        ]
    if in_pairs(dtype, shape):
        lines += fill_pairs(shape)
    return [*lines, "bar.sync 0;"]


@triton.constexpr_function
def _prepare_lanes(dtype: tl.dtype, shape: Any) -> list[str]:
    """Finds which warp and lane a thread is, what it loads, and its value of the table."""
    thread = operand("thread")
    lines = [
        f"and.b32 lane, {thread}, 31;",
        "setp.eq.u32 leader, lane, 0;",
        "shr.u32 g, lane, 2;",
        "and.b32 t, lane, 3;",
        f"shr.u32 warp, {thread}, 5;",
        "setp.eq.u32 producer, warp, 0;",
        *_find_rows(),
        # the descriptor of the tiles: rows of 128 bytes, swizzled
        "mov.b32 high, 0x40000040;",
    ]
    if shape.nested:
        lines += [f"ld.global.f32 offset, [{operand('offset')}];"]
    if in_pairs(dtype, shape):  # 4 * lane in each byte
        return [*lines, "mul.lo.u32 value, lane, 0x04040404;"]
    lines += [f"mad.wide.u32 o, lane, 4, {operand('table')};", "ld.global.nc.b32 value, [o];"]
    return lines


@triton.constexpr_function
def _find_rows() -> list[str]:
    """Finds where a lane's codes and scales begin: of the rows g and g + 8 of its warp's 16."""
    k, n, begin = operand("k"), operand("n"), operand("first")
    lines = [
        f"shr.u32 blocks, {k}, 6;",
        # mine: the lane's block of a turn
        "shr.u32 a, t, 1;",
        f"mad.lo.u32 mine, {begin}, 2, a;",
        "and.b32 a, t, 1;",
        "setp.eq.u32 odd, a, 1;",
        # the first row: 16 for each warp
        "mad.lo.u32 first, warp, 16, g;",
        f"add.u32 first, first, {operand('row')};",
        f"sub.u32 b, {n}, 1;",
        f"shr.u32 a, {k}, 1;",
        f"mul.wide.u32 o, {begin}, 64;",
        f"add.s64 o, o, {operand('packed')};",
        "mul.wide.u32 y, t, 16;",
        "add.s64 o, o, y;",
    ]
    for slot in range(2):
        lines += [
            f"add.u32 row, first, {8 * slot};",
            "min.u32 row, row, b;",
            f"mul.wide.u32 r{slot}, row, a;",
            f"add.s64 r{slot}, r{slot}, o;",
        ]
    lines += [f"mov.b32 n{i}, 0;" for i in range(8)]  # where nothing is loaded behind the last k
    lines += [
        # lane t finds the scale of slot t % 2 in block t // 2
        "and.b32 row, t, 1;",
        "mad.lo.u32 row, row, 8, first;",
        "min.u32 row, row, b;",
        "mul.lo.u32 sbase, row, blocks;",
    ]
    return lines
