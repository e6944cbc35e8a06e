"""Gradients without torch's dispatcher, here around products on a CPU."""

import weakref

import pytest
import torch
from products import packed_weight
from torch.utils.checkpoint import checkpoint

from nf4conv import dequantize_4bit
from nf4conv.codec.quant_state import Addresses, decoding_of
from nf4conv.inference import linear
from nf4conv.inference.linear import linear_4bit, multiply_with_gradients
from nf4conv.inference.linear_op import addresses_of

TENSORS = (torch.zeros(1), torch.zeros(1), None, None, None)
WEIGHT = (addresses_of(*TENSORS), TENSORS)


def multiply_by(weight: torch.Tensor):
    def multiply(x: torch.Tensor, _: Addresses, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    return multiply


def test_gradients_are_right_twice() -> None:
    torch.manual_seed(5)
    weight = torch.randn(6, 4, dtype=torch.float64)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def product(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        given = (multiply_by(weight), lambda _: weight, *WEIGHT)
        return multiply_with_gradients(x, bias, *given)

    assert torch.autograd.gradcheck(product, (x, bias))
    assert torch.autograd.gradgradcheck(product, (x, bias))


def test_gradients_are_those_of_the_operator() -> None:
    packed, state = packed_weight(24, 128)
    weight = dequantize_4bit(packed, state, dtype=torch.float32)
    x = torch.randn(3, 128, requires_grad=True)
    bias = torch.randn(24, requires_grad=True)

    def product(x: torch.Tensor) -> torch.Tensor:
        return multiply_with_gradients(x, bias, multiply_by(weight), lambda _: weight, *WEIGHT)

    expected = torch.autograd.grad(linear_4bit(x, packed, state, bias).square().sum(), (x, bias))
    found = torch.autograd.grad(product(x).square().sum(), (x, bias))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    again = checkpoint(lambda x: torch.relu(product(x)), x, use_reentrant=False)
    torch.testing.assert_close(again, torch.relu(product(x)))
    again.sum().backward()
    assert x.grad is not None


def test_tensors_live_until_the_gradients_are_computed() -> None:
    weight = torch.randn(6, 4)
    x = torch.randn(2, 4, requires_grad=True)
    kept = torch.zeros(3)
    lives = weakref.ref(kept)
    tensors = (kept, *TENSORS[1:])
    given = (multiply_by(weight), lambda _: weight, addresses_of(*tensors), tensors)
    out = multiply_with_gradients(x, None, *given)
    del kept, tensors, given
    assert lives() is not None
    out.sum().backward()
    del out
    assert lives() is None


@pytest.mark.parametrize("nested", [True, False])
def test_a_weight_that_moved_since_is_found(nested: bool) -> None:
    """As FSDP does, which frees storages after the forward pass and fills them before backward."""
    packed, state = packed_weight(24, 128, nested=nested)
    decoding = decoding_of(state)
    tensors = (packed, *decoding.tensors())
    seen: list[Addresses] = []

    def decode(addresses: Addresses) -> torch.Tensor:
        seen.append(addresses)
        return torch.zeros(24, 128)

    x = torch.randn(2, 128, requires_grad=True)
    first = decoding.addresses(packed)
    multiply = multiply_by(torch.zeros(24, 128))
    out = multiply_with_gradients(x, None, multiply, decode, first, tensors)
    storage = packed.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    others = [torch.empty(size, dtype=torch.uint8) for _ in range(64)]
    storage.resize_(size)
    moved = decoding.addresses(packed)
    assert moved != first
    out.sum().backward()
    assert seen == [moved]
    del others


@pytest.mark.parametrize("nested", [True, False])
def test_linear_4bit_says_where_the_weight_is(
    monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    """As on a GPU, with kernels that note what they are given."""
    packed, state = packed_weight(24, 128, nested=nested)
    weight = dequantize_4bit(packed, state, dtype=torch.float32)
    seen: list[Addresses] = []

    def multiply(x: torch.Tensor, given: Addresses, _: torch.Tensor | None) -> torch.Tensor:
        seen.append(given)
        return x @ weight.T

    def decode(given: Addresses) -> torch.Tensor:
        seen.append(given)
        return weight

    monkeypatch.setattr(linear._Weight, "product_for", lambda *_: multiply)
    monkeypatch.setattr(linear._Weight, "decode_to", lambda *_: decode)
    x = torch.randn(2, 128, requires_grad=True)
    linear_4bit(x, packed, state).sum().backward()
    assert seen == [decoding_of(state).addresses(packed)] * 2
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 128))
