"""The kernels for packed experts, in Triton's interpreter: what they multiply and decode is what
decoded experts give.
"""

import pytest
import torch
from test_experts import as_a_stack, one_by_one

from nf4conv.inference.experts import product, projection
from nf4conv.inference.experts.packed import PackedExperts, decode
from nf4conv.inference.experts.projection import project

EXPERTS = 3
TOP_K = 2
HIDDEN = 128
INNER = 64


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    """The kernels run without a GPU."""
    monkeypatch.setattr(projection, "has_kernels", lambda _: True)


def packed(rows: int, columns: int, layout=one_by_one, nested=True, quant_type="nf4"):
    torch.manual_seed(rows + columns)
    return layout(torch.randn(EXPERTS, rows, columns) * 0.1, quant_type, nested, "absmax")[0]


def matrices(stack: PackedExperts) -> torch.Tensor:
    return decode(stack, torch.arange(EXPERTS), torch.float32)


def products(x: torch.Tensor, ids: torch.Tensor, stack: PackedExperts) -> torch.Tensor:
    """Multiplies one row of x for each pair."""
    return torch.einsum("pk,pnk->pn", x.float(), matrices(stack)[ids.view(-1)])


def multiply(x, ids, there, weights=None):
    """Multiplies each row with its experts, in groups."""
    pairs, experts = product.group_by_expert(ids, EXPERTS, 16)
    share = ids.numel() // x.shape[0]
    factors = None if weights is None else weights.view(-1)
    return product.multiply_groups(x, pairs, experts, share, ids.numel(), there, factors)


@pytest.mark.parametrize("layout", [one_by_one, as_a_stack])
def test_a_layer_of_experts(layout):
    gate, up, down = (
        packed(*shape, layout) for shape in ((INNER, HIDDEN),) * 2 + ((HIDDEN, INNER),)
    )
    assert projection.suits_kernels(gate)
    assert projection.suits_together(gate, up)
    x = torch.randn(2, HIDDEN)
    ids = torch.tensor([[0, 2], [2, 1]])
    weights = torch.rand(2, TOP_K)
    spread = x.repeat_interleave(TOP_K, 0)
    hidden = torch.nn.functional.silu(products(spread, ids, gate)) * products(spread, ids, up)
    weighted = products(hidden, ids, down).view(2, TOP_K, HIDDEN) * weights[:, :, None]
    there = project(gate, up, silu=True)
    found = multiply(x, ids, there)
    out = multiply(found, ids, project(down), weights).view(2, TOP_K, HIDDEN).sum(1)
    # sums of float32 in another order, and values far from 0 that cancel
    torch.testing.assert_close(found, hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out, weighted.sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("nested", "quant_type"), [(False, "fp4"), (True, "nf4")])
def test_gate_and_up_by_turns_and_an_expert_that_is_not_there(nested, quant_type):
    both = packed(INNER, HIDDEN, nested=nested, quant_type=quant_type)
    x = torch.randn(2, HIDDEN).half()
    ids = torch.tensor([[1], [EXPERTS]])
    half = INNER // 2
    turns = project(
        both, both, rows=half, up_first_row=1, row_step=2, up_column=half, column_step=1
    )
    found = multiply(x, ids, turns).float()
    expected = products(x, ids.clamp(max=1), both)
    # float16 rounds the result to 11 bits
    torch.testing.assert_close(
        found[0], torch.cat([expected[0, 0::2], expected[0, 1::2]]), rtol=2e-3, atol=2e-3
    )
    assert (found[1] == 0).all()
    apart = project(both, both, rows=half, up_first_row=half, up_column=1, column_step=2)
    found = multiply(x, ids, apart).float()
    in_turns = torch.stack([expected[0, :half], expected[0, half:]], 1).flatten()
    torch.testing.assert_close(found[0], in_turns, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("tokens", [5, 40])
def test_groups_hold_every_pair_once(tokens):
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])
    pairs, experts = product.group_by_expert(ids, EXPERTS, 16)
    flat = ids.view(-1)
    seen = []
    for expert, members in zip(experts.tolist(), pairs.tolist(), strict=True):
        own = [pair for pair in members if pair >= 0]
        assert all(int(flat[pair]) == expert for pair in own)
        assert bool(own) == (expert >= 0)
        seen += own
    assert sorted(seen) == list(range(flat.numel()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decodes_into_the_layout_of_a_grouped_product(dtype):
    gate, up = packed(16, HIDDEN), packed(16, HIDDEN)
    ids = torch.tensor([2, 0])
    plain = [decode(stack, ids, dtype) for stack in (gate, up)]
    found = product.decode_experts((gate, up), ids, dtype, by_ends=False)
    assert torch.equal(found, torch.cat(plain, 1))
    found = product.decode_experts((gate, up), ids, dtype, by_ends=False, alternating=True)
    assert torch.equal(found, torch.stack(plain, 2).flatten(1, 2))
    ends = torch.tensor([3, 3, 5], dtype=torch.int32)  # expert 1 has no rows
    found = product.decode_experts((gate,), ends, dtype, by_ends=True)
    used = torch.tensor([0, 2])
    assert torch.equal(found[used], decode(gate, used, dtype))
