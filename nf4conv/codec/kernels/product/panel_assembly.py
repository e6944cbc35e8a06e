"""PTX of panel.py: the loop of a program over k.

Lanes are (g, t) as in assembly.py. A *turn* is 128 k: of each of its rows a lane has 16 bytes of
codes, 32 k of one block of 64. A *unit* is a half of it, 64 k, for the 64 rows of a warpgroup.

A warpgroup decodes a unit into registers and gives it to the tensor cores. Nothing keeps
warpgroups together but tiles of x that are full or free. So some decode while others multiply.
"""

from typing import Any, Final

import triton
import triton.language as tl

LETTERS: Final = "rlllllllrrrrrrf"
"""Kinds of the inputs of `loop_assembly`."""


@triton.constexpr_function
def loop_assembly(dtype: tl.dtype, shape: Any) -> str:
    """Multiply all turns of a part, and leave the sums in shared memory for all programs of a
    cluster.

    Operands: $0 the address of the sums; then the thread; the addresses of packed codes, absmax,
    its code, nested absmax, the offset of the latter, the table, and the first tile of x; the first
    row of W; rows of W, columns; the first turn and the number of turns, at least 1; log2 of the
    blocks that share a scale; what scales are multiplied with. `shape` is a panel.Panel. The sums
    of a column are shape.rows + 4 apart.
    """
    lines = ["{", *_registers(shape), *_prepare_shared(dtype, shape)]
    # what follows must come after it: the kernel before may have written all else
    lines += ["griddepcontrol.wait;", "griddepcontrol.launch_dependents;"]
    lines += [*_copy_first(shape), *_prepare(dtype, shape), "setp.eq.b32 one, 0, 0;"]
    for i in range(shape.totals):
        lines += [f"mov.f32 c{i}, 0f00000000;"]
    lines += [*_load_words("w"), *_load_scale(shape, 0)]
    lines += [*_look_scale_up(shape), *_load_scale(shape, 2)]
    lines += ["$$Lturn:", *_turn(dtype, shape)]
    lines += [
        *_next_stage(shape),
        f"setp.lt.u32 p, turn, {_operand('turns')};",
        "@p bra.uni $$Lturn;",
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
    lines += [
        "barrier.cluster.arrive.release.aligned;",
        "barrier.cluster.wait.acquire.aligned;",
        "mov.b32 $0, tiles;",
        "}",
    ]
    return "\n".join(lines)


@triton.constexpr_function
def sum_assembly() -> str:
    """Add up four sums of one program, or of the two of a cluster.

    Operands: $0 … $3 the sums; $4 their address; $5 how many programs.
    """
    lines = ["{", ".reg .pred p;", ".reg .b32 a;", ".reg .f32 c<8>;", "setp.gt.u32 p, $5, 1;"]
    for part in range(2):
        values = ", ".join(f"c{4 * part + i}" for i in range(4))
        guard = "@p " if part else ""
        lines += [
            f"{guard}mapa.shared::cluster.u32 a, $4, {part};",
            f"{guard}ld.shared::cluster.v4.f32 {{{values}}}, [a];",
        ]
    lines += [f"mov.f32 ${i}, c{i};" for i in range(4)]
    lines += [f"@p add.f32 ${i}, ${i}, c{4 + i};" for i in range(4)]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def store_assembly(dtype: tl.dtype) -> str:
    """Round four values and store them.

    Operands: $0 anything; $1 … $4 the values; $5 their address, a multiple of four values; $6
    whether to.
    """
    lines = ["{", ".reg .pred p;", ".reg .b32 a, b;", "setp.ne.b32 p, $6, 0;"]
    if dtype.name == "fp32":
        lines += ["@p st.global.v4.f32 [$5], {$1, $2, $3, $4};"]
    else:
        kind = "bf16x2" if dtype.name == "bf16" else "f16x2"
        lines += [f"cvt.rn.{kind}.f32 a, $2, $1;", f"cvt.rn.{kind}.f32 b, $4, $3;"]
        lines += ["@p st.global.v2.b32 [$5], {a, b};"]
    return "\n".join([*lines, "mov.b32 $0, 0;", "}"])


@triton.constexpr_function
def _operand(name: str) -> str:
    """Return an input of `loop_assembly` by its name."""
    names = ["thread", "packed", "absmax", "code", "nested", "offset", "table", "x"]
    names += ["row", "n", "k", "first", "turns", "shift", "norm"]
    return f"${1 + names.index(name)}"


@triton.constexpr_function
def _in_pairs(dtype: tl.dtype) -> bool:
    """Return whether a byte of codes is looked up at once.

    The table's values are rounded to float16. That is 1/8 of bfloat16's rounding, but as much as
    float16's own.
    """
    pairs: bool = dtype.name == "bf16"
    return pairs


@triton.constexpr_function
def _registers(shape: Any) -> list[str]:
    """Declare registers, and the barriers; all else lies behind them in shared memory."""
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
def _prepare_shared(dtype: tl.dtype, shape: Any) -> list[str]:
    """Set up barriers and tables: these are older than the kernel before.

    gates0 + 8 i becomes complete when stage i has been copied, gates0 + 8 (stages + i) when all
    warps have multiplied it. Behind the barriers, at a multiple of 1024, are the values of nested
    absmax, then the table of pairs, then the tiles.
    """
    thread = _operand("thread")
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
            f"mad.wide.u32 o, a, 4, {_operand('code')};",
            "ld.global.b32 b, [o];",
            "mad.lo.u32 a, a, 4, codes;",
            "st.shared.b32 [a], b;",
        ]
    if _in_pairs(dtype):
        lines += _fill_pairs(shape)
    return [*lines, "bar.sync 0;"]


