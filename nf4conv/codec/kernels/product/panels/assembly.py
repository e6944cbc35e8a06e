"""PTX of kernels.py: the loop of a program over k.

Lanes are (g, t) as in product/assembly.py. A *turn* is 128 k: of each of its rows a lane has 16
bytes of codes, 32 k of one block of 64. A *unit* is a half of it, 64 k, for the 64 rows of a
warpgroup.

A warpgroup decodes a unit into registers and gives it to the tensor cores. Nothing keeps
warpgroups together but tiles of x that are full or free. So some decode while others multiply.
"""

from typing import Any

import triton
import triton.language as tl

from nf4conv.codec.kernels.product.panels.decoding import (
    decode_unit,
    fill_pairs,
    in_pairs,
    load_scale,
    load_words,
    look_scale_up,
    scales,
)
from nf4conv.codec.kernels.product.panels.inputs import operand
from nf4conv.codec.kernels.product.panels.tiles import (
    copy_first,
    copy_tiles,
    next_stage,
    refill,
    say_free,
)


@triton.constexpr_function
def loop_assembly(dtype: tl.dtype, shape: Any) -> str:
    """Returns `assemble_loop` with `leave_sums`: all programs of a cluster find the sums."""
    text: str = assemble_loop(dtype, shape, leave_sums(shape))
    return text


@triton.constexpr_function
def assemble_loop(dtype: tl.dtype, shape: Any, end: list[str]) -> str:
    """Multiplies all turns of a part; `end` stores the sums in shared memory.

    Operands: $0 the address of the sums; then the thread; the addresses of packed codes, absmax,
    its code, nested absmax, the offset of the latter, the table, and the first tile of x; the first
    row of W; rows of W, columns; the first turn and the number of turns, at least 1; log2 of the
    blocks that share a scale; what scales are multiplied with. `shape` is a panel.Panel. The sums
    of a column are shape.rows + 4 apart.
    """
    lines = ["{", *declare_registers(shape), *prepare_shared(dtype, shape)]
    # what follows must come after it: the kernel before may have written all else
    lines += ["griddepcontrol.wait;", "griddepcontrol.launch_dependents;"]
    lines += [
        *copy_first(shape, copy_tiles(shape)),
        *prepare_lanes(dtype, shape),
        *clear_sums(shape),
    ]
    lines += [*load_words("w"), *load_scale(shape, 0)]
    lines += [*look_scale_up(shape), *load_scale(shape, 2)]
    lines += ["$$Lturn:", *_turn(dtype, shape)]
    lines += [
        *next_stage(shape),
        f"setp.lt.u32 p, turn, {operand('turns')};",
        "@p bra.uni $$Lturn;",
        *end,
        "mov.b32 $0, tiles;",
        "}",
    ]
    return "\n".join(lines)


@triton.constexpr_function
def clear_sums(shape: Any) -> list[str]:
    """Begins sums at zero; `one` says that products are added to them."""
    return ["setp.eq.b32 one, 0, 0;", *[f"mov.f32 c{i}, 0f00000000;" for i in range(shape.totals)]]


@triton.constexpr_function
def leave_sums(shape: Any) -> list[str]:
    """Stores the sums in shared memory, at `tiles`, where all programs of a cluster find them."""
    return [
        *store_sums(shape),
        "barrier.cluster.arrive.release.aligned;",
        "barrier.cluster.wait.acquire.aligned;",
    ]


