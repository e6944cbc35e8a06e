"""Experts in host memory with a cache of some: the same results, and the least recently used one
makes room.
"""

from types import SimpleNamespace

import pytest
import torch
from test_experts_kernels import EXPERTS, HIDDEN, INNER, kernels_everywhere, packed

from nf4conv.codec.ops import quantize_4bit
from nf4conv.errors import CodecError
from nf4conv.inference.experts import decode, product, split_stack
from nf4conv.inference.experts.offloaded import OffloadedLayer, expert_bytes
from nf4conv.inference.experts.projection import Projection, project
from nf4conv.inference.moe.forward import Projections
from nf4conv.inference.moe.offload import _Computation

assert kernels_everywhere  # a fixture: the kernels run in the interpreter


def make_stacks() -> list:
    return [packed(INNER, HIDDEN), packed(INNER, HIDDEN, quant_type="nf4"), packed(HIDDEN, INNER)]


def layer(slots: int) -> tuple[OffloadedLayer, list]:
    stacks = make_stacks()
    return OffloadedLayer(stacks, slots, torch.device("cpu")), stacks


def test_the_cache_holds_what_was_used_last():
    cache, stacks = layer(2)
    assert cache.fetch([0, 1]).tolist() == [0, 1, -1]
    assert cache.fetch([0]).tolist() == [0, -1, -1]
    assert cache.fetch([0, 2]).tolist() == [0, -1, 1]  # in the place of 1
    assert (cache.hits, cache.misses) == (2, 3)
    slots = torch.tensor([1, 0])
    experts = torch.tensor([2, 0])
    for stack, own, host in zip(stacks, cache.cached, cache.host, strict=True):
        expected = decode(stack, experts, torch.float32)
        assert torch.equal(decode_strided(own, slots), expected)
        assert torch.equal(decode_strided(host, experts), expected)


def decode_strided(stack, ids):
    """Decodes experts that lie in pieces."""
    whole = {"nested_quant_map": stack.nested_quant_map}
    for name, tensor in stack.tensors().items():
        if name != "nested_quant_map":
            whole[name] = tensor.contiguous().view(-1)
    for name in ("codes", "absmax"):
        whole[name] = whole[name].view(stack.experts, -1)
    return decode(stack.with_tensors(whole), ids, torch.float32)


def test_computes_in_rounds_what_all_experts_at_once_compute():
    stacks = make_stacks()
    module = SimpleNamespace(has_bias=False, has_gate=True)
    x = torch.randn(2, HIDDEN)
    ids = torch.tensor([[0, 2], [1, 2]])
    weights = torch.rand(2, 2)
    there = Projection(stacks[0], stacks[1], INNER, silu=True)
    expected = product.multiply_rows(
        product.multiply_rows(x, ids, there), ids, project(stacks[2]), weights
    )
    for slots in (1, 2):
        cache = OffloadedLayer(stacks, slots, torch.device("cpu"))
        projections = Projections(
            Projection(cache.cached[0], cache.cached[1], INNER, silu=True), project(cache.cached[2])
        )
        compute = _Computation(cache, projections, torch.device("cpu"))
        for _ in range(2):
            found = compute(module, x, ids, weights)
            # experts come in rounds, so their sum has another order
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert cache.hits + cache.misses == 2 * EXPERTS


def test_a_stack_that_was_packed_as_one_is_refused():
    stack = split_stack(*quantize_4bit(torch.randn(EXPERTS, INNER, HIDDEN)))
    with pytest.raises(CodecError, match="--moe packed"):
        expert_bytes(stack)
