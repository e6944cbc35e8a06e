"""Products with packed weights as operators of torch: what torch.compile and autograd see.

They take tensors and numbers, keep nothing between calls and check nothing: `linear_4bit` has
checked, once for each graph. All that they allocate is the caller's: results, and memory that is
free again when they return.

    nf4conv::linear_4bit         for graphs without gradients
    nf4conv::linear_4bit_train   one, with gradients of x and bias
    nf4conv::decode_4bit         the decoded weight
"""

from typing import Any, Final

import torch
from torch.nn import functional

from nf4conv.codec.backends import backend, has_kernels
from nf4conv.codec.quant_state import Addresses, Decoding, Form

_ARGUMENTS: Final = (
    "Tensor packed, Tensor absmax, Tensor? nested_absmax, Tensor? nested_code, Tensor? offset, "
    "int n, str quant_type, int blocksize"
)


def multiply_packed(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_code: torch.Tensor | None,
    offset: torch.Tensor | None,
    n: int,
    quant_type: str,
    blocksize: int,
) -> torch.Tensor:
    """Computes x · Wᵀ + bias with an [n, K] weight: packed codes of any dtype, then
    `Decoding.tensors`.
    """
    if not has_kernels(x.device):
        k = x.shape[-1]
        tensors = (packed, absmax, nested_absmax, nested_code, offset)
        weight = _decode(*tensors, n, k, torch.float32, quant_type, blocksize)
        if bias is not None:
            bias = bias.float()
        return _in_float32(x, weight, bias).to(x.dtype)
    from nf4conv.inference.kernels.product import choosing  # importing Triton takes a second

    addresses = addresses_of(packed, absmax, nested_absmax, nested_code, offset)
    form = Form(quant_type, blocksize, nested_absmax is not None)
    matrix = choosing.Matrix(n, x.shape[-1], form, choosing.alignment_of(addresses[0]))
    return choosing.prepare_multiply(x.shape, x.dtype, x.device, matrix)(x, addresses, bias)


def _in_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns x · Wᵀ + bias in float32, where autocast would compute in less."""
    with torch.autocast(x.device.type, enabled=False):
        return functional.linear(x.float(), weight, bias)


def addresses_of(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_code: torch.Tensor | None,
    offset: torch.Tensor | None,
) -> Addresses:
    """Returns what a kernel is told of a weight."""
    first = absmax.data_ptr()
    if nested_absmax is None or nested_code is None or offset is None:
        return packed.data_ptr(), first, first, first, first
    code, nested = nested_code.data_ptr(), nested_absmax.data_ptr()
    return packed.data_ptr(), first, code, nested, offset.data_ptr()


def _decode(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_code: torch.Tensor | None,
    offset: torch.Tensor | None,
    n: int,
    k: int,
    dtype: torch.dtype,
    quant_type: str,
    blocksize: int,
) -> torch.Tensor:
    """Returns the decoded weight, [n, k]."""
    decoding = Decoding(absmax, quant_type, blocksize, nested_absmax, nested_code, offset)
    out = torch.empty((n, k), dtype=dtype, device=packed.device)
    codes = packed.contiguous().view(-1).view(torch.uint8)
    backend(out.device).dequantize_blocks(codes, decoding, out.view(-1))
    return out


def _like_result(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Returns a tensor of the result's shape and dtype, for tracing."""
    n: int = arguments[6]
    return x.new_empty((*x.shape[:-1], n))


def _like_weight(packed: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Returns a tensor of the decoded weight's shape and dtype, for tracing."""
    n, k, dtype = arguments[4:7]
    return packed.new_empty((n, k), dtype=dtype)


def _define(name: str, schema: str, compute: Any, trace: Any) -> Any:
    """Makes an operator, and returns it."""
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    torch.library.define(f"nf4conv::{name}", schema, tags=tags)
    torch.library.impl(f"nf4conv::{name}", "default", compute)
    torch.library.register_fake(f"nf4conv::{name}", trace)
    return getattr(torch.ops.nf4conv, name).default


linear_op = _define(
    "linear_4bit",
    f"(Tensor x, Tensor? bias, {_ARGUMENTS}) -> Tensor",
    multiply_packed,
    _like_result,
)
train_op = _define(
    "linear_4bit_train",
    f"(Tensor x, Tensor? bias, {_ARGUMENTS}) -> Tensor",
    multiply_packed,
    _like_result,
)
decode_op = _define(
    "decode_4bit",
    "(Tensor packed, Tensor absmax, Tensor? nested_absmax, Tensor? nested_code, Tensor? offset, "
    "int n, int k, ScalarType dtype, str quant_type, int blocksize) -> Tensor",
    _decode,
    _like_weight,
)


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: torch.Tensor,  # noqa: ARG001 (torch passes it by name)
) -> None:
    """Keeps what `_backward` needs of the arguments of `train_op`."""
    x, bias, packed, absmax, nested_absmax, nested_code, offset, n, quant_type, blocksize = inputs
    ctx.save_for_backward(packed, absmax, nested_absmax, nested_code, offset)
    ctx.weight_shape = (n, x.shape[-1])
    ctx.x_dtype = x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.quant_type = quant_type
    ctx.blocksize = blocksize


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients of the arguments of `train_op`: those of x and bias, then Nones."""
    grad_x = None
    grad_bias = None
    if ctx.needs_input_grad[0]:
        weight = decode_op(
            *ctx.saved_tensors, *ctx.weight_shape, ctx.x_dtype, ctx.quant_type, ctx.blocksize
        )
        grad_x = grad @ weight
    if ctx.needs_input_grad[1]:
        grad_bias = gradient_of_bias(grad, ctx.bias_dtype)
    return grad_x, grad_bias, None, None, None, None, None, None, None, None


def gradient_of_bias(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the gradient of a bias, given that of the result, [..., N]."""
    rows = grad.unsqueeze(0).flatten(0, -2)  # reshape(-1, N) fails if N is 0
    return rows.sum(0, dtype=dtype)


torch.library.register_autograd(
    "nf4conv::linear_4bit_train", _backward, setup_context=_setup_context
)
