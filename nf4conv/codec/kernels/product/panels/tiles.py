"""PTX of assembly.py: copies tiles of x to shared memory, and says when they are free again."""

from typing import Any

import triton

from nf4conv.codec.kernels.product.panels.inputs import operand


@triton.constexpr_function
def copy_first(shape: Any, copy: list[str]) -> list[str]:
    """Begins to copy the tiles of the first turns; `copy` is copy_tiles'."""
    lines = [f"mov.b64 source, {operand('x')};", "mov.b32 turn, 0;"]
    for name in ("stage", "parity"):
        lines += [f"mov.b32 {name}{i}, 0;" for i in ("", "1", "2")]
    for stage in range(shape.stages):
        lines += [
            f"setp.gt.u32 q, {operand('turns')}, {stage};",
            "and.pred q, q, leader;",
            f"add.u32 gate, gates0, {8 * stage};",
            f"add.u32 a, tiles, {stage * shape.turn_bytes};",
            *copy,
        ]
    return lines


@triton.constexpr_function
def copy_tiles(shape: Any) -> list[str]:
    """Begins to copy the tiles of the next turn to address a, if q."""
    bulk = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    return [
        f"@q mbarrier.arrive.expect_tx.shared.b64 state, [gate], {shape.turn_bytes};",
        f"@q {bulk} [a], [source], {shape.turn_bytes}, [gate];",
        f"@q add.s64 source, source, {shape.turn_bytes};",
    ]


@triton.constexpr_function
def next_stage(shape: Any) -> list[str]:
    """Goes on to the next turn."""
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
def say_free(shape: Any) -> list[str]:
    """Says that this warp has multiplied the turn before."""
    return [
        "setp.gt.u32 q, turn, 0;",
        "and.pred q, q, leader;",
        "shl.b32 a, stage1, 3;",
        "add.u32 a, gates0, a;",
        f"@q mbarrier.arrive.shared.b64 state, [a+{8 * shape.stages}];",
    ]


@triton.constexpr_function
def refill(shape: Any, copy: list[str]) -> list[str]:
    """Copies tiles to where those of the last turn but one were, or of the last one if there are
    only three stages, when all warps have multiplied them.

    One warp does. So its warpgroup may be ahead of others by two turns, or by one.
    """
    lag = 1 if shape.stages == 3 else 2
    return [
        f"add.u32 a, turn, {shape.stages - lag};",
        f"setp.lt.u32 p, a, {operand('turns')};",
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
        *copy,
    ]
