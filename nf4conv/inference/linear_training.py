"""Multiplies with gradients where torch.compile does not look on.

A graph needs the operator `linear_4bit_train`. Without a graph this autograd function calls
prepared kernels itself: torch's dispatcher would take the host six times as long.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from nf4conv.codec.quant_state import Addresses
from nf4conv.inference.linear_op import addresses_of, gradient_of_bias

if TYPE_CHECKING:  # importing Triton takes a second
    from nf4conv.inference.kernels.product.choosing import Decode, Multiply


def multiply_with_gradients(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    multiply: "Multiply",
    decode: "Decode",
    addresses: Addresses,
    tensors: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Computes x · Wᵀ + bias, with gradients of x and bias.

    Args:
        x: [..., K], checked.
        bias: [N], checked, or None.
        multiply: computes the result.
        decode: decodes W in the dtype of x, for the gradient.
        addresses: where the weight is now.
        tensors: packed codes and `Decoding.tensors`; the graph of the gradients keeps them.
    """
    apply: Any = _Product.apply  # which has no types
    result: torch.Tensor = apply(x, bias, multiply, decode, addresses, tensors)
    return result


class _Product(torch.autograd.Function):
    """Multiplies, and decodes the weight again for the gradient of x.

    The context keeps the weight's tensors itself. If autograd saved them, it would call the hooks
    of checkpointing for each: five calls in Python for a layer, which recompute nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        multiply: "Multiply",
        decode: "Decode",
        addresses: Addresses,
        tensors: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.decode = decode
        ctx.tensors = tensors
        return multiply(x, addresses, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x = None
        grad_bias = None
        if ctx.needs_input_grad[0]:
            # asked for again: FSDP frees a weight after the forward pass, and gathers it elsewhere
            grad_x = grad @ ctx.decode(addresses_of(*ctx.tensors))
        if ctx.needs_input_grad[1]:
            grad_bias = gradient_of_bias(grad, ctx.bias_dtype)
        return grad_x, grad_bias, None, None, None, None
