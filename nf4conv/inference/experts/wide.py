"""Launches the kernel for few rows that runs on Hopper."""

from functools import cache
from typing import Final

import torch

from nf4conv.inference.experts.projection import Projection

MOST_STEPS: Final = 3
"""Steps of a stage at most: what fits the registers of a program, with one stack."""

_STEP: Final = 2048  # k of a step: 8 warps with two ranges of 128
_REGISTERS: Final = 128  # of a thread: two programs on a multiprocessor


def suits_wide(x: torch.Tensor, projection: Projection) -> bool:
    """Returns True if the kernel for Hopper can multiply with a projection."""
    if x.dtype not in (torch.bfloat16, torch.float16) or not _is_measured(x.device):
        return False
    return projection.rows % 8 == 0 and x.data_ptr() % 16 == 0


def multiply_wide(
    x: torch.Tensor, ids: torch.Tensor, projection: Projection, weights: torch.Tensor | None
) -> torch.Tensor:
    """Multiplies each row with its experts: `multiply_rows` on Hopper, for float16 and bfloat16."""
    from nf4conv.codec.kernels.tables import MULTIPLES, pair_table  # importing Triton is slow
    from nf4conv.inference.kernels.experts.wide import (  # importing Triton is slow
        launch_wide,
        shape_of,
    )

    tokens, k = ids.shape
    terms = 1 if weights is None else k
    groups = tokens * k // terms
    first = projection.stack
    out = x.new_empty((groups, projection.out_columns))
    own_units = _own_units(projection, groups)
    stacks = 1 if projection.up is None else 2
    steps = -(-terms * (-(-first.columns // 128) * 128) // _STEP)
    stage = min(steps, MOST_STEPS // stacks)
    ahead = own_units > 1 or stage < steps
    shape = shape_of(
        terms, first.columns // 64, stage, ahead, stacks,
        projection.silu, weights is not None, first.nested,
    )  # fmt: skip
    parts = -(-projection.rows // (8 * own_units))
    factor = x if weights is None else weights
    table = pair_table(first.quant_type, x.dtype, x.device)
    share = tokens * k // x.shape[0]
    arguments = (
        x, ids, factor, out, table, *projection.pointers[1:],
        share, first.experts, *projection.sizes,
        parts, own_units, 1 / MULTIPLES[first.quant_type, x.dtype],
    )  # fmt: skip
    launch_wide(
        groups * parts,
        arguments,
        (shape,),
        (x.dtype, factor.dtype, first.absmax.dtype),
        shape.warps,
        registers=_REGISTERS,
        begins_early=True,
    )
    return out


def _own_units(projection: Projection, groups: int) -> int:
    """Returns the units of a program, if two of them share a multiprocessor."""
    programs = max(1, 2 * _processors(projection.stack.device) // groups)  # of a group
    return -(-projection.rows // (8 * programs))


@cache
def _is_measured(device: torch.device) -> bool:
    """Returns True for a GPU on which the kernel was measured."""
    from nf4conv.inference.kernels.product.launches import is_hopper  # importing Triton is slow

    return device.type == "cuda" and is_hopper(device)


@cache
def _processors(device: torch.device) -> int:
    """Returns the multiprocessors of a GPU."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
