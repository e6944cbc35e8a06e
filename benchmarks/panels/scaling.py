"""PTX of kernels.py: the loop over k for x as it is, with sums that are scaled instead of weights.

The table has the 16 values in the dtype of x, as the wide kernel's: what is looked up goes to the
tensor cores at once. The products of a unit, 64 k of one block, are sums of their own, which are
multiplied with the block's scale and added to the totals. So a thread scales `columns` / 2 sums for
64 k instead of 32 weights, which it would also have to convert and round. It rounds no weight.
"""

from typing import Any

import triton
import triton.language as tl

from benchmarks.panels.assembly import begin, begin_turn, copy_by_map, load_first, multiply_unit
from benchmarks.panels.transposing import exchange
from nf4conv.codec.kernels.product.panels.assembly import clear_sums
from nf4conv.codec.kernels.product.panels.inputs import operand
from nf4conv.codec.kernels.product.panels.tiles import next_stage, refill, say_free


@triton.constexpr_function
def scaled_loop(dtype: tl.dtype, shape: Any, end: list[str]) -> str:
    """Multiply all turns of a part; `end` stores the sums in shared memory.

    The operands are those of straight_loop. The table is that of pairs in either dtype.
    """
    registers = [f".reg .f32 d<{shape.totals}>, u0, u1;", ".reg .pred none;"]
    lines = [
        *begin(tl.bfloat16, shape, registers),
        *clear_sums(shape),
        "setp.ne.b32 none, 0, 0;",
        "mov.f32 u0, 0f00000000;",
        "mov.f32 u1, 0f00000000;",
        *[f"mov.f32 d{i}, 0f00000000;" for i in range(shape.totals)],
        *load_first(shape),
        "$$Lturn:",
        *_turn(dtype, shape),
        *next_stage(shape),
        f"setp.lt.u32 p, turn, {operand('turns')};",
        "@p bra.uni $$Lturn;",
        "wgmma.wait_group.sync.aligned 0;",
        *_add_scaled(shape),
        *end,
        "mov.b32 $0, tiles;",
        "}",
    ]
    return "\n".join(lines)


@triton.constexpr_function
def _turn(dtype: tl.dtype, shape: Any) -> list[str]:
    """Multiply a turn, while what the next two need is on its way."""
    lines = begin_turn(shape)
    wait = "wgmma.wait_group.sync.aligned 0;"
    for half in range(2):
        if shape.sets == 1:  # the products before still read these registers
            lines += [wait]
        lines += [
            *_look_up(shape, half),
            # ptxas moves a wait for products before what it finds in the same basic block: this
            # loop, which a tile that is full ends at once, keeps the lookups before it
            f"$$Lfull{half}:",
            "mbarrier.try_wait.parity.shared.b64 p, [gate], parity;",
            f"@!p bra.uni $$Lfull{half};",
        ]
        if shape.sets == 2:
            lines += [wait]
        if half == 0:
            lines += say_free(shape)
        lines += _add_scaled(shape)
        for slot in range(2):
            lines += [f"shfl.sync.idx.b32 u{slot}, s, {2 * half + slot}, 0x1c1f, -1;"]
        lines += multiply_unit(dtype, shape, half, "d", ["none", "one", "one", "one"])
    return [*lines, *refill(shape, copy_by_map(shape)), *exchange()]


@triton.constexpr_function
def _add_scaled(shape: Any) -> list[str]:
    """Add the sums of the unit before, times its scales, to the totals."""
    return [f"fma.rn.f32 c{i}, d{i}, u{i // 2 % 2}, c{i};" for i in range(shape.totals)]


@triton.constexpr_function
def _look_up(shape: Any, half: int) -> list[str]:
    """Look a unit up, 16 registers, as product/panels' _decode_pairs finds the addresses."""
    lines = []
    for slot in range(2):
        for word in range(2):
            name = f"w{4 * slot + 2 * half + word}"
            target = 16 * (half % shape.sets) + 8 * slot + 4 * word
            lines += [
                f"lop3.b32 l, {name}, 0x80808080, value, 0xea;",  # (word & 0x80808080) | value
                f"and.b32 h, {name}, 0x7f7f7f7f;",
            ]
            for byte, pick in enumerate(["0xcc40", "0xdd51", "0xee62", "0xff73"]):
                lines += [
                    f"prmt.b32 a, l, h, {pick};",
                    "add.u32 a, a, pairs;",
                    f"ld.shared.b32 v{target + byte}, [a];",
                ]
    return lines
