"""Launches the kernel for few rows that runs on Hopper."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from nf4conv.codec.experts.product import Projection

MOST_STEPS: Final = 3
"""Steps of a stage at most: what fits the registers of a program, with one stack."""

EARLY=True
_STEP: Final = 2048  # k of a step: 8 warps with two ranges of 128


@dataclass(frozen=True)
class WideShape:
    """How the kernel of wide.py is launched.

    Attributes:
        own_units: units of a program.
        steps: of a stage.
        depth: stages that are loaded ahead; 0 if each program has one stage.
        registers: of a thread at most.
    """

    own_units: int
    steps: int
    depth: int
    registers: int


def multiply_wide(
    x: torch.Tensor, ids: torch.Tensor, projection: "Projection", weights: torch.Tensor | None
) -> torch.Tensor:
    """Multiply each row with its experts: `multiply_rows` on Hopper, for float16 and bfloat16."""
    from nf4conv.codec.kernels.experts.wide import launch_wide  # importing Triton takes a second
    from nf4conv.codec.kernels.product.launches import SHAPES  # importing Triton takes a second
    from nf4conv.codec.kernels.tables import MULTIPLES, pair_table  # importing Triton is slow

    tokens, k = ids.shape
    terms = 1 if weights is None else k
    groups = tokens * k // terms
    first = projection.stack
    out = x.new_empty((groups, projection.out_columns))
    gated = projection.up is not None
    shape = SHAPES[0] if first.nested else SHAPES[0].plain
    wide = wide_shape(projection, groups, terms)
    parts = -(-projection.rows // (8 * wide.own_units))
    factor = x if weights is None else weights
    launch_wide(
        groups * parts,
        (
            x, ids, factor, out, pair_table(first.quant_type, x.dtype, x.device),
            *projection.pointers[1:],
            tokens * k // x.shape[0], first.experts, *projection.sizes,
            parts, wide.own_units, 1 / MULTIPLES[first.quant_type, x.dtype],
        ),
        (
            terms, first.columns // 64, wide.steps, wide.depth, EARLY and not gated, gated,
            projection.silu, weights is not None, first.nested, shape,
        ),
        (x.dtype, factor.dtype, first.absmax.dtype, wide.registers),
        shape.warps,
        registers=wide.registers,
        begins_early=True,
    )  # fmt: skip
    return out


def wide_shape(projection: "Projection", groups: int, terms: int) -> WideShape:
    """Choose how rows are multiplied on Hopper: the fastest of the sweep in docs/kernels.md."""
    gated = projection.up is not None
    units = projection.rows // 8
    programs = max(1, 2 * _processors(projection.stack.device) // groups)  # of a group
    own_units = -(-units // programs)
    steps = -(-terms * (-(-projection.stack.columns // 128) * 128) // _STEP)
    most = 1 if gated else MOST_STEPS
    if own_units == 1 and steps <= most:
        return WideShape(own_units, steps, 0, 96 if gated else 80)
    return WideShape(own_units, min(steps, most), 1, 128)


@cache
def _processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
