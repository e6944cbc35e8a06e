"""x · Wᵀ with packed experts, each row of x with the experts that it chose.

few tokens    multiply_rows: a launch for all pairs of a token and an expert
more tokens   multiply_groups: pairs are grouped by expert, each expert is decoded once in a group
many tokens   decode_experts, then torch's grouped product

These run where the Triton kernels do. `projection.suits_kernels` says of which experts.
"""

from functools import cache
from typing import Final

import torch

from nf4conv.inference.experts.packed import PackedExperts
from nf4conv.inference.experts.projection import Projection, project

MOST_PAIRS = 1024
"""Pairs up to which one launch finds the groups."""

MOST_STEPS: Final = 3
"""Steps of a stage of `multiply_rows`: what fits the registers of a program, with one stack."""

_GROUP_ROWS: Final = 64
"""Rows of W that a program of `multiply_groups` computes."""

_STEP: Final = 2048  # k of a step: 8 warps with two ranges of 128
_REGISTERS: Final = 128  # of a thread: two programs on a multiprocessor


def multiply_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    projection: Projection,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiplies each row with its experts, one by one; tensors are contiguous. x begins at a
    multiple of 16 bytes, and the rows of the projection are a multiple of 8.

    x is [tokens, columns], or [tokens · k, columns]; ids are [tokens, k] int64. With weights,
    [tokens, k], the results of a token are weighted and added up. Returns [tokens · k,
    out_columns], or [tokens, out_columns] with weights.
    """
    from nf4conv.codec.kernels.tables import MULTIPLES, pair_table  # importing Triton is slow
    from nf4conv.inference.kernels.experts.rows import (  # importing Triton is slow
        launch_rows,
        shape_of,
    )
    from nf4conv.inference.kernels.product.launches import is_hopper  # importing Triton is slow

    tokens, k = ids.shape
    terms = 1 if weights is None else k
    groups = tokens * k // terms
    out = x.new_empty((groups, projection.operand.out_columns))
    if groups == 0:
        return out
    first, operand, _, is_gated, silu = projection
    programs = max(1, 2 * _processors(x.device) // groups)  # of a group: two share a multiprocessor
    own_units = -(-operand.rows // (8 * programs))
    stacks = 2 if is_gated else 1
    steps = -(-terms * (-(-first.columns // 128) * 128) // _STEP)
    stage = min(steps, MOST_STEPS // stacks)
    shape = shape_of(
        terms=terms,
        row_chunks=first.columns // 64,
        steps=stage,
        ahead=own_units > 1 or stage < steps,
        stacks=stacks,
        silu=silu,
        weighted=weights is not None,
        nested=first.nested,
        early=is_hopper(x.device),
    )
    parts = -(-operand.rows // (8 * own_units))
    factor = x if weights is None else weights
    table = pair_table(first.quant_type, x.dtype, x.device)
    norm = 1 / MULTIPLES[first.quant_type, x.dtype]
    share = tokens * k // x.shape[0]
    numbers = (share, first.experts, parts, own_units, norm)
    launch_rows(
        groups * parts,
        (x, ids, factor, out, table, operand, *numbers),
        (shape,),
        (x.dtype, factor.dtype, first.absmax.dtype),
        shape.warps,
        registers=_REGISTERS,
        begins_early=shape.early,
    )
    return out


@cache
def _processors(device: torch.device) -> int:
    """Returns the multiprocessors of a GPU."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def multiply_groups(
    x: torch.Tensor,
    pairs: torch.Tensor,
    experts: torch.Tensor,
    share: int,
    count: int,
    projection: Projection,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiplies groups of rows that chose the same expert.

    Pair p, of `count`, has row p // share of x, [.., columns], contiguous. `pairs`, [groups,
    members] int32, are those of each group, -1 for none; `experts`, [groups] int32, is -1 for a
    group that is not there. Results are multiplied with weights, [count]. Returns [count,
    out_columns]; 0 for pairs that are in no group.
    """
    from nf4conv.inference.kernels.experts.groups import launch_groups  # importing Triton is slow

    first, operand, table, is_gated, silu = projection
    out = x.new_zeros((count, operand.out_columns))
    groups, members = pairs.shape
    chunks = 1
    if first.columns % 128 == 0 and members <= 32:
        chunks = 2
    factor = x if weights is None else weights
    launch_groups(
        groups * -(-operand.rows // _GROUP_ROWS),
        (x, pairs, experts, factor, out, table, operand, share),
        (
            first.columns // 64,
            members,
            _GROUP_ROWS,
            chunks,
            is_gated,
            silu,
            weights is not None,
            first.nested,
            x.is_cuda,
        ),
        (x.dtype, factor.dtype, first.absmax.dtype),
        num_warps=4,
    )
    return out


def group_by_expert(
    ids: torch.Tensor, experts: int, members: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups pairs by their expert, without waiting for the device: returns what `multiply_groups`
    takes.

    ids are [tokens, k] int64, contiguous; a token has an expert once at most. A group has `members`
    at most, a power of two.
    """
    flat = ids.view(-1)
    if len(ids) <= members and flat.numel() <= MOST_PAIRS:  # a group for each expert
        from nf4conv.inference.kernels.experts.groups import gather_pairs  # importing Triton: slow

        return gather_pairs(flat, experts, members)
    count = flat.numel()
    device = flat.device
    flat = torch.where(flat < 0, experts, flat)
    sorted_ids, order = torch.sort(flat, stable=True)
    own = sorted_ids.clamp(max=experts - 1)
    bounds = torch.searchsorted(sorted_ids, torch.arange(experts + 1, device=device))
    filled = (bounds.diff() + (members - 1)) // members
    group_ends = filled.cumsum(0)
    groups = min(count, experts + count // members)
    number = torch.arange(groups, device=device)
    expert = torch.searchsorted(group_ends, number, right=True)
    expert = torch.where(expert < experts, expert, -1).int()
    rank = torch.arange(count, device=device) - bounds[own]
    place = (group_ends - filled)[own] * members + rank
    place = torch.where(sorted_ids < experts, place, groups * members)
    pairs = torch.full((groups * members + 1,), -1, dtype=torch.int32, device=device)
    pairs.scatter_(0, place, order.int())
    return pairs[:-1].view(groups, members), expert


def decode_experts(
    stacks: tuple[PackedExperts, ...],
    choice: torch.Tensor,
    dtype: torch.dtype,
    *,
    by_ends: bool,
    alternating: bool = False,
) -> torch.Tensor:
    """Decodes experts in one launch, without waiting for the device: [n, rows, columns].

    `stacks` is one, or gate and up, whose rows are one above the other, or come by turns if
    `alternating`. `choice`, [n] int64, names the experts; or if `by_ends`, [experts] int32, it says
    where the rows of each end, and what has no rows is not written.
    """
    from nf4conv.codec.kernels.decoding.dequantize import CONFIGURATIONS  # importing Triton: slow
    from nf4conv.codec.kernels.slots import configuration  # importing Triton is slow
    from nf4conv.inference.kernels.experts.active import launch_active  # importing Triton is slow

    first = stacks[0]
    count = len(choice)
    elements = first.rows * first.columns
    out = torch.empty(
        (count, len(stacks) * first.rows, first.columns), dtype=dtype, device=first.device
    )
    if out.numel() == 0:
        return out
    tile, warps = configuration(dtype, first.blocksize, CONFIGURATIONS)
    tiles = -(-elements // tile)
    _, operand, table, _, _ = project(first, stacks[-1])
    up_element, row_step = elements, 1
    if alternating:
        up_element, row_step = first.columns, len(stacks)
    numbers = (elements, first.columns, tiles, elements * len(stacks), up_element, row_step)
    launch_active(
        count * len(stacks) * tiles,
        (out, choice, table, operand, *numbers),
        (first.blocksize, tile, len(stacks), by_ends, first.nested, first.codes.is_cuda),
        (dtype, choice.dtype, first.absmax.dtype),
        warps,
    )
    return out
