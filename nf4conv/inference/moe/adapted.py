"""AdaptedExperts is W + scaling · lhs · rhs with W in 4 bits, and never adds it up.

PEFT adapts a parameter (`target_parameters`) by replacing it with `torch.baddbmm(W, lhs, rhs)` at
every forward pass. Adding up decodes all experts, and gives the sum a gradient of its full size.
Here a product becomes x · W + scaling · (x · lhs) · rhs: W stays packed, and only the factors get
gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from nf4conv.errors import PlanError
from nf4conv.inference.moe.tensor import FUNCTIONS as ABOVE_AUTOGRAD
from nf4conv.inference.moe.tensor import OPERATIONS, Experts4bit


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

    def chosen(self, index: Any) -> "Factors":
        """Returns the factors of some experts, or of one."""
        return Factors(self.lhs[index], self.rhs[index], self.scaling)

    def transposed(self) -> "Factors":
        """Returns the factors of the transposed matrices."""
        lhs, rhs = self.rhs.transpose(-2, -1), self.lhs.transpose(-2, -1)
        return Factors(lhs, rhs, self.scaling)


class AdaptedExperts(torch.Tensor):
    """Shows experts in 4 bits with LoRA.

    Attributes:
        base: the experts without LoRA.
        factors: what is added to them, one for each adapter.
    """

    base: Experts4bit
    factors: tuple[Factors, ...]

    @staticmethod
    def __new__(cls, base: Experts4bit, factors: tuple[Factors, ...]) -> "AdaptedExperts":
        """Makes the tensor: shape, dtype and device of the base, without storage."""
        made: AdaptedExperts = torch.Tensor._make_wrapper_subclass(
            cls, base.shape, dtype=base.dtype, device=base.device, requires_grad=False
        )
        made.base = base
        made.factors = factors
        return made

    def __init__(self, base: Experts4bit, factors: tuple[Factors, ...]) -> None:
        """Has nothing to do: __new__ did it."""

    def added_up(self) -> torch.Tensor:
        """Returns the sum as a plain tensor, differentiable with respect to the factors."""
        total = self.base.decoded()
        for own in self.factors:
            product = torch.matmul(own.lhs.to(total.dtype), own.rhs.to(total.dtype))
            total = total + own.scaling * product
        return total

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Computes with a function of FUNCTIONS if there is one; otherwise adds up.

        Metadata, such as shape and dtype, is looked up and needs no sum.
        """
        kwargs = kwargs or {}
        own = FUNCTIONS.get(func)
        if own is not None:
            result = own(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        adapted, plain = AdaptedExperts, AdaptedExperts.added_up
        args, kwargs = torch.utils._pytree.tree_map_only(adapted, plain, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Is reached below autograd only, where nothing needs a gradient."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return AdaptedExperts(args[0].base, args[0].factors)
        adapted, plain = AdaptedExperts, AdaptedExperts.added_up
        args, kwargs = torch.utils._pytree.tree_map_only(adapted, plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Returns the base, and how many adapters there are."""
        return f"AdaptedExperts({self.base!r}, {len(self.factors)} adapters)"


def adapt(
    weight: Any, lhs: torch.Tensor, rhs: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    """Returns `torch.baddbmm(weight, lhs, rhs)` of packed experts without adding up."""
    if beta != 1 or weight.dim() != 3:
        return NotImplemented
    own = Factors(lhs, rhs, alpha)
    if isinstance(weight, AdaptedExperts):
        return AdaptedExperts(weight.base, (*weight.factors, own))
    if isinstance(weight, Experts4bit):
        return AdaptedExperts(weight, (own,))
    return NotImplemented


def _getitem(weight: AdaptedExperts, index: Any) -> Any:
    """Chooses experts, as Experts4bit does."""
    base = weight.base[index]
    if not isinstance(base, Experts4bit):
        return NotImplemented
    return AdaptedExperts(base, tuple(own.chosen(index) for own in weight.factors))


def _transpose(weight: AdaptedExperts, *dims: int) -> Any:
    """Transposes each matrix, as Experts4bit does."""
    base = weight.base.transpose(*dims) if dims else weight.base.t()
    if not isinstance(base, Experts4bit):
        return NotImplemented
    return AdaptedExperts(base, tuple(own.transposed() for own in weight.factors))


def _to(weight: AdaptedExperts, *args: Any, **kwargs: Any) -> AdaptedExperts:
    """Moves or casts experts and factors."""
    factors = []
    for own in weight.factors:
        lhs, rhs = own.lhs.to(*args, **kwargs), own.rhs.to(*args, **kwargs)
        factors.append(Factors(lhs, rhs, own.scaling))
    base: Any = weight.base.to(*args, **kwargs)
    return AdaptedExperts(base, tuple(factors))


def _linear(x: Any, weight: Any, bias: torch.Tensor | None = None) -> Any:
    """Multiplies with one expert: x · Wᵀ + bias."""
    if not isinstance(weight, AdaptedExperts) or weight.dim() != 2:
        return NotImplemented
    result = functional.linear(x, weight.base, bias)
    for own in weight.factors:
        low = functional.linear(x, own.rhs)
        result = result + own.scaling * functional.linear(low, own.lhs)
    return result


def _matmul(left: Any, right: Any) -> Any:
    """Multiplies from either side: x · W, or W · x."""
    if isinstance(right, AdaptedExperts) and not isinstance(left, AdaptedExperts):
        result = torch.matmul(left, right.base)
        for own in right.factors:
            result = result + own.scaling * torch.matmul(torch.matmul(left, own.lhs), own.rhs)
        return result
    if isinstance(left, AdaptedExperts) and not isinstance(right, AdaptedExperts):
        result = torch.matmul(left.base, right)
        for own in left.factors:
            result = result + own.scaling * torch.matmul(own.lhs, torch.matmul(own.rhs, right))
        return result
    return NotImplemented


def _grouped_by(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Returns the grouped product of adapted experts, by a function that multiplies plain ones."""

    def multiply(x: Any, weight: Any, offs: Any = None, **kwargs: Any) -> Any:
        if not isinstance(weight, AdaptedExperts) or offs is None:
            return NotImplemented
        result = function(x, weight.base, offs=offs, **kwargs)
        for own in weight.factors:
            low = multiply_groups(x, own.lhs, offs)
            result = result + own.scaling * multiply_groups(low, own.rhs, offs)
        return result

    return multiply


def multiply_groups(x: torch.Tensor, factors: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Multiplies groups of rows, [rows, k], with a small matrix each, [E, k, n]; one of k and n is
    a rank, which grouped kernels may not take.

    `offs`, [E], says where the rows of each expert end. Rows beyond the last end are zero.
    """
    aligned = factors.shape[1] % 8 == 0 and factors.shape[2] % 8 == 0
    if aligned and hasattr(functional, "grouped_mm"):
        return functional.grouped_mm(x, factors.contiguous().to(x.dtype), offs=offs)
    products = []
    start = 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            products.append(torch.matmul(x[start:end], factors[expert].to(x.dtype)))
        start = end
    products.append(x.new_zeros(x.shape[0] - start, factors.shape[2]))
    return torch.cat(products)


def _refuse_to_merge(target: Any, *_: Any, **__: Any) -> Any:
    """Raises PlanError, which says how to merge, when PEFT adds a product to packed weights
    themselves.
    """
    if not isinstance(target, Experts4bit):
        return NotImplemented
    raise PlanError(
        "an adapter cannot be merged into 4-bit experts in memory: save the adapter, and run "
        "`nf4conv dequantize MODEL OUT --lora ADAPTER`, which writes the sum in 16 bits"
    )


# ---------------------------------------------------------------- layers of experts


class PackedLayer(NamedTuple):
    """The weights of a layer of packed experts.

    Attributes:
        up: `gate_up_proj`, or `up_proj` where experts have no gate.
        down: `down_proj`.
        up_factors: LoRA on `up`; empty without LoRA.
        down_factors: LoRA on `down`; empty without LoRA.
    """

    up: Experts4bit
    down: Experts4bit
    up_factors: tuple[Factors, ...]
    down_factors: tuple[Factors, ...]


def packed_weights(module: torch.nn.Module) -> PackedLayer | None:
    """Returns the weights of a layer of experts; None unless both are packed."""
    name = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    up, down = _split(getattr(module, name, None)), _split(getattr(module, "down_proj", None))
    if up is None or down is None:
        return None
    return PackedLayer(up[0], down[0], up[1], down[1])


def _split(weight: Any) -> tuple[Experts4bit, tuple[Factors, ...]] | None:
    """Returns packed experts and the LoRA on them; None if a weight is neither."""
    if isinstance(weight, AdaptedExperts):
        return weight.base, weight.factors
    return (weight, ()) if isinstance(weight, Experts4bit) else None


# ---------------------------------------------------------------- what torch calls

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.baddbmm: adapt,
    torch.Tensor.baddbmm: adapt,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    torch.Tensor.t: _transpose,
    torch.Tensor.to: _to,
    functional.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: lambda right, left: _matmul(left, right),
    torch.bmm: _matmul,
    torch.Tensor.bmm: _matmul,
    torch.mm: _matmul,
}
if hasattr(functional, "grouped_mm"):
    FUNCTIONS[functional.grouped_mm] = _grouped_by(functional.grouped_mm)
if hasattr(torch, "_grouped_mm"):
    FUNCTIONS[torch._grouped_mm] = _grouped_by(torch._grouped_mm)

ABOVE_AUTOGRAD.update({torch.baddbmm: adapt, torch.Tensor.baddbmm: adapt})
OPERATIONS[torch.ops.aten.add_.Tensor] = _refuse_to_merge

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
