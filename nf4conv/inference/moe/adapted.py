"""LoRA on packed experts: W + scaling · lhs · rhs with W in 4 bits, which is never added up.

PEFT adapts a parameter (`target_parameters`) by replacing it with `torch.baddbmm(W, lhs, rhs)` at
every forward pass. Adding up decodes all experts, and gives the sum a gradient of its full size.
Here a product becomes x · W + scaling · (x · lhs) · rhs: W stays packed, and only the factors get
gradients. So these functions of torch are computed above autograd.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from nf4conv.errors import PlanError
from nf4conv.inference.moe.tensor import FUNCTIONS, OPERATIONS, Experts4bit, Factors


def adapt(
    weight: Any, lhs: torch.Tensor, rhs: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    """Returns `torch.baddbmm(weight, lhs, rhs)` of packed experts without adding up."""
    if beta != 1 or not isinstance(weight, Experts4bit) or weight.dim() != 3:
        return NotImplemented
    return weight.with_factors((*weight.factors, Factors(lhs, rhs, alpha)))


def _factors_of(value: Any) -> tuple[Factors, ...]:
    """Returns the adapters of packed experts; none of anything else."""
    return value.factors if isinstance(value, Experts4bit) else ()


def _getitem(weight: Experts4bit, index: Any) -> Any:
    """Chooses experts."""
    factors = _factors_of(weight)
    base: Any = weight.with_factors(())[index] if factors else None
    if not isinstance(base, Experts4bit):
        return NotImplemented
    chosen = [Factors(own.lhs[index], own.rhs[index], own.scaling) for own in factors]
    return base.with_factors(tuple(chosen))


def _transpose(weight: Experts4bit, *dims: int) -> Any:
    """Transposes each matrix."""
    factors = _factors_of(weight)
    base: Any = weight.with_factors(()).transpose(*dims) if factors else None
    if not isinstance(base, Experts4bit):
        return NotImplemented
    turned = [
        Factors(own.rhs.transpose(-2, -1), own.lhs.transpose(-2, -1), own.scaling)
        for own in factors
    ]
    return base.with_factors(tuple(turned))


def _linear(x: Any, weight: Any, bias: torch.Tensor | None = None) -> Any:
    """Multiplies with one expert: x · Wᵀ + bias."""
    factors = _factors_of(weight)
    if not factors or weight.dim() != 2:
        return NotImplemented
    result = functional.linear(x, weight.with_factors(()), bias)
    for own in factors:
        low = functional.linear(x, own.rhs)
        result = result + own.scaling * functional.linear(low, own.lhs)
    return result


def _matmul(left: Any, right: Any) -> Any:
    """Multiplies from either side: x · W, or W · x."""
    of_left, of_right = _factors_of(left), _factors_of(right)
    if of_right and not of_left:
        result = torch.matmul(left, right.with_factors(()))
        for own in of_right:
            result = result + own.scaling * torch.matmul(torch.matmul(left, own.lhs), own.rhs)
        return result
    if of_left and not of_right:
        result = torch.matmul(left.with_factors(()), right)
        for own in of_left:
            result = result + own.scaling * torch.matmul(own.lhs, torch.matmul(own.rhs, right))
        return result
    return NotImplemented


def _grouped_by(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Returns the grouped product of adapted experts, by a function that multiplies plain ones."""

    def multiply(x: Any, weight: Any, offs: Any = None, **kwargs: Any) -> Any:
        factors = _factors_of(weight)
        if not factors or offs is None:
            return NotImplemented
        result = function(x, weight.with_factors(()), offs=offs, **kwargs)
        for own in factors:
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


def know_adapters() -> None:
    """Has Experts4bit compute by the functions above."""
    FUNCTIONS.update(
        {
            torch.baddbmm: adapt,
            torch.Tensor.__getitem__: _getitem,
            torch.Tensor.transpose: _transpose,
            functional.linear: _linear,
            torch.matmul: _matmul,
            torch.Tensor.matmul: _matmul,
            torch.bmm: _matmul,
        }
    )
    for product in (getattr(functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None)):
        if product is not None:
            FUNCTIONS[product] = _grouped_by(product)
    OPERATIONS[torch.ops.aten.add_.Tensor] = _refuse_to_merge
