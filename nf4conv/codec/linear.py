"""x · Wᵀ with a packed weight: which way is taken for how many rows, and what torch must know to
compile and train.

16-bit x of up to 64 rows  one fused kernel (kernels/product/): decodes in registers
anything else on a GPU     decode, then the library's product, as bitsandbytes does
no kernels here            the weight as float32, a float32 product, one rounding: the definition
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from nf4conv.codec.backends import has_kernels
from nf4conv.codec.ops import check_decodable, dequantize_op
from nf4conv.codec.quant_state import DTYPE_NAMES, NestedState, QuantState, code_table, decoding_of
from nf4conv.errors import CodecError


def linear_4bit(
    x: torch.Tensor, packed: torch.Tensor, quant_state: QuantState, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The product x · Wᵀ + bias with a packed weight W, [N, K]; sums are float32. Works under
    `torch.compile`.

    Differentiable with respect to x and bias.

    Args:
        x: [..., K] float16, bfloat16 or float32; the result, [..., N], is of its dtype.
        packed: the packed codes, contiguous: uint8, or another dtype that the same bytes are viewed
            as.
        quant_state: from `quantize_4bit`, or bitsandbytes' own; what dtype it names does not
            matter.
        bias: [N], of any float type.

    Raises:
        CodecError: shapes, dtypes or devices that do not belong together.
    """
    trains = torch.is_grad_enabled() and (
        x.requires_grad or (bias is not None and bias.requires_grad)
    )
    if trains or torch.compiler.is_compiling() or type(x) is not torch.Tensor:
        format = quant_state.shape[0], quant_state.quant_type, quant_state.blocksize
        result: torch.Tensor = _linear_op(
            x, bias, packed, *decoding_of(quant_state).tensors(), *format
        )
        return result
    weight = _weights.get(id(quant_state))
    if weight is None or not weight.is_of(packed, quant_state):
        weight = _weights[id(quant_state)] = _Weight(packed, quant_state)
    return weight.multiply(x, bias)  # torch's dispatcher takes longer than the launch


def patch_linear_4bit(model: torch.nn.Module) -> int:
    """Give every `bitsandbytes.nn.Linear4bit` of a model a forward that calls `linear_4bit`; return
    how many.
    """
    found = [
        one
        for one in model.modules()
        if any(kind.__name__ == "Linear4bit" for kind in type(one).__mro__)
    ]
    for module in found:
        module.forward = partial(_forward, module)
    return len(found)


def _forward(module: Any, x: torch.Tensor) -> Any:
    state = getattr(module.weight, "quant_state", None)
    if state is None:  # not packed yet
        return type(module).forward(module, x)
    return linear_4bit(x.to(module.compute_dtype or x.dtype), module.weight, state, module.bias).to(
        x.dtype
    )


