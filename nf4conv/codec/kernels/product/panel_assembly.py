"""PTX of panel.py: the loop of a program over k.

Lanes are (g, t) as in assembly.py. x is in the order of launches.order_kernel. A *block* is 64 k:
of each of its rows a lane has 8 bytes of codes, 16 k.
"""

from typing import Any, Final

import triton
import triton.language as tl

TILES: Final = 3
"""Tiles of x in shared memory: one is multiplied, two are being copied."""


@triton.constexpr_function
def loop_assembly(dtype: tl.dtype, shape: Any) -> str:
    """Multiply all blocks of a part: decode each while the one before is multiplied by `wgmma`.

    Operands: the totals, for each row tile and 8 columns two of row g, two of row g + 8; the
    thread; the addresses of packed codes, absmax, its code and nested absmax; the offset of the
    latter; the addresses of the table and of x; the first row of W; rows of W, columns, rows of x
    from the program's first on; the first block and that behind the last, an even number of blocks
    later; log2 of the blocks that share a scale. `shape` is a panel.Panel.
    """
    lines = ["{", *_registers(shape), *_prepare(shape)]
    lines += ["setp.eq.b32 one, 0, 0;"]
    for i in range(shape.totals):
        lines += [f"mov.f32 ${i}, 0f00000000;"]
    lines += [*_copy(shape), *_copy(shape), "sub.u32 block, block, 2;"]
    lines += [*_load_words(shape, 0), *_load_scale(shape)]
    lines += [*_next_scale(shape), "add.u32 ahead, block, 1;", *_load_scale(shape)]
    lines += ["$$Lpanel:"]
    for turn in range(2):
        lines += _turn(dtype, shape, turn)
    lines += [
        f"setp.lt.u32 p, block, {_operand(shape, 'end')};",
        "@p bra $$Lpanel;",
        "wgmma.wait_group.sync.aligned 0;",
        "}",
    ]
    return "\n".join(lines)


AHEAD: Final = 8
"""Blocks between the one that is multiplied and the one that is brought to L2."""

LETTERS: Final = "rllllfllrrrrrrr"
"""Kinds of the operands behind the totals."""


@triton.constexpr_function
def _operand(shape: Any, name: str) -> str:
    """Return an operand behind the totals by its name."""
    names = ["thread", "packed", "absmax", "code", "nested", "offset", "table", "x"]
    names += ["row", "n", "k", "m", "first", "end", "shift"]
    return f"${shape.totals + names.index(name)}"


@triton.constexpr_function
def _registers(shape: Any) -> list[str]:
    """Declare registers, and shared memory for x."""
    slots = 2 * shape.row_tiles
    return [
        f".shared .align 1024 .b8 tiles[{TILES * shape.tile_bytes}];",
        ".reg .pred p, one;",
        ".reg .b32 a, b, lane, g, t, first, row, sbase, blocks, block, ahead, value, size, slot;",
        ".reg .b32 target, read, write, code;",
        f".reg .b32 w<{4 * slots}>, v<{16 * slots}>, z<{shape.copies}>;",
        ".reg .f32 e, f, s, found, nested, nnested;",
        f".reg .f32 s<{slots}>;",
        ".reg .b64 d, o, y, step;",
        f".reg .b64 r<{slots}>, x<{shape.copies}>;",
    ]


