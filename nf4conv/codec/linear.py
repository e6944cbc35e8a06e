"""x · Wᵀ with a packed weight: which way is taken for how many rows, and what torch must know to
compile and train.

16-bit x of up to 64 rows  one fused kernel (kernels/product/): decodes in registers
anything else on a GPU     decode, then the library's product, as bitsandbytes does
no kernels here            the weight as float32, a float32 product, one rounding: the definition
"""

import weakref
from collections.abc import Callable
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
    """Multiply x with a packed weight: x · Wᵀ + bias, with float32 sums.

    On GPUs of compute capability 9 (Hopper) one fused kernel decodes the weight while it
    multiplies, for float16 and bfloat16 x of up to 64 rows. Otherwise the weight is decoded first.
    Works under `torch.compile`, and is differentiable with respect to x and bias.

    Args:
        x: [..., K] float16, bfloat16 or float32.
        packed: the packed codes of W, [N, K]: uint8, or another dtype that the same bytes are
            viewed as; contiguous.
        quant_state: what decodes them: from `quantize_4bit`, or bitsandbytes' own. Its dtype, the
            weight's before it was packed, does not matter here.
        bias: [N], of any float dtype; none by default.

    Returns:
        [..., N], of the dtype of x.

    Raises:
        CodecError: the weight is no matrix; or shapes, dtypes or devices do not belong together.

    Example:
        packed, state = nf4conv.quantize_4bit(layer.weight)  # [N, K]
        y = nf4conv.linear_4bit(x, packed, state, layer.bias)  # [..., K] → [..., N]
    """
    trains = torch.is_grad_enabled() and (
        x.requires_grad or (bias is not None and bias.requires_grad)
    )
    if trains or torch.compiler.is_compiling() or type(x) is not torch.Tensor:
        result: torch.Tensor = _linear_op(
            x,
            bias,
            packed,
            *decoding_of(quant_state).tensors(),
            quant_state.shape[0],
            quant_state.quant_type,
            quant_state.blocksize,
        )
        return result
    # torch's dispatcher, which the operator above goes through, takes longer than the launch
    weight = _weights.get(id(quant_state))
    if weight is None or not weight.is_of(packed, quant_state):
        weight = _Weight(packed, quant_state)
        _weights[id(quant_state)] = weight
    return weight.multiply(x, bias)


def patch_linear_4bit(model: torch.nn.Module) -> int:
    """Make the 4-bit layers of a model multiply with `linear_4bit`.

    Every `bitsandbytes.nn.Linear4bit` of the model, and every layer of a class derived from it,
    gets a new `forward`. Nothing else of the model changes; layers whose weights are not packed yet
    keep bitsandbytes' product until they are.

    Args:
        model: changed in place, such as a transformers model that was loaded with a
            BitsAndBytesConfig or from what `nf4conv quantize` wrote.

    Returns:
        The number of layers that were patched; 0 if the model has none.

    Example:
        model = AutoModelForCausalLM.from_pretrained("model-nf4", device_map="cuda")
        nf4conv.patch_linear_4bit(model)
    """
    patched = 0
    for module in model.modules():
        if _is_linear_4bit(module):
            module.forward = partial(_forward, module)
            patched += 1
    return patched


def _is_linear_4bit(module: torch.nn.Module) -> bool:
    """Return True for a Linear4bit, known by its name: bitsandbytes need not be installed."""
    return any(kind.__name__ == "Linear4bit" for kind in type(module).__mro__)


def _forward(module: Any, x: torch.Tensor) -> Any:
    """Compute what a patched Linear4bit returns for x."""
    state = getattr(module.weight, "quant_state", None)
    if state is None:  # not packed yet
        return type(module).forward(module, x)
    compute_dtype = module.compute_dtype or x.dtype
    result = linear_4bit(x.to(compute_dtype), module.weight, state, module.bias)
    return result.to(x.dtype)


