"""PTX of kernels.py: the loop of a program over k, that scales weights or sums of their products.

What scales sums: the table has the 16 values in the dtype of x, as the wide kernel's, so what is
looked up goes to the tensor cores at once. The products of a unit, 64 k of one block, are sums of
their own, which are multiplied with the block's scale and added to the totals. So a thread scales
`columns` / 2 sums for 64 k instead of 32 weights, which it would also have to convert and round. It
rounds no weight.

What scales weights rounds them to the dtype of x, as decoded ones are.
"""

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
from nf4conv.inference.kernels.product.panels.decoding import (
    decode_unit,
    exchange,
    look_unit_up,
    take_scales,
)
from nf4conv.inference.kernels.product.panels.tiles import refill, say_free, wait_until_full


@triton.constexpr_function
def multiply_turns(dtype: tl.dtype, shape: Any, end: list[str]) -> str:
    """Multiplies all turns of a part; `end` stores the totals in shared memory, at `tiles`."""
    registers: list[str] = []
    before: list[str] = []
    behind: list[str] = []
    if shape.scales_sums:
        registers = _declare_sums(shape)
        before = _begin_sums(shape)
        turn = _turn_of_sums(dtype, shape)
        behind = _add_scaled(shape)
    else:
        turn = _turn_of_weights(dtype, shape)
    lines = [
        *begin(dtype, shape, registers),
        *before,
        *all_turns(shape, turn),
        wait_for_products(0),
        *behind,
        *end,
        "mov.b32 $0, tiles;",
        "}",
    ]
    return "\n".join(lines)


@triton.constexpr_function
def _declare_sums(shape: Any) -> list[str]:
    """Declares the sums of a unit, d, and the scales of a lane's two rows, u."""
    return [f".reg .f32 d<{shape.totals}>, u0, u1;", ".reg .pred none;"]


@triton.constexpr_function
def _begin_sums(shape: Any) -> list[str]:
    """Begins with a unit before the first whose sums and scales are zeros; `none` says that
    products begin new sums.
    """
    lines = ["setp.ne.b32 none, 0, 0;", "mov.f32 u0, 0f00000000;", "mov.f32 u1, 0f00000000;"]
    return [*lines, *[f"mov.f32 d{i}, 0f00000000;" for i in range(shape.totals)]]


@triton.constexpr_function
def _turn_of_sums(dtype: tl.dtype, shape: Any) -> list[str]:
    """Multiplies a turn, while what the next two need is on its way."""
    lines = begin_turn(shape)
    for half in range(2):
        if shape.sets == 1:  # the products before still read these registers
            lines += [wait_for_products(0)]
        lines += [*look_unit_up(shape, half), *wait_until_full(f"$$Lfull{half}")]
        if shape.sets == 2:
            lines += [wait_for_products(0)]
        if half == 0:
            lines += say_free(shape)
        lines += [
            *_add_scaled(shape),
            *take_scales("u", half),
            *multiply_unit(dtype, shape, half, "d", ["none", "one", "one", "one"]),
        ]
    return [*lines, *refill(shape), *exchange()]


@triton.constexpr_function
def _add_scaled(shape: Any) -> list[str]:
    """Adds the sums of the unit before, times its scales, to the totals."""
    return [f"fma.rn.f32 c{i}, d{i}, u{i // 2 % 2}, c{i};" for i in range(shape.totals)]


@triton.constexpr_function
def _turn_of_weights(dtype: tl.dtype, shape: Any) -> list[str]:
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
