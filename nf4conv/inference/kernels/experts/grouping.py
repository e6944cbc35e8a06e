"""Gathers for each expert the pairs of a token and an expert that are its own, in one launch."""

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.launch import Launcher, kernel


def gather_pairs(
    ids: torch.Tensor, experts: int, members: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes a group of the pairs of each expert.

    Args:
        ids: [pairs] int64, the expert of each pair; no expert has more than `members`.
        experts: how many there are.
        members: of a group, a power of two.

    Returns:
        pairs: [experts, members] int32; -1 for none.
        experts: [experts] int32, of each group; -1 if it has no pair.
    """
    pairs = torch.empty((experts, members), dtype=torch.int32, device=ids.device)
    expert = torch.empty(experts, dtype=torch.int32, device=ids.device)
    count = max(32, triton.next_power_of_2(ids.numel()))
    _launch(experts, (ids, pairs, expert, ids.numel()), (count, members), (), 1)
    return pairs, expert


@kernel
def gathering_kernel(
    ids_ptr,
    pairs_ptr,
    expert_ptr,
    count: tl.int32,
    COUNT: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Gathers the pairs of the expert whose number is the program's."""
    expert = tl.program_id(0)
    pair = tl.arange(0, COUNT)
    chosen = tl.load(ids_ptr + pair, mask=pair < count, other=-1)
    own = chosen == expert
    ones = own.to(tl.int32)
    total = tl.sum(ones, axis=0)
    tl.store(expert_ptr + expert, tl.where(total > 0, expert, -1))
    place = tl.cumsum(ones, axis=0) - 1
    pairs_ptr += expert * MEMBERS
    tl.store(pairs_ptr + place, pair, mask=own & (place < MEMBERS))
    member = tl.arange(0, MEMBERS)
    none = tl.full((MEMBERS,), -1, tl.int32)
    tl.store(pairs_ptr + member, none, mask=member >= total)


_launch = Launcher(gathering_kernel)
