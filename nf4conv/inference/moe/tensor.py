"""Experts4bit looks like the 3-D parameter of transformers' experts, and holds packed codes.

Whatever a model does with the parameter, it decodes only then, and only what is needed:

- `W[e]` and `W[ids]` decode nothing yet: they are Experts4bit of these experts.
- A product decodes the experts that it is given. A grouped product decodes those that have rows.
- Anything else decodes all: slow, and right.

Autograd saves the tensors that an operation was given. Here that is the packed one, so that nothing
of 16 bits outlives a call, and the backward pass decodes again.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from nf4conv.errors import PlanError
from nf4conv.inference.moe.weight import PackedWeight

aten = torch.ops.aten

MOST_DECODED = 2**28
"""Bytes that a batched product decodes at once; beyond that it goes on in pieces."""


class View(NamedTuple):
    """Says which part of a weight a tensor shows.

    Attributes:
        ids: [n] int64, which experts; None for all in order.
        is_single: True if `ids` names one expert and the tensor is its matrix.
        is_transposed: True if each matrix is shown as [columns, rows] of the parameter.
    """

    ids: torch.Tensor | None = None
    is_single: bool = False
    is_transposed: bool = False


WHOLE = View()
"""Shows all experts, as the parameter has them."""


@dataclass(frozen=True, eq=False)
class Factors:
    """A low-rank matrix for each expert: scaling · lhs · rhs.

    Attributes:
        lhs: [n, rows, rank], or [rows, rank] for a single expert.
        rhs: [n, rank, columns], or [rank, columns] for a single expert.
        scaling: the number that the product lhs · rhs is multiplied by.
    """

    lhs: torch.Tensor
    rhs: torch.Tensor
    scaling: float


class Experts4bit(torch.Tensor):
    """Shows experts in 4 bits as a tensor [n, rows, columns] of 16 or 32 bits.

    Attributes:
        weight: the packed matrices of all experts.
        shown: which of them this shows, and how.
        factors: what is added to what is shown, one for each adapter; see adapted.py.
    """

    weight: PackedWeight
    shown: View
    factors: tuple[Factors, ...]

    @staticmethod
    def __new__(
        cls,
        weight: PackedWeight,
        dtype: torch.dtype,
        view: View = WHOLE,
        factors: tuple[Factors, ...] = (),
    ) -> "Experts4bit":
        """Makes the tensor: shape, dtype and device, without storage."""
        made: Experts4bit = torch.Tensor._make_wrapper_subclass(
            cls, _shape_of(weight, view), dtype=dtype, device=weight.device, requires_grad=False
        )
        made.weight = weight
        made.shown = view
        made.factors = factors
        return made

    def with_view(self, view: View) -> "Experts4bit":
        """Returns another view of the same weight."""
        return Experts4bit(self.weight, self.dtype, view, self.factors)

    def with_factors(self, factors: tuple[Factors, ...]) -> "Experts4bit":
        """Returns the same experts with other adapters, or with none."""
        return Experts4bit(self.weight, self.dtype, self.shown, factors)

    def decoded(self) -> torch.Tensor:
        """Returns what this shows as a plain tensor, differentiable with respect to factors."""
        total = self.decode_some(self.expert_ids())
        for own in self.factors:
            product = torch.matmul(own.lhs.to(total.dtype), own.rhs.to(total.dtype))
            total = total + own.scaling * product
        return total

    def decode_some(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns some experts of the weight, by their numbers, shown as this shows them, as a
        plain tensor.
        """
        decoded = self.weight.decode(ids, self.dtype)
        if self.shown.is_transposed:
            decoded = decoded.transpose(1, 2)
        return decoded[0] if self.shown.is_single else decoded

    def expert_ids(self) -> torch.Tensor:
        """Returns which experts of the weight this shows: [n] int64."""
        if self.shown.ids is not None:
            return self.shown.ids
        return torch.arange(self.weight.experts, device=self.weight.device)

    # ---------------------------------------------------------------- what torch calls

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Computes with a function of FUNCTIONS, if there is one, before autograd sees the call.

        Adapters get gradients, so that whatever is not known adds them up here. __torch_dispatch__
        computes everything else.
        """
        kwargs = kwargs or {}
        own = FUNCTIONS.get(func)
        if own is not None:
            result = own(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func not in METADATA:
            args, kwargs = _decoded(args, kwargs, _is_adapted)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Computes an operation: by its own way if there is one, else on decoded values."""
        kwargs = kwargs or {}
        own = OPERATIONS.get(func)
        if own is not None:
            result = own(*args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = _decoded(args, kwargs, _is_packed)
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> Any:
        """Refuses to be in a graph of torch.compile. By these names a module knows that a tensor
        moves with others inside.
        """
        raise PlanError("LoRA on 4-bit experts cannot be compiled: leave torch.compile off")

    __tensor_unflatten__ = __tensor_flatten__

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Returns the shape and the format."""
        kind = self.weight.parts[0].quant_type
        return f"Experts4bit({tuple(self.shape)}, {self.dtype}, {kind}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Experts4bit":
        """Returns a tensor with copies of all tensors inside."""
        copied: Any = Experts4bit(deepcopy(self.weight, memo), self.dtype, self.shown)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=False)
        memo[id(self)] = copied
        return copied  # type: ignore[no-any-return]


def _is_packed(value: Any) -> bool:
    return isinstance(value, Experts4bit)


def _is_adapted(value: Any) -> bool:
    return isinstance(value, Experts4bit) and bool(value.factors)


def _decoded(args: Any, kwargs: Any, chosen: Callable[[Any], bool]) -> Any:
    """Returns arguments in which chosen tensors are decoded."""

    def plain(value: Any) -> Any:
        return value.decoded() if chosen(value) else value

    return torch.utils._pytree.tree_map(plain, (args, kwargs))


def _shape_of(weight: PackedWeight, view: View) -> tuple[int, ...]:
    """Returns the shape of what a view shows."""
    rows, columns = weight.matrix_shape
    if view.is_transposed:
        rows, columns = columns, rows
    if view.is_single:
        return (rows, columns)
    experts = weight.experts
    if view.ids is not None:
        experts = view.ids.shape[0]
    return (experts, rows, columns)


# ---------------------------------------------------------------- operations that decode nothing


def _same(tensor: Experts4bit, *_: Any, **__: Any) -> Experts4bit:
    """Returns another tensor of the same values: detach, clone and the like."""
    return tensor.with_view(tensor.shown)


def _to_copy(tensor: Experts4bit, **kwargs: Any) -> Any:
    """Converts dtype and device: the dtype is that of decoded values, codes stay as they are."""
    weight, view = tensor.weight, tensor.shown
    device = kwargs.get("device")
    if device is not None:
        if torch.device(device).type == "meta":
            return NotImplemented
        weight = weight.to(device)
        if view.ids is not None:
            view = view._replace(ids=view.ids.to(device))
    return Experts4bit(weight, kwargs.get("dtype") or tensor.dtype, view)


def _with_matrices_transposed(tensor: Experts4bit) -> Experts4bit:
    """Transposes each matrix: `t()`."""
    view = tensor.shown
    return tensor.with_view(view._replace(is_transposed=not view.is_transposed))


def _transpose(tensor: Experts4bit, *dims: int) -> Any:
    """Transposes each matrix: `transpose(-2, -1)`."""
    rank = tensor.dim()
    if {dim % rank for dim in dims} != {rank - 2, rank - 1}:
        return NotImplemented
    return _with_matrices_transposed(tensor)


def _reshape(tensor: Experts4bit, shape: Sequence[int], **__: Any) -> Any:
    """Returns the same tensor for the shape that it has: matmul asks for it before it calls bmm."""
    if len(shape) != tensor.dim():
        return NotImplemented
    for wanted, size in zip(shape, tensor.shape, strict=True):
        if wanted not in (-1, size):
            return NotImplemented
    return _same(tensor)


def _select(tensor: Experts4bit, dim: int, index: int) -> Any:
    """Chooses one expert: `W[3]`."""
    if dim != 0 or tensor.shown.is_single:
        return NotImplemented
    ids = tensor.shown.ids
    if ids is None:
        chosen = torch.tensor([index % tensor.shape[0]], device=tensor.weight.device)
    else:
        chosen = ids[index].reshape(1)
    return tensor.with_view(View(chosen, True, tensor.shown.is_transposed))


def _index(tensor: Any, indices: Sequence[Any]) -> Any:
    """Chooses experts: `W[ids]`."""
    if not isinstance(tensor, Experts4bit) or tensor.shown.is_single or len(indices) != 1:
        return NotImplemented
    index = indices[0]
    if index is None or index.dtype in (torch.bool, torch.uint8) or index.dim() > 1:
        return NotImplemented
    chosen = index.to(tensor.weight.device, torch.int64)
    chosen = torch.where(chosen < 0, chosen + tensor.shape[0], chosen)
    if tensor.shown.ids is not None:
        chosen = tensor.shown.ids[chosen]
    view = View(chosen.reshape(-1), index.dim() == 0, tensor.shown.is_transposed)
    return tensor.with_view(view)


# ---------------------------------------------------------------- products


def _bmm(left: Any, right: Any) -> torch.Tensor:
    """Multiplies a batch with one expert each, in pieces."""
    packed = right if isinstance(right, Experts4bit) else left
    if isinstance(left, Experts4bit) and isinstance(right, Experts4bit):
        left = left.decoded()
    ids = packed.expert_ids()
    size = packed.shape[1] * packed.shape[2] * packed.dtype.itemsize
    step = max(1, MOST_DECODED // size)
    products = []
    for start in range(0, ids.shape[0], step):
        some = slice(start, start + step)
        weight = decode_repeated(packed, ids[some])
        if packed is right:
            products.append(torch.bmm(left[some], weight))
        else:
            products.append(torch.bmm(weight, right[some]))
    return products[0] if len(products) == 1 else torch.cat(products)


def decode_repeated(packed: Experts4bit, ids: torch.Tensor) -> torch.Tensor:
    """Decodes experts that may be named several times, each once."""
    if ids.shape[0] <= 1:
        return packed.decode_some(ids)
    once, place = torch.unique(ids, return_inverse=True)
    if once.shape[0] == ids.shape[0]:
        return packed.decode_some(ids)
    return packed.decode_some(once)[place]


def _grouped_mm(
    func: Any, x: Any, weight: Any, offs: torch.Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Multiplies groups of rows with one expert each; decodes those that have rows."""
    if not isinstance(weight, Experts4bit) or isinstance(x, Experts4bit) or offs is None:
        return NotImplemented
    if weight.shown.ids is None:  # what has rows, in its place among all experts
        decoded = weight.weight.decode_active(offs, weight.dtype)
        if decoded is not None:
            if weight.shown.is_transposed:
                decoded = decoded.transpose(1, 2)
            return func(x, decoded, offs, *args, **kwargs)
    counts = torch.diff(offs, prepend=offs.new_zeros(1))
    active = counts.nonzero().squeeze(1)
    if active.shape[0] == 0:
        active = active.new_zeros(1)
    decoded = weight.decode_some(weight.expert_ids()[active])
    return func(x, decoded, offs[active], *args, **kwargs)


def _fallback_backward(_x: Any, weight: Any, offs: torch.Tensor, grad: torch.Tensor) -> Any:
    """Computes the backward pass of transformers' own grouped product.

    The weight gets no gradient.
    """
    grad_x = _grouped_mm(
        torch.ops.transformers.grouped_mm_fallback.default,
        grad.contiguous(),
        _with_matrices_transposed(weight),
        offs,
    )
    return grad_x, grad.new_zeros(1).expand(weight.shape)


def _element_size(tensor: Experts4bit) -> float:
    """Returns the bytes that an element takes in 4 bits: transformers adds up memory with it."""
    stored = sum(part.nbytes for part in tensor.weight.parts)
    rows, columns = tensor.weight.matrix_shape
    return stored / (tensor.weight.experts * rows * columns)


FUNCTIONS: dict[Any, Callable[..., Any]] = {torch.Tensor.element_size: _element_size}
"""By functions of torch, what computes them above autograd; adapted.py adds others."""

_PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "is_meta", "grad", "grad_fn", "is_leaf", "ndim",
    "layout", "is_cuda", "is_cpu", "itemsize", "is_sparse", "is_quantized", "is_nested", "names",
)  # fmt: skip
METADATA = {
    getattr(torch.Tensor, name).__get__ for name in _PROPERTIES if hasattr(torch.Tensor, name)
}
METADATA |= {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride,
    torch.Tensor.is_floating_point, torch.is_floating_point, torch.Tensor.is_contiguous,
    torch.Tensor.element_size, torch.Tensor.detach, torch.Tensor.__repr__,
}  # fmt: skip
"""Properties and methods that adapters do not change."""

OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten._to_copy.default: _to_copy,
    aten.t.default: _with_matrices_transposed,
    aten.transpose.int: _transpose,
    aten.select.int: _select,
    aten.index.Tensor: _index,
    aten.bmm.default: _bmm,
}
"""By operators of torch, what computes them without decoding, or decodes less than all."""

for _operator in (aten.detach, aten.alias, aten.clone, aten.lift_fresh, aten.contiguous):
    OPERATIONS[_operator.default] = _same
for _operator in (aten.view, aten._unsafe_view, aten.reshape, aten.expand):
    OPERATIONS[_operator.default] = _reshape
if hasattr(aten, "_grouped_mm"):
    OPERATIONS[aten._grouped_mm.default] = partial(_grouped_mm, aten._grouped_mm.default)


def know_transformers_operators() -> None:
    """Adds the grouped product of transformers, which it defines when it is imported."""
    operators = torch.ops.transformers
    if hasattr(operators, "grouped_mm_fallback"):
        forward = operators.grouped_mm_fallback.default
        OPERATIONS[forward] = partial(_grouped_mm, forward)
    if hasattr(operators, "grouped_mm_fallback_backward"):  # from 5.20 or so on
        OPERATIONS[operators.grouped_mm_fallback_backward.default] = _fallback_backward
