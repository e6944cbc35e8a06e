"""x · Wᵀ with a packed weight, from Python: checks once, then launches.

few rows of 16-bit x    a fused kernel (kernels/product/): decodes in registers
anything else on a GPU  decodes, then calls the library's product, as bitsandbytes does
no kernels here         decodes to float32, multiplies in float32, rounds once: the definition

A graph of torch.compile needs the operators of linear_op.py. Without a graph, with gradients an
autograd function calls prepared kernels itself: torch's dispatcher would take the host six times as
long.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from nf4conv.codec.backends import has_kernels
from nf4conv.codec.ops import check_decodable
from nf4conv.codec.quant_state import DTYPE_NAMES, Addresses, QuantState, decoding_of
from nf4conv.errors import CodecError
from nf4conv.inference.linear_op import (
    addresses_of,
    gradient_of_bias,
    linear_op,
    multiply_packed,
    train_op,
)

if TYPE_CHECKING:  # importing Triton takes a second
    from nf4conv.inference.kernels.product.choosing import Decode, Matrix, Multiply


def linear_4bit(
    x: torch.Tensor, packed: torch.Tensor, quant_state: QuantState, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiplies x with a packed weight: x · Wᵀ + bias, with float32 sums.

    On NVIDIA GPUs of compute capability 8 and newer a fused kernel decodes the weight while it
    multiplies, for float16 and bfloat16 x of up to 64 rows, and on Hopper of up to 512 where that
    is faster. Otherwise the weight is decoded first.
    Works under `torch.compile` in all its modes and in CUDA graphs, and is differentiable with
    respect to x and bias.

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
    if torch.compiler.is_compiling():
        return _traced(x, packed, quant_state, bias)
    weight = _weight_of(packed, quant_state)
    is_trained = trains(x, bias)
    is_plain = type(x) is torch.Tensor
    product = None
    if is_plain:
        # torch's dispatcher, which the operators go through, takes longer than the launch
        product = weight.product_for(x, bias)
    else:
        _check_operands(x, bias, weight.shape, weight.device)
    if product is not None and not is_trained:
        return product(x, weight.kernel_addresses, bias)
    operands = _operands(packed.data.view(torch.uint8), quant_state)
    if product is not None:
        decode = weight.decode_to(x.dtype)
        trained: torch.Tensor = multiply_with_gradients(
            x, bias, product, decode, weight.kernel_addresses, operands[:5]
        )
        return trained
    if is_plain and not is_trained:
        return multiply_packed(x, bias, *operands)
    operator = train_op if is_trained else linear_op
    result: torch.Tensor = operator(x, bias, *operands)
    return result


def _operands(codes: torch.Tensor, state: QuantState) -> tuple[Any, ...]:
    """Returns the arguments of the operators that are of the weight."""
    tensors = decoding_of(state).tensors()
    return codes, *tensors, state.shape[0], state.quant_type, state.blocksize


def trains(x: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Returns True if gradients of x or another tensor may be asked for."""
    return torch.is_grad_enabled() and (
        x.requires_grad or (other is not None and other.requires_grad)
    )