@triton.constexpr_function
def _prepare(shape: Any) -> list[str]:
    """Find the addresses of a thread, and its value of the table."""
    thread, k, n = _operand(shape, "thread"), _operand(shape, "k"), _operand(shape, "n")
    m, begin = _operand(shape, "m"), _operand(shape, "first")
    lines = [
        f"and.b32 lane, {thread}, 31;",
        "shr.u32 g, lane, 2;",
        "and.b32 t, lane, 3;",
        f"shr.u32 blocks, {k}, 6;",
        f"mov.b32 block, {begin};",
        # the first row: 64 * row_tiles for each warpgroup, 16 for each of its warps
        f"shr.u32 a, {thread}, 7;",
        f"mad.lo.u32 first, a, {64 * shape.row_tiles}, g;",
        f"bfe.u32 a, {thread}, 5, 2;",
        "mad.lo.u32 first, a, 16, first;",
        f"add.u32 first, first, {_operand(shape, 'row')};",
        f"sub.u32 b, {n}, 1;",
        f"shr.u32 a, {k}, 1;",
        "mul.wide.u32 o, block, 32;",
        f"add.s64 o, o, {_operand(shape, 'packed')};",
        "mul.wide.u32 y, t, 8;",
        "add.s64 o, o, y;",
    ]
    for slot in range(2 * shape.row_tiles):
        lines += [
            f"add.u32 row, first, {slot // 2 * 64 + slot % 2 * 8};",
            "min.u32 row, row, b;",
            f"mul.wide.u32 r{slot}, row, a;",
            f"add.s64 r{slot}, r{slot}, o;",
        ]
    lines += [
        # lane t finds the scale of slot t
        "and.b32 a, t, 1;",
        "mad.lo.u32 row, a, 8, first;",
    ]
    if shape.row_tiles == 2:
        lines += ["shr.u32 a, t, 1;", "mad.lo.u32 row, a, 64, row;"]
    lines += [
        "min.u32 row, row, b;",
        "mul.lo.u32 sbase, row, blocks;",
        f"mad.wide.u32 o, lane, 4, {_operand(shape, 'table')};",
        "ld.global.nc.b32 value, [o];",
        # x: a thread copies piece thread % 8 of every 32nd row
        f"and.b32 a, {thread}, 7;",
        f"shr.u32 b, {thread}, 3;",
        "and.b32 size, b, 7;",
        "xor.b32 size, size, a;",
        "shl.b32 size, size, 4;",
        "mad.lo.u32 size, b, 128, size;",
        "mov.u32 target, tiles;",
        "add.u32 target, target, size;",
        "mul.wide.u32 o, block, 128;",
        f"add.s64 o, o, {_operand(shape, 'x')};",
        "mul.wide.u32 y, a, 16;",
        "add.s64 o, o, y;",
        f"shl.b32 a, {k}, 1;",
    ]
    for copy in range(shape.copies):
        lines += [
            f"add.u32 row, b, {32 * copy};",
            f"setp.lt.u32 p, row, {m};",
            f"selp.b32 z{copy}, 16, 0, p;",
            "selp.b32 row, row, 0, p;",
            f"mul.wide.u32 x{copy}, row, a;",
            f"add.s64 x{copy}, x{copy}, o;",
        ]
    lines += [
        "mov.b32 read, 0;",
        "mov.b32 write, 0;",
        # d: the descriptor of the tiles: rows of 128 bytes, swizzled
        "mov.u32 a, tiles;",
        "shr.u32 a, a, 4;",
        "cvt.u64.u32 d, a;",
        "or.b64 d, d, 0x4000004000010000;",
        "mov.b32 ahead, block;",
    ]
    return lines


@triton.constexpr_function
def _copy(shape: Any) -> list[str]:
    """Begin to copy the tile of `block` to the place `write`; advance all of them."""
    lines = ["setp.lt.u32 p, block, blocks;", "add.u32 slot, target, write;"]
    for copy in range(shape.copies):
        lines += [
            f"selp.b32 size, z{copy}, 0, p;",
            f"cp.async.cg.shared.global [slot], [x{copy}], 16, size;",
            f"add.s64 x{copy}, x{copy}, 128;",
        ]
        if copy < shape.copies - 1:
            lines += ["add.u32 slot, slot, 4096;"]
    lines += ["cp.async.commit_group;", "add.u32 block, block, 1;", *_advance(shape, "write")]
    return lines


@triton.constexpr_function
def _advance(shape: Any, register: str) -> list[str]:
    """Advance a place in shared memory to the next tile."""
    return [
        f"add.u32 {register}, {register}, {shape.tile_bytes};",
        f"setp.eq.b32 p, {register}, {TILES * shape.tile_bytes};",
        f"selp.b32 {register}, 0, {register}, p;",
    ]


@triton.constexpr_function
def _load_words(shape: Any, turn: int, guard: str = "") -> list[str]:
    """Load the words of the next block to the registers of a turn; with a guard such as "@p "."""
    lines = []
    for slot in range(2 * shape.row_tiles):
        w = 2 * (turn * 2 * shape.row_tiles + slot)
        lines += [
            f"{guard}ld.global.nc.L1::no_allocate.L2::128B.v2.b32 {{w{w}, w{w + 1}}}, [r{slot}];",
            f"add.s64 r{slot}, r{slot}, 32;",
        ]
    return lines


@triton.constexpr_function
def _prefetch(shape: Any) -> list[str]:
    """Bring words of blocks behind the next to L2; one lane of a quad does for all four."""
    lines = [
        f"add.u32 a, block, {AHEAD};",
        "mad.lo.u32 a, t, 16777216, a;",  # beyond all blocks, for the other lanes
        "setp.lt.u32 p, a, blocks;",
    ]
    for slot in range(2 * shape.row_tiles):
        # the address is already that of the block behind the next
        lines += [f"@p prefetch.global.L2 [r{slot}+{32 * AHEAD - 64}];"]
    return lines


