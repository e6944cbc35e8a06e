"""linear_training: gradients without torch's dispatcher, here around products on a CPU."""

import weakref

import torch
from products import packed_weight
from torch.utils.checkpoint import checkpoint

from nf4conv import dequantize_4bit
from nf4conv.codec.linear import linear_4bit
from nf4conv.codec.linear_training import multiply_with_gradients
from nf4conv.codec.quant_state import Addresses

ADDRESSES = (0, 0, 0, 0, 0)


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
        given = (multiply_by(weight), lambda _: weight, ADDRESSES, ())
        return multiply_with_gradients(x, bias, *given)

    assert torch.autograd.gradcheck(product, (x, bias))
    assert torch.autograd.gradgradcheck(product, (x, bias))


def test_gradients_are_those_of_the_operator() -> None:
    packed, state = packed_weight(24, 128)
    weight = dequantize_4bit(packed, state, dtype=torch.float32)
    x = torch.randn(3, 128, requires_grad=True)
    bias = torch.randn(24, requires_grad=True)

    def product(x: torch.Tensor) -> torch.Tensor:
        return multiply_with_gradients(
            x, bias, multiply_by(weight), lambda _: weight, ADDRESSES, ()
        )

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
    out = multiply_with_gradients(
        x, None, multiply_by(weight), lambda _: weight, ADDRESSES, (kept, None)
    )
    del kept
    assert lives() is not None
    out.sum().backward()
    del out
    assert lives() is None