class _Weight:
    """A weight that was found right and what is prepared to multiply with it: made once, forgotten
    with its state.
    """

    def __init__(self, packed: torch.Tensor, state: QuantState) -> None:
        if len(state.shape) != 2:
            raise CodecError(f"the weight has the shape {list(state.shape)}, expected [N, K]")
        check_decodable(packed, state, state.shape[0] * state.shape[1])
        (self.n, self.k), self.device, self.shifted = (
            state.shape,
            packed.device,
            packed.data_ptr() % 16,
        )
        self.packed = packed.data.view(
            torch.uint8
        )  # bitsandbytes' own parameter would keep its state alive
        self.decoding, self.addresses = (
            decoding_of(state),
            (packed.data_ptr(), state.absmax.data_ptr()),
        )
        self.runs: dict[tuple[torch.Size, torch.dtype, torch.device], Any] = {}
        key = id(state)
        self.state = weakref.ref(state, lambda _: _weights.pop(key, None))

    def is_of(self, packed: torch.Tensor, state: QuantState) -> bool:
        same = self.decoding.absmax is state.absmax and self.decoding.state2 is state.state2
        return (
            same
            and self.state() is state
            and (packed.data_ptr(), state.absmax.data_ptr()) == self.addresses
        )

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `linear_4bit`."""
        key = x.shape, x.dtype, x.device
        run = self.runs.get(key)
        if run is None:
            run = self.runs[key] = self._prepare(x)
        if bias is not None and (bias.shape != (self.n,) or bias.device != self.device):
            raise CodecError(
                f"bias: {list(bias.shape)} on {bias.device}; expected [{self.n}] on {self.device}"
            )
        if run is False:
            return self._multiply_decoded(x, bias)
        out: torch.Tensor = run(x)
        return out if bias is None else out.add_(bias)

    def _prepare(self, x: torch.Tensor) -> Any:
        """What multiplies all that look like x, or False if no fused kernel does."""
        if x.shape[-1:] != (self.k,) or x.dtype not in DTYPE_NAMES or x.device != self.device:
            expected = f"expected float32, float16 or bfloat16 of the shape [..., {self.k}] on {self.device}"
            raise CodecError(
                f"x is {x.dtype} of the shape {list(x.shape)} on {x.device}; {expected}"
            )
        n, k = self.n, self.k
        if (
            not has_kernels(x.device)
            or x.dtype == torch.float32
            or self.decoding.blocksize < 64
            or k % 64
            or not n
        ):
            return False
        from nf4conv.codec.kernels.product import launches  # importing Triton takes a second

        fits = (
            0 < x.numel() <= launches.SHAPES[-1].rows * k
            and n * k < launches.MOST_ELEMENTS
            and not self.shifted
        )
        if not fits or torch.cuda.get_device_capability(self.device)[0] != launches.CAPABILITY:
            return False
        return launches.prepare_product(x, n, self.packed, self.decoding)

    def _multiply_decoded(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Decode, then torch's product; in float32 where there are no kernels, which is the
        definition.
        """
        dtype = x.dtype if has_kernels(self.device) else torch.float32
        weight = torch.empty((self.n, self.k), dtype=dtype, device=self.device)
        dequantize_op(
            self.packed,
            *self.decoding.tensors(),
            weight,
            self.decoding.quant_type,
            self.decoding.blocksize,
        )
        return functional.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype)).to(
            x.dtype
        )


_weights: dict[int, _Weight] = {}  # by id of the state


# fmt: off
@torch.library.custom_op("nf4conv::linear_4bit", mutates_args=())
def _linear_op(
    x: torch.Tensor, bias: torch.Tensor | None, packed: torch.Tensor, absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None, nested_code: torch.Tensor | None, offset: torch.Tensor | None,
    n: int, quant_type: str, blocksize: int,
) -> torch.Tensor:
    # fmt: on
    """`linear_4bit` as torch.compile and autograd see it: opaque."""
    state2 = None if nested_absmax is None or nested_code is None else NestedState(nested_absmax, nested_code)
    shape, code = torch.Size((n, x.shape[-1])), code_table(quant_type, x.device)
    state = QuantState(absmax, shape, x.dtype, blocksize, quant_type, code, offset, state2)
    return _Weight(packed, state).multiply(x, bias)


@_linear_op.register_fake
def _(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], others[6]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 (torch names it)
    x, bias, *tensors, n, quant_type, blocksize = inputs
    ctx.save_for_backward(*tensors)
    ctx.kept = (n, x.shape[-1]), x.dtype, None if bias is None else bias.dtype, quant_type, blocksize


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (n, k), dtype, bias_dtype, *format = ctx.kept
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        weight = grad.new_empty((n, k), dtype=dtype)
        dequantize_op(*ctx.saved_tensors, weight, *format)
        grad_x = grad @ weight
    if ctx.needs_input_grad[1]:
        grad_bias = grad.reshape(-1, n).sum(0, dtype=bias_dtype)
    return grad_x, grad_bias, *[None] * 8


_linear_op.register_autograd(_backward, setup_context=_keep)