@triton.constexpr_function
def _fill_pairs(shape: Any) -> list[str]:
    """Fill the table of pairs: the word of byte b, once for each of 32 banks, at 256 (b % 128) +
    128 (b // 128).
    """
    lines = []
    for turn in range(16 // shape.groups):
        lines += [
            # eight threads write the copies of a byte
            f"add.u32 a, {_operand('thread')}, {turn * 128 * shape.groups};",
            "and.b32 h, a, 7;",
            "shr.u32 b, a, 3;",
            f"mad.wide.u32 o, b, 4, {_operand('table')};",
            "ld.global.nc.b32 l, [o];",
            "and.b32 a, b, 127;",
            "mad.lo.u32 a, a, 256, pairs;",
            "mad.lo.u32 a, h, 16, a;",
            "shr.u32 b, b, 7;",
            "mad.lo.u32 a, b, 128, a;",
            "st.shared.v4.b32 [a], {l, l, l, l};",
        ]
    return lines


@triton.constexpr_function
def _copy_first(shape: Any) -> list[str]:
    """Begin to copy the tiles of the first turns."""
    lines = [f"mov.b64 source, {_operand('x')};", "mov.b32 turn, 0;"]
    for name in ("stage", "parity"):
        lines += [f"mov.b32 {name}{i}, 0;" for i in ("", "1", "2")]
    for stage in range(shape.stages):
        lines += [
            f"setp.gt.u32 q, {_operand('turns')}, {stage};",
            "and.pred q, q, leader;",
            f"add.u32 gate, gates0, {8 * stage};",
            f"add.u32 a, tiles, {stage * shape.turn_bytes};",
            *_copy(shape),
        ]
    return lines


@triton.constexpr_function
def _copy(shape: Any) -> list[str]:
    """Begin to copy the tiles of the next turn to address a, if q."""
    bulk = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    return [
        f"@q mbarrier.arrive.expect_tx.shared.b64 state, [gate], {shape.turn_bytes};",
        f"@q {bulk} [a], [source], {shape.turn_bytes}, [gate];",
        f"@q add.s64 source, source, {shape.turn_bytes};",
    ]


@triton.constexpr_function
def _prepare(dtype: tl.dtype, shape: Any) -> list[str]:
    """Find the addresses of a thread, and its value of the table."""
    thread, k, n = _operand("thread"), _operand("k"), _operand("n")
    begin = _operand("first")
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
        f"add.u32 first, first, {_operand('row')};",
        f"sub.u32 b, {n}, 1;",
        f"shr.u32 a, {k}, 1;",
        f"mul.wide.u32 o, {begin}, 64;",
        f"add.s64 o, o, {_operand('packed')};",
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
        lines += [f"ld.global.f32 offset, [{_operand('offset')}];"]
    if _in_pairs(dtype):  # 4 * lane in each byte
        return [*lines, "mul.lo.u32 value, lane, 0x04040404;"]
    lines += [f"mad.wide.u32 o, lane, 4, {_operand('table')};", "ld.global.nc.b32 value, [o];"]
    return lines


@triton.constexpr_function
def _load_words(to: str) -> list[str]:
    """Load a lane's words of the turn that `mine` belongs to, and go on to the next."""
    lines = ["setp.lt.u32 p, mine, blocks;"]
    for slot in range(2):
        words = ", ".join(f"{to}{4 * slot + i}" for i in range(4))
        lines += [
            f"@p ld.global.L1::no_allocate.L2::128B.v4.b32 {{{words}}}, [r{slot}];",
            f"add.s64 r{slot}, r{slot}, 64;",
        ]
    return lines


@triton.constexpr_function
def _load_scale(shape: Any, ahead: int) -> list[str]:
    """Load a scale of `ahead` blocks behind `mine` as it is stored: code and nnested, or nnested
    alone.
    """
    lines = [
        f"add.u32 a, mine, {ahead};",
        "sub.u32 b, blocks, 1;",
        "min.u32 a, a, b;",
        "add.u32 a, a, sbase;",
        f"shr.u32 a, a, {_operand('shift')};",
    ]
    if not shape.nested:
        return [
            *lines,
            f"mad.wide.u32 o, a, 4, {_operand('absmax')};",
            "ld.global.f32 nnested, [o];",
        ]
    return [
        *lines,
        "cvt.u64.u32 o, a;",
        f"add.s64 o, o, {_operand('absmax')};",
        "ld.global.u8 code, [o];",
        "shr.u32 a, a, 8;",
        f"mad.wide.u32 o, a, 4, {_operand('nested')};",
        "ld.global.f32 nnested, [o];",
    ]


@triton.constexpr_function
def _look_scale_up(shape: Any) -> list[str]:
    """Begin to decode what `_load_scale` has loaded: found and nested."""
    lines = ["mov.f32 nested, nnested;"]
    if shape.nested:
        lines += [
            "mad.lo.u32 a, code, 4, codes;",
            "ld.shared.f32 found, [a];",
        ]
    return lines


@triton.constexpr_function
def _scales(shape: Any) -> list[str]:
    """Decode the scales of this turn: s0 and s1 of a lane's two rows."""
    lines = ["mov.f32 s, nested;"]
    if shape.nested:
        lines = ["mul.rn.ftz.f32 s, found, nested;", "add.rn.f32 s, s, offset;"]
    return [
        *lines,
        f"mul.rn.f32 s, s, {_operand('norm')};",
        "shfl.sync.bfly.b32 other, s, 1, 31, -1;",
        "selp.f32 s0, other, s, odd;",
        "selp.f32 s1, s, other, odd;",
    ]


@triton.constexpr_function
def _turn(dtype: tl.dtype, shape: Any) -> list[str]:
    """Multiply a turn, while what the next two need is on its way."""
    lines = [*_scales(shape), "add.u32 mine, mine, 2;", *_load_words("n")]
    lines += [*_look_scale_up(shape), *_load_scale(shape, 2)]
    lines += [
        "shl.b32 gate, stage, 3;",
        "add.u32 gate, gates0, gate;",
        "shr.u32 low, tiles, 4;",
        f"mad.lo.u32 low, stage, {shape.turn_bytes // 16}, low;",
        "add.u32 low, low, 0x10000;",
    ]
    wait = "wgmma.wait_group.sync.aligned {};"
    for half in range(2):
        # with one set of registers, the unit before must be done before the next is decoded
        if shape.sets == 1:
            lines += [wait.format(0)]
            if half == 0:
                lines += _say_free(shape)
        lines += _decode_unit(dtype, shape, half)
        if half == 0:
            # ptxas moves a wait for products before what it finds in the same basic block: this
            # loop keeps the decoding before it
            lines += [
                "$$Lfull:",
                "mbarrier.try_wait.parity.shared.b64 p, [gate], parity;",
                "@!p bra.uni $$Lfull;",
            ]
        lines += _multiply_unit(dtype, shape, half)
        if shape.sets == 2:
            lines += [wait.format(1)]
            if half == 0:
                lines += _say_free(shape)
    lines += _refill(shape)
    return [*lines, *[f"mov.b32 w{i}, n{i};" for i in range(8)]]


@triton.constexpr_function
def _decode_unit(dtype: tl.dtype, shape: Any, half: int) -> list[str]:
    """Decode a unit, 16 registers."""
    decode = _decode_pairs if _in_pairs(dtype) else _decode
    lines = []
    for slot in range(2):
        for word in range(2):
            target = 16 * (half % shape.sets) + 8 * slot + 4 * word
            lines += decode(dtype, f"w{4 * slot + 2 * half + word}", f"s{slot}", target)
    return lines


@triton.constexpr_function
def _multiply_unit(dtype: tl.dtype, shape: Any, half: int) -> list[str]:
    """Begin the products of a unit."""
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


@triton.constexpr_function
def _say_free(shape: Any) -> list[str]:
    """Say that this warp has multiplied the turn before."""
    return [
        "setp.gt.u32 q, turn, 0;",
        "and.pred q, q, leader;",
        "shl.b32 a, stage1, 3;",
        "add.u32 a, gates0, a;",
        f"@q mbarrier.arrive.shared.b64 state, [a+{8 * shape.stages}];",
    ]


@triton.constexpr_function
def _next_stage(shape: Any) -> list[str]:
    """Go on to the next turn."""
    return [
        "add.u32 turn, turn, 1;",
        "mov.b32 stage2, stage1;",
        "mov.b32 parity2, parity1;",
        "mov.b32 stage1, stage;",
        "mov.b32 parity1, parity;",
        "add.u32 stage, stage, 1;",
        f"setp.eq.u32 p, stage, {shape.stages};",
        "selp.b32 stage, 0, stage, p;",
        "selp.b32 a, 1, 0, p;",
        "xor.b32 parity, parity, a;",
    ]


@triton.constexpr_function
def _refill(shape: Any) -> list[str]:
    """Copy tiles to where those of the last turn but one were, or of the last one if there are only
    three stages, when all warps have multiplied them.

    One warp does. So its warpgroup may be ahead of others by two turns, or by one.
    """
    lag = 1 if shape.stages == 3 else 2
    return [
        f"add.u32 a, turn, {shape.stages - lag};",
        f"setp.lt.u32 p, a, {_operand('turns')};",
        f"setp.ge.u32 waits, turn, {lag};",
        "and.pred waits, waits, p;",
        "and.pred waits, waits, producer;",
        f"shl.b32 gate, stage{lag}, 3;",
        "add.u32 gate, gates0, gate;",
        f"mad.lo.u32 a, stage{lag}, {shape.turn_bytes}, tiles;",
        "$$Lfree:",
        "not.pred q, waits;",
        f"@waits mbarrier.try_wait.parity.shared.b64 q, [gate+{8 * shape.stages}], parity{lag};",
        "@!q bra.uni $$Lfree;",
        "and.pred q, waits, leader;",
        *_copy(shape),
    ]


@triton.constexpr_function
def _decode(dtype: tl.dtype, word: str, scale: str, target: int) -> list[str]:
    """Decode a word to four registers of two values, by shuffles: exactly."""
    kind = "bf16x2" if dtype.name == "bf16" else "f16x2"
    lines = []
    for byte in range(4):
        lines += [
            f"shr.u32 a, {word}, {8 * byte + 4};",
            "shfl.sync.idx.b32 e, value, a, 31, -1;",
            f"shr.u32 b, {word}, {8 * byte};",
            "shfl.sync.idx.b32 f, value, b, 31, -1;",
            f"mul.rn.ftz.f32 e, e, {scale};",
            f"mul.rn.ftz.f32 f, f, {scale};",
            f"cvt.rn.{kind}.f32 v{target + byte}, f, e;",
        ]
    return lines


@triton.constexpr_function
def _decode_pairs(dtype: tl.dtype, word: str, scale: str, target: int) -> list[str]:
    """Decode a word to four registers of two values, by the table of pairs.

    A `prmt` makes an address of a byte of l, which holds 4 * lane and the byte's top bit, and of
    one of h, the byte's other bits.
    """
    kind = "bf16x2" if dtype.name == "bf16" else "f16x2"
    lines = [
        f"lop3.b32 l, {word}, 0x80808080, value, 0xea;",  # (word & 0x80808080) | value
        f"and.b32 h, {word}, 0x7f7f7f7f;",
    ]
    for byte, pick in enumerate(["0xcc40", "0xdd51", "0xee62", "0xff73"]):
        lines += [
            f"prmt.b32 a, l, h, {pick};",
            "add.u32 a, a, pairs;",
            "ld.shared.b32 b, [a];",
            "mov.b32 {x0, x1}, b;",
            "cvt.f32.f16 e, x0;",
            "cvt.f32.f16 f, x1;",
            f"mul.rn.ftz.f32 e, e, {scale};",
            f"mul.rn.ftz.f32 f, f, {scale};",
            f"cvt.rn.{kind}.f32 v{target + byte}, f, e;",
        ]
    return lines
