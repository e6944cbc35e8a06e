"""The product with gradients, where torch.compile does not look on.

What traces needs the operator `linear_4bit_train`. But its way through torch's dispatcher takes the
host six times as long as this plain autograd function around prepared kernels.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from nf4conv.codec.quant_state import Addresses

if TYPE_CHECKING:  # importing Triton takes a second
    from nf4conv.codec.kernels.product.choosing import Decode, Multiply


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
        addresses: of the weight.
        tensors: what is at these addresses; kept until the gradients are computed.
    """
    apply: Any = _Product.apply  # which has no types
    result: torch.Tensor = apply(x, bias, multiply, decode, addresses, tensors)
    return result


class _Product(torch.autograd.Function):
    """Multiplies, and decodes the weight again for the gradient of x.

    The weight's tensors are no saved tensors of autograd: hooks, such as those of checkpointing,
    would cost five calls in Python for each layer, and have nothing to recompute.
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
        ctx.addresses = addresses
        ctx.tensors = tensors
        return multiply(x, addresses, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x = None
        grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ ctx.decode(ctx.addresses)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=ctx.bias_dtype)
        return grad_x, grad_bias, None, None, None, None