def _traced(
    x: torch.Tensor, packed: torch.Tensor, state: QuantState, bias: torch.Tensor | None
) -> torch.Tensor:
    """Computes `linear_4bit` in a graph that torch.compile makes: what is checked here is checked
    once for the graph, and the tables are made before any run of it.
    """
    _check_operands(x, bias, _checked_shape(packed, state), packed.device)
    _make_tables(state.quant_type, x.dtype, x.device)
    operator = train_op if trains(x, bias) else linear_op
    # a view: at every call of an operator with bitsandbytes' own class of parameters, torch asks it
    # in Python what to do
    result: torch.Tensor = operator(x, bias, *_operands(packed.reshape(-1), state))
    return result


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _make_tables(quant_type: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Makes the tables that kernels read while a graph is traced, so that its memory has none."""
    make_tables(quant_type, dtype, device)
    return True


def make_tables(quant_type: str, dtype: torch.dtype, device: torch.device) -> None:
    """Makes the tables that products on a device read; they are kept."""
    if not has_kernels(device):
        return
    from nf4conv.codec.kernels import tables  # importing Triton takes a second

    tables.value_table(quant_type, device)
    if dtype != torch.float32:
        tables.pair_table(quant_type, dtype, device)
        tables.pair_table(quant_type, torch.float16, device)  # that of panels/


def _checked_shape(packed: torch.Tensor, state: QuantState) -> torch.Size:
    """Returns the shape [N, K] of a weight; raises CodecError unless its parts belong together."""
    if len(state.shape) != 2:
        raise CodecError(f"the weight has the shape {list(state.shape)}, expected [N, K]")
    check_decodable(packed, state, state.shape[0] * state.shape[1])
    return state.shape


def _check_operands(
    x: torch.Tensor, bias: torch.Tensor | None, shape: torch.Size, device: torch.device
) -> None:
    """Raises CodecError unless x and bias fit a weight."""
    n, k = shape
    if x.shape[-1:] != (k,) or x.dtype not in DTYPE_NAMES or x.device != device:
        raise CodecError(
            f"x is {x.dtype} of the shape {list(x.shape)} on {x.device}; expected float32, "
            f"float16 or bfloat16 of the shape [..., {k}] on {device}"
        )
    if bias is not None and (bias.shape != (n,) or bias.device != device):
        raise CodecError(f"bias: {list(bias.shape)} on {bias.device}; expected [{n}] on {device}")


_MOST_PRODUCTS: Final = 64
"""Shapes of x that a weight remembers; a server sees prompts of thousands of lengths."""


class _Weight:
    """Remembers of a weight that it was checked, where its tensors are, and what is prepared to
    multiply with it.

    It keeps none of the tensors: when a model moves to another device, their memory is free. It is
    forgotten with the weight's state.
    """

    def __init__(self, packed: torch.Tensor, state: QuantState) -> None:
        self.shape = _checked_shape(packed, state)
        self.device = packed.device
        decoding = decoding_of(state)
        self.form = decoding.form()
        self.codes = (packed.data_ptr(), packed.nbytes)
        self.bias_shape = (self.shape[0],)
        self.kernel_addresses = decoding.addresses(packed)
        self.tensors = [weakref.ref(tensor) for tensor in decoding.pointers()]
        self.products: dict[tuple[torch.Size, torch.dtype, torch.device], Multiply] = {}
        key = id(state)

        def forget(_: object) -> None:
            _weights.pop(key, None)

        self.state = weakref.ref(state, forget)

    def is_of(self, packed: torch.Tensor, state: QuantState) -> bool:
        """Returns True if this was made for these tensors and none was replaced since."""
        absmax, code, nested_absmax, offset = self.tensors
        if self.state() is not state or absmax() is not state.absmax:
            return False
        state2 = state.state2
        if (state2 is not None) != self.form.nested:
            return False
        if state2 is not None:
            if code() is not state2.code or nested_absmax() is not state2.absmax:
                return False
            # without the first question, an offset that is gone would pass for one that is missing
            if state.offset is None or offset() is not state.offset:
                return False
        # a tensor whose data are replaced is the same object
        if state.absmax.data_ptr() != self.kernel_addresses[1]:
            return False
        # bitsandbytes' own class of parameters answers each question in Python, 4 µs or more
        with torch._C.DisableTorchFunctionSubclass():
            codes = (packed.data_ptr(), packed.nbytes)
            return codes == self.codes and packed.is_contiguous()

    def product_for(self, x: torch.Tensor, bias: torch.Tensor | None) -> "Multiply | None":
        """Returns what multiplies with x and adds the bias; None where there are no kernels."""
        product = self.products.get((x.shape, x.dtype, x.device))
        if product is not None:
            if bias is not None and (bias.shape != self.bias_shape or bias.device != self.device):
                _check_operands(x, bias, self.shape, self.device)
            return product
        _check_operands(x, bias, self.shape, self.device)
        if not has_kernels(self.device):
            return None
        from nf4conv.inference.kernels.product import choosing  # importing Triton takes a second

        product = choosing.prepare_multiply(x.shape, x.dtype, x.device, self._matrix())
        if len(self.products) >= _MOST_PRODUCTS:  # threads may add some at once
            self.products.clear()
        self.products[x.shape, x.dtype, x.device] = product
        return product

    def decode_to(self, dtype: torch.dtype) -> "Decode":
        """Returns what decodes the weight, given its addresses; there are kernels."""
        from nf4conv.inference.kernels.product import choosing  # importing Triton takes a second

        return choosing.prepare_decode(dtype, self.device, self._matrix())

    def _matrix(self) -> "Matrix":
        """Returns which kind of weight this is, for kernels."""
        from nf4conv.inference.kernels.product import choosing  # importing Triton takes a second

        alignment = choosing.alignment_of(self.kernel_addresses[0])
        n, k = self.shape
        return choosing.Matrix(n, k, self.form, alignment)


def _weight_of(packed: torch.Tensor, state: QuantState) -> _Weight:
    """Returns what is known of a weight; checks it if it is new."""
    weight = _weights.get(id(state))
    if weight is None or not weight.is_of(packed, state):
        weight = _Weight(packed, state)
        _weights[id(state)] = weight
    return weight


_weights: dict[int, _Weight] = {}  # by id of the state


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


multiply_with_gradients: Any = _Product.apply  # which has no types
"""x, bias, what multiplies and what decodes W in the dtype of x, where the weight is now, and its
packed codes and `Decoding.tensors`, which the graph keeps → x · Wᵀ + bias, with gradients.
"""