@triton.constexpr_function
def store_sums(shape: Any) -> list[str]:
    """Stores the sums of a thread in shared memory."""
    lines = [
        "wgmma.wait_group.sync.aligned 0;",
        # now the tiles of x are not needed any more
        "bar.sync 0;",
        f"mad.lo.u32 a, t, {2 * (shape.rows + 4)}, g;",
        "mad.lo.u32 a, warp, 16, a;",
        "mad.lo.u32 a, a, 4, tiles;",
    ]
    for i in range(shape.totals):
        place = (i // 4 * 8 + i % 2) * (shape.rows + 4) + i // 2 % 2 * 8
        lines += [f"st.shared.f32 [a+{4 * place}], c{i};"]
    return lines


@triton.constexpr_function
def declare_registers(shape: Any) -> list[str]:
    """Declares registers, and the barriers; all else lies behind them in shared memory."""
    return [
        f".shared .align 16 .b8 gates[{16 * shape.stages}];",
        ".reg .pred p, q, one, odd, leader, producer, waits;",
        ".reg .b16 x0, x1;",
        ".reg .b32 a, b, l, h, lane, g, t, first, row, blocks, turn, mine, value, warp;",
        ".reg .b32 gates0, codes, pairs, tiles, gate, low, high, sbase, code;",
        # of this turn, of the one before, and of the one before that
        ".reg .b32 stage, stage1, stage2, parity, parity1, parity2;",
        f".reg .b32 w<8>, n<8>, v<{16 * shape.sets}>;",
        f".reg .f32 e, f, s, other, s0, s1, found, nested, nnested, offset, c<{shape.totals}>;",
        ".reg .b64 o, y, r0, r1, source, state;",
    ]


@triton.constexpr_function
def prepare_shared(dtype: tl.dtype, shape: Any) -> list[str]:
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
    if in_pairs(dtype):
        lines += fill_pairs(shape)
    return [*lines, "bar.sync 0;"]


@triton.constexpr_function
def prepare_lanes(dtype: tl.dtype, shape: Any) -> list[str]:
    """Finds the addresses of a thread, and its value of the table."""
    thread, k, n = operand("thread"), operand("k"), operand("n")
    begin = operand("first")
    lines = [
        f"and.b32 lane, {thread}, 31;",
        "setp.eq.u32 leader, lane, 0;",
        "shr.u32 g, lane, 2;",
        "and.b32 t, lane, 3;",
        f"shr.u32 warp, {thread}, 5;",
        "setp.eq.u32 producer, warp, 0;",
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
    lines += [f"mov.b32 w{i}, 0;" for i in range(8)]
    lines += [f"mov.b32 n{i}, 0;" for i in range(8)]
    lines += [
        # lane t finds the scale of slot t % 2 in block t // 2
        "and.b32 row, t, 1;",
        "mad.lo.u32 row, row, 8, first;",
        "min.u32 row, row, b;",
        "mul.lo.u32 sbase, row, blocks;",
        # the descriptor of the tiles: rows of 128 bytes, swizzled
        "mov.b32 high, 0x40000040;",
    ]
    if shape.nested:
        lines += [f"ld.global.f32 offset, [{operand('offset')}];"]
    if in_pairs(dtype):  # 4 * lane in each byte
        return [*lines, "mul.lo.u32 value, lane, 0x04040404;"]
    lines += [f"mad.wide.u32 o, lane, 4, {operand('table')};", "ld.global.nc.b32 value, [o];"]
    return lines


@triton.constexpr_function
def _turn(dtype: tl.dtype, shape: Any) -> list[str]:
    """Multiplies a turn, while what the next two need is on its way."""
    lines = [*scales(shape), "add.u32 mine, mine, 2;", *load_words("n")]
    lines += [*look_scale_up(shape), *load_scale(shape, 2)]
    lines += [
        "shl.b32 gate, stage, 3;",
        "add.u32 gate, gates0, gate;",
        "shr.u32 low, tiles, 4;",
        f"mad.lo.u32 low, stage, {shape.turn_bytes // 16}, low;",
        "add.u32 low, low, 0x10000;",
    ]
    decoding = [decode_unit(dtype, shape, half) for half in range(2)]
    products = [_multiply_unit(dtype, shape, half) for half in range(2)]
    lines += multiply_turn(shape, decoding, products)
    lines += refill(shape, copy_tiles(shape))
    return [*lines, *[f"mov.b32 w{i}, n{i};" for i in range(8)]]


@triton.constexpr_function
def multiply_turn(shape: Any, decoding: list[list[str]], products: list[list[str]]) -> list[str]:
    """Decodes and multiplies the two units of a turn, and waits for what must be done before.

    Args:
        shape: a panel.
        decoding: the lines that decode each unit.
        products: the lines that multiply each unit.
    """
    lines: list[str] = []
    wait = "wgmma.wait_group.sync.aligned {};"
    for half in range(2):
        # with one set of registers, the unit before must be done before the next is decoded
        if shape.sets == 1:
            lines += [wait.format(0)]
            if half == 0:
                lines += say_free(shape)
        lines += decoding[half]
        if half == 0:
            # ptxas moves a wait for products before what it finds in the same basic block: this
            # loop keeps the decoding before it
            lines += [
                "$$Lfull:",
                "mbarrier.try_wait.parity.shared.b64 p, [gate], parity;",
                "@!p bra.uni $$Lfull;",
            ]
        lines += products[half]
        if shape.sets == 2:
            lines += [wait.format(1)]
            if half == 0:
                lines += say_free(shape)
    return lines


@triton.constexpr_function
def _multiply_unit(dtype: tl.dtype, shape: Any, half: int) -> list[str]:
    """Begins the products of a unit."""
    kind = dtype.name.replace("fp", "f")
    wgmma = f"wgmma.mma_async.sync.aligned.m64n{shape.columns}k16.f32.{kind}.{kind}"
    sums = ", ".join(f"c{i}" for i in range(shape.totals))
    lines = ["wgmma.fence.sync.aligned;"]
    for step in range(4):
        v = 16 * (half % shape.sets) + 2 * step
        left = f"{{v{v}, v{v + 8}, v{v + 1}, v{v + 9}}}"
        lines += [
            f"add.u32 a, low, {half * shape.turn_bytes // 32 + 2 * step};",
            "mov.b64 y, {a, high};",
            f"{wgmma} {{{sums}}}, {left}, y, one, 1, 1, 0;",
        ]
    return [*lines, "wgmma.commit_group.sync.aligned;"]