@triton.constexpr_function
def _load_scale(shape: Any) -> list[str]:
    """Load the scale of block `ahead` as it is stored: code and nnested, or nnested alone."""
    lines = [
        "sub.u32 a, blocks, 1;",
        "min.u32 a, a, ahead;",
        "add.u32 a, a, sbase;",
        f"shr.u32 a, a, {_operand(shape, 'shift')};",
    ]
    if not shape.nested:
        return [
            *lines,
            f"mad.wide.u32 o, a, 4, {_operand(shape, 'absmax')};",
            "ld.global.nc.f32 nnested, [o];",
        ]
    return [
        *lines,
        "cvt.u64.u32 o, a;",
        f"add.s64 o, o, {_operand(shape, 'absmax')};",
        "ld.global.nc.u8 code, [o];",
        "shr.u32 a, a, 8;",
        f"mad.wide.u32 o, a, 4, {_operand(shape, 'nested')};",
        "ld.global.nc.f32 nnested, [o];",
    ]


@triton.constexpr_function
def _next_scale(shape: Any) -> list[str]:
    """Begin to decode what `_load_scale` has loaded: found and nested."""
    lines = ["mov.f32 nested, nnested;"]
    if shape.nested:
        lines += [
            f"mad.wide.u32 o, code, 4, {_operand(shape, 'code')};",
            "ld.global.nc.f32 found, [o];",
        ]
    return lines


@triton.constexpr_function
def _turn(dtype: tl.dtype, shape: Any, turn: int) -> list[str]:
    """Decode block `block` and begin its products; two turns have registers of their own."""
    kind = dtype.name.replace("fp", "f")
    slots = 2 * shape.row_tiles
    lines = []
    if shape.nested:
        lines += [
            "mul.rn.ftz.f32 s, found, nested;",
            f"add.rn.f32 s, s, {_operand(shape, 'offset')};",
        ]
    else:
        lines += ["mov.f32 s, nested;"]
    for slot in range(slots):
        lines += [f"shfl.sync.idx.b32 s{slot}, s, {slot}, 0x1c03, -1;"]
    # what the next two blocks need is on its way meanwhile
    lines += ["add.u32 a, block, 1;", "setp.lt.u32 p, a, blocks;"]
    lines += _load_words(shape, 1 - turn, "@p ")
    if turn == 0:
        lines += _prefetch(shape)
    lines += [*_next_scale(shape), "add.u32 ahead, block, 2;", *_load_scale(shape)]
    for slot in range(slots):
        for word in range(2):
            lines += _decode(dtype, shape, turn, slot, word)
    lines += [
        # behind the barrier no warp reads the tile before, which the next copy overwrites
        "wgmma.wait_group.sync.aligned 0;",
        "cp.async.wait_group 1;",
        "fence.proxy.async.shared::cta;",
        "bar.sync 0;",
        "add.u32 block, block, 2;",
        *_copy(shape),
        "sub.u32 block, block, 2;",
        "shr.u32 a, read, 4;",
        "cvt.u64.u32 y, a;",
        "add.s64 y, d, y;",
        "wgmma.fence.sync.aligned;",
    ]
    wgmma = f"wgmma.mma_async.sync.aligned.m64n{shape.columns}k16.f32.{kind}.{kind}"
    for step in range(4):
        for row_tile in range(shape.row_tiles):
            count = shape.columns // 2
            sums = ", ".join(f"${row_tile * count + i}" for i in range(count))
            v = turn * 8 * slots + 16 * row_tile + 2 * step
            left = f"{{v{v}, v{v + 8}, v{v + 1}, v{v + 9}}}"
            lines += [f"{wgmma} {{{sums}}}, {left}, y, one, 1, 1, 0;"]
        lines += ["add.s64 y, y, 2;"]
    lines += ["wgmma.commit_group.sync.aligned;"]
    return [*lines, *_advance(shape, "read")]


@triton.constexpr_function
def _decode(dtype: tl.dtype, shape: Any, turn: int, slot: int, word: int) -> list[str]:
    """Decode a word to four registers of two values."""
    slots = 2 * shape.row_tiles
    kind = "bf16x2" if dtype.name == "bf16" else "f16x2"
    w = f"w{2 * (turn * slots + slot) + word}"
    v = turn * 8 * slots + 8 * slot + 4 * word
    lines = []
    for byte in range(4):
        lines += [f"shr.u32 a, {w}, {8 * byte + 4};", "shfl.sync.idx.b32 e, value, a, 31, -1;"]
        index = w
        if byte:
            lines += [f"shr.u32 b, {w}, {8 * byte};"]
            index = "b"
        lines += [
            f"shfl.sync.idx.b32 f, value, {index}, 31, -1;",
            f"mul.rn.ftz.f32 e, e, s{slot};",
            f"mul.rn.ftz.f32 f, f, s{slot};",
            f"cvt.rn.{kind}.f32 v{v + byte}, f, e;",
        ]
    return lines
