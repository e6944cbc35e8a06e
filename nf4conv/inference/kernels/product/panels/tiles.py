"""PTX of assembly.py: copies tiles of x to shared memory, and says when they are free again.

A tile has 128 k of the panel's rows of x. A tensor map (prepare.py) says where they are; one thread
asks for a tile, and the GPU copies it.
"""

from typing import Any, Final

import triton

LETTERS: Final = "rllllllrrrrrrrf"
"""Kinds of the inputs of a loop."""

TENSOR_MAP: Final = "panel_kernel_param_6"
"""What PTX calls the parameter of panel_kernel that the tensor map of x begins with."""


@triton.constexpr_function
def operand(name: str) -> str:
    """Returns an input of a loop by its name."""
    names = ["thread", "packed", "absmax", "code", "nested", "offset", "table", "column"]
    names += ["row", "n", "k", "first", "turns", "shift", "norm"]
    return f"${1 + names.index(name)}"


@triton.constexpr_function
def find_map() -> list[str]:
    """Finds the tensor map, and brings it to where it is read. `leader` is one thread."""
    return [
        f"mov.b64 source, {TENSOR_MAP};",
        "cvta.param.u64 source, source;",
        "@leader prefetch.tensormap [source];",
    ]


@triton.constexpr_function
def copy_first(shape: Any) -> list[str]:
    """Begins to copy the tiles of the first turns."""
    lines = [
        f"mov.b32 column, {operand('column')};",
        f"shl.b32 block, {operand('first')}, 1;",
        "mov.b32 zero, 0;",
        "mov.b32 turn, 0;",
    ]
    for name in ("stage", "parity"):
        lines += [f"mov.b32 {name}{i}, 0;" for i in ("", "1", "2")]
    for stage in range(shape.stages):
        lines += [
            f"setp.gt.u32 q, {operand('turns')}, {stage};",
            "and.pred q, q, leader;",
            f"add.u32 gate, gates0, {8 * stage};",
            f"add.u32 a, tiles, {stage * shape.turn_bytes};",
            *_copy(shape),
        ]
    return lines


@triton.constexpr_function
def _copy(shape: Any) -> list[str]:
    """Begins to copy the tile of the next turn to address a, if q. What lies behind the last row or
    the last k becomes zeros.
    """
    copy = "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    return [
        f"@q mbarrier.arrive.expect_tx.shared.b64 state, [gate], {shape.turn_bytes};",
        f"@q {copy} [a], [source, {{zero, column, block}}], [gate];",
        "@q add.u32 block, block, 2;",
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
def wait_until_full(label: str) -> list[str]:
    """Waits until the tile of this turn has been copied.

    ptxas moves a wait for products before what it finds in the same basic block: this loop, which
    a tile that is full ends at once, keeps what stands before it.
    """
    return [
        f"{label}:",
        "mbarrier.try_wait.parity.shared.b64 p, [gate], parity;",
        f"@!p bra.uni {label};",
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
def refill(shape: Any) -> list[str]:
    """Copies a tile to where that of the last turn but one was, or of the last one if there are
    only three stages, when all warps have multiplied it.

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
        *_copy(shape),
    ]
