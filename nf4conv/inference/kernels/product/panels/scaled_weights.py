"""PTX of kernels.py: the loop of a program over k that scales and rounds weights."""

from typing import Any

import triton
import triton.language as tl

from nf4conv.inference.kernels.product.panels.assembly import (
    all_turns,
    begin,
    begin_turn,
    multiply_unit,
    wait_for_products,
)
from nf4conv.inference.kernels.product.panels.decoding import decode_unit, take_scales
from nf4conv.inference.kernels.product.panels.tiles import refill, say_free, wait_until_full
from nf4conv.inference.kernels.product.panels.transposing import exchange


@triton.constexpr_function
def multiply_scaled_weights(dtype: tl.dtype, shape: Any, end: list[str]) -> str:
    """Multiplies all turns of a part; `end` stores the sums in shared memory, at `tiles`."""
    lines = [
        *begin(dtype, shape, []),
        *all_turns(shape, _turn(dtype, shape)),
        wait_for_products(0),
        *end,
        "mov.b32 $0, tiles;",
        "}",
    ]
    return "\n".join(lines)


@triton.constexpr_function
def _turn(dtype: tl.dtype, shape: Any) -> list[str]:
    """Multiplies a turn, while what the next two need is on its way."""
    lines = begin_turn(shape)
    for half in range(2):
        # with one set of registers, the unit before must be done before the next is decoded
        if shape.sets == 1:
            lines += [wait_for_products(0)]
            if half == 0:
                lines += say_free(shape)
        lines += [*take_scales("s", half), *decode_unit(dtype, shape, half)]
        if half == 0:
            lines += wait_until_full("$$Lfull")
        lines += multiply_unit(dtype, shape, half, "c", ["one"] * 4)
        if shape.sets == 2:
            lines += [wait_for_products(1)]
            if half == 0:
                lines += say_free(shape)
    return [*lines, *refill(shape), *exchange()]