_Product = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies x, of one shape, dtype and device, with a weight."""


class _Weight:
    """A weight that was checked, and what is prepared to multiply with it: made once, forgotten
    with its state.
    """

    def __init__(self, packed: torch.Tensor, state: QuantState) -> None:
        if len(state.shape) != 2:
            raise CodecError(f"the weight has the shape {list(state.shape)}, expected [N, K]")
        check_decodable(packed, state, state.shape[0] * state.shape[1])
        self.n, self.k = state.shape
        self.device = packed.device
        # without .data, bitsandbytes' own parameter would keep its state alive
        self.packed = packed.data.view(torch.uint8)
        self.decoding = decoding_of(state)
        self.addresses = (packed.data_ptr(), state.absmax.data_ptr())
        # None where no fused kernel multiplies
        self.products: dict[tuple[torch.Size, torch.dtype, torch.device], _Product | None] = {}
        key = id(state)

        def forget(_: object) -> None:
            _weights.pop(key, None)

        self.state = weakref.ref(state, forget)

    def is_of(self, packed: torch.Tensor, state: QuantState) -> bool:
        """Return True if this was made for these tensors and none was replaced since."""
        return (
            self.decoding.absmax is state.absmax
            and self.decoding.state2 is state.state2
            and self.state() is state
            and (packed.data_ptr(), state.absmax.data_ptr()) == self.addresses
        )

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x · Wᵀ + bias, [..., N] of the dtype of x [..., K]."""
        key = (x.shape, x.dtype, x.device)
        try:
            product = self.products[key]
        except KeyError:
            product = self._prepare(x)
            self.products[key] = product
        if bias is not None and (bias.shape != (self.n,) or bias.device != self.device):
            raise CodecError(
                f"bias: {list(bias.shape)} on {bias.device}; expected [{self.n}] on {self.device}"
            )
        if product is None:
            return self._multiply_decoded(x, bias)
        out = product(x)
        if bias is not None:
            out.add_(bias)
        return out

    def _prepare(self, x: torch.Tensor) -> _Product | None:
        """Return what multiplies all that have the shape, dtype and device of x; None if no fused
        kernel does.
        """
        if x.shape[-1:] != (self.k,) or x.dtype not in DTYPE_NAMES or x.device != self.device:
            raise CodecError(
                f"x is {x.dtype} of the shape {list(x.shape)} on {x.device}; expected float32, "
                f"float16 or bfloat16 of the shape [..., {self.k}] on {self.device}"
            )
        if not self._suits_kernel(x):
            return None
        from nf4conv.codec.kernels.product import launches  # importing Triton takes a second

        n, k = self.n, self.k
        if torch.cuda.get_device_capability(self.device)[0] != launches.CAPABILITY:
            return None
        if not 0 < x.numel() <= launches.SHAPES[-1].rows * k or n * k >= launches.MOST_ELEMENTS:
            return None
        return launches.prepare_product(x, n, self.packed, self.decoding)

    def _suits_kernel(self, x: torch.Tensor) -> bool:
        """Return True if the fused kernel can read such an x and such a weight."""
        return (
            has_kernels(x.device)
            and x.dtype != torch.float32
            and self.decoding.blocksize >= 64
            and self.k % 64 == 0
            and self.n > 0
            and self.packed.data_ptr() % 16 == 0
        )

    def _multiply_decoded(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Decode, then call torch's product: in float32 where there are no kernels, which is the
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
        if bias is not None:
            bias = bias.to(dtype)
        return functional.linear(x.to(dtype), weight, bias).to(x.dtype)


_weights: dict[int, _Weight] = {}  # by id of the state


@torch.library.custom_op("nf4conv::linear_4bit", mutates_args=())
def _linear_op(
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
    """Compute `linear_4bit` as torch.compile and autograd see it: opaque, of an [n, K] weight."""
    state2 = None
    if nested_absmax is not None and nested_code is not None:
        state2 = NestedState(nested_absmax, nested_code)
    state = QuantState(
        absmax=absmax,
        shape=torch.Size((n, x.shape[-1])),
        dtype=x.dtype,
        blocksize=blocksize,
        quant_type=quant_type,
        code=code_table(quant_type, x.device),
        offset=offset,
        state2=state2,
    )
    return _Weight(packed, state).multiply(x, bias)


@_linear_op.register_fake
def _(
    x: torch.Tensor,
    bias: torch.Tensor | None,  # noqa: ARG001 (only x and n decide the result's shape)
    packed: torch.Tensor,  # noqa: ARG001
    absmax: torch.Tensor,  # noqa: ARG001
    nested_absmax: torch.Tensor | None,  # noqa: ARG001
    nested_code: torch.Tensor | None,  # noqa: ARG001
    offset: torch.Tensor | None,  # noqa: ARG001
    n: int,
    quant_type: str,  # noqa: ARG001
    blocksize: int,  # noqa: ARG001
) -> torch.Tensor:
    """Return a tensor of the result's shape and dtype, for tracing."""
    return x.new_empty((*x.shape[:-1], n))


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: torch.Tensor,  # noqa: ARG001 (torch passes it by name)
) -> None:
    """Keep what `_backward` needs of the arguments of `_linear_op`."""
    x, bias, packed, absmax, nested_absmax, nested_code, offset, n, quant_type, blocksize = inputs
    ctx.save_for_backward(packed, absmax, nested_absmax, nested_code, offset)
    ctx.weight_shape = (n, x.shape[-1])
    ctx.x_dtype = x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.quant_type = quant_type
    ctx.blocksize = blocksize


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the arguments of `_linear_op`: those of x and bias, then Nones."""
    grad_x = None
    grad_bias = None
    if ctx.needs_input_grad[0]:
        weight = grad.new_empty(ctx.weight_shape, dtype=ctx.x_dtype)
        dequantize_op(*ctx.saved_tensors, weight, ctx.quant_type, ctx.blocksize)
        grad_x = grad @ weight
    if ctx.needs_input_grad[1]:
        rows = grad.reshape(-1, ctx.weight_shape[0])
        grad_bias = rows.sum(0, dtype=ctx.bias_dtype)
    return grad_x, grad_bias, None, None, None, None, None, None, None, None


_linear_op.register_autograd(_backward, setup_context=_setup_context)
