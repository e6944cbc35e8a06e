"""PTX of kernels.py: the loop of a program over k, as that of product/panels, for x as it is.

What differs: tiles of x come by a tensor map, bytes of codes are exchanged between lanes, and a
lane decodes rows of both blocks of a turn.
"""

from typing import Any

import triton
import triton.language as tl

from benchmarks.panels.transposing import (
    declare_exchange,
    exchange,
    prepare_exchange,
    register_of,
)
from nf4conv.codec.kernels.product.panels.assembly import (
    clear_sums,
    declare_registers,
    multiply_turn,
    prepare_lanes,
    prepare_shared,
)
from nf4conv.codec.kernels.product.panels.decoding import (
    decode_unit,
    load_scale,
    load_words,
    look_scale_up,
)
from nf4conv.codec.kernels.product.panels.inputs import operand
from nf4conv.codec.kernels.product.panels.tiles import copy_first, next_stage, refill


@triton.constexpr_function
def straight_loop(dtype: tl.dtype, shape: Any, end: list[str]) -> str:
    """Multiply all turns of a part; `end` stores the sums in shared memory.

    The operands are those of product/panels' assemble_loop, but x is the first row of x.
    """
    lines = [
        *begin(dtype, shape, []),
        *clear_sums(shape),
        *load_first(shape),
        "$$Lturn:",
        *_turn(dtype, shape),
        *next_stage(shape),
        f"setp.lt.u32 p, turn, {operand('turns')};",
        "@p bra.uni $$Lturn;",
        *end,
        "mov.b32 $0, tiles;",
        "}",
    ]
    return "\n".join(lines)


@triton.constexpr_function
def begin(dtype: tl.dtype, shape: Any, registers: list[str]) -> list[str]:
    """Declare registers, and others; set all up, and begin to copy tiles."""
    return [
        "{",
        *declare_registers(shape),
        *declare_exchange(),
        ".reg .b32 column, block, zero;",
        *registers,
        *prepare_shared(dtype, shape),
        # the tensor map is the kernel's seventh argument, and those behind it
        "mov.b64 source, candidate_kernel_param_6;",
        "cvta.param.u64 source, source;",
        "@leader prefetch.tensormap [source];",
        # what follows must come after it: the kernel before may have written all else
        "griddepcontrol.wait;",
        "griddepcontrol.launch_dependents;",
        f"cvt.u32.u64 column, {operand('x')};",
        f"shl.b32 block, {operand('first')}, 1;",
        "mov.b32 zero, 0;",
        *copy_first(shape, copy_by_map(shape))[1:],  # but for where tiles in order begin
        *prepare_lanes(dtype, shape),
        *prepare_exchange(),
    ]


@triton.constexpr_function
def load_first(shape: Any) -> list[str]:
    """Load what the first turn needs, and begin with what the second does."""
    return [
        *load_words("n"),
        *load_scale(shape, 0),
        *exchange(),
        *look_scale_up(shape),
        *load_scale(shape, 2),
    ]


@triton.constexpr_function
def copy_by_map(shape: Any) -> list[str]:
    """Begin to copy the tiles of the next turn to address a, if q. What lies behind the last row or
    the last k becomes zeros.
    """
    copy = "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    return [
        f"@q mbarrier.arrive.expect_tx.shared.b64 state, [gate], {shape.turn_bytes};",
        f"@q {copy} [a], [source, {{zero, column, block}}], [gate];",
        "@q add.u32 block, block, 2;",
    ]


@triton.constexpr_function
def _turn(dtype: tl.dtype, shape: Any) -> list[str]:
    """Multiply a turn, while what the next two need is on its way."""
    lines = begin_turn(shape)
    decoding = [[*_scales_of(half), *decode_unit(dtype, shape, half)] for half in range(2)]
    products = [_multiply_unit(dtype, shape, half) for half in range(2)]
    lines += multiply_turn(shape, decoding, products)
    return [*lines, *refill(shape, copy_by_map(shape)), *exchange()]


@triton.constexpr_function
def begin_turn(shape: Any) -> list[str]:
    """Ask for what the next two turns need, and find the stage of this one."""
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
def lane_scale(shape: Any) -> list[str]:
    """Decode a lane's scale of this turn: s, of slot t % 2 in block t // 2."""
    lines = ["mov.f32 s, nested;"]
    if shape.nested:
        lines = ["mul.rn.ftz.f32 s, found, nested;", "add.rn.f32 s, s, offset;"]
    return [*lines, f"mul.rn.f32 s, s, {operand('norm')};"]


@triton.constexpr_function
def _scales_of(half: int) -> list[str]:
    """Take the scales of a block from the lanes of the quad that have them: s0 and s1."""
    return [f"shfl.sync.idx.b32 s{slot}, s, {2 * half + slot}, 0x1c1f, -1;" for slot in range(2)]


@triton.constexpr_function
def _multiply_unit(dtype: tl.dtype, shape: Any, half: int) -> list[str]:
    """Begin the products of a unit, which are added to sums."""
    return multiply_unit(dtype, shape, half, "c", ["one"] * 4)


@triton.constexpr_function
def multiply_unit(dtype: tl.dtype, shape: Any, half: int, sums: str, added: list[str]) -> list[str]:
    """Begin the products of a unit: a step takes two chunks of eight k.

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
