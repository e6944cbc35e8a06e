"""Computes a layer of packed experts on a GPU, straight from the codes where that is faster.

few tokens    each row with its experts, gate, up and activation in one launch, down in another
more tokens   rows that chose the same expert are multiplied together
the rest      transformers' own grouped product, for which the experts that are used are decoded:
              many tokens, training, and LoRA

Where there are no kernels the implementation that was asked for runs, with Experts4bit as its
weights: eager, batched_mm, grouped_mm, or one that somebody registered. `patch_layer` stands before
transformers' choice among them.

Without gradients, torch.compile takes layers of packed experts into its graph. With them it goes
around these layers: which experts are decoded depends on the values of a tensor, which a graph
cannot know. What is between the layers is compiled.
"""

import weakref
from functools import wraps
from typing import Any, Final

import torch
from torch.nn import functional

from nf4conv.codec.backends import has_kernels
from nf4conv.errors import CodecError
from nf4conv.inference.experts.product import (
    group_by_expert,
    multiply_groups,
    multiply_rows,
)
from nf4conv.inference.experts.projection import (
    Projection,
    project,
    suits_kernels,
    suits_together,
)
from nf4conv.inference.linear import trains
from nf4conv.inference.moe.tensor import Experts4bit
from nf4conv.inference.moe.weight import ALTERNATING, SEPARATED, PackedWeight

FEW_ROWS: Final = 2
"""Rows of each expert, on average, up to which each row is multiplied by itself."""

MANY_ROWS: Final = 64
"""Rows of each expert, on average, up to which packed experts are multiplied; beyond that decoding
them is faster.
"""

FEWEST_MEMBERS: Final = 16
"""Rows of the smallest group that is multiplied together."""


Projections = tuple[Projection, Projection]
"""A layer multiplies with gate and up, or with up alone, and then with down."""


def packed_experts_forward(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor | None:
    """Returns what a layer of experts computes, [tokens, hidden], or None to have the chosen
    implementation do it. `top_k_index` and `top_k_weights` are [tokens, k].
    """
    if torch.compiler.is_compiling():
        result: torch.Tensor = _layer_op(
            hidden_states, top_k_index, top_k_weights, module._nf4conv_key
        )
        return result
    return _compute(module, hidden_states, top_k_index, top_k_weights)


def _compute(
    module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor | None:
    """Computes a layer by the way that suits it; None if there is none."""
    if not is_computable(module, x):
        return None
    up = getattr(module, "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", None)
    down = getattr(module, "down_proj", None)
    if not isinstance(up, Experts4bit) or not isinstance(down, Experts4bit):
        return None
    is_many = ids.numel() > MANY_ROWS * up.weight.experts
    if not (up.factors or down.factors or trains(x, weights) or is_many):
        projections = projections_of(module, up, down)
        if projections is not None:
            return add_bias(module, multiply(module, projections, x, ids, weights), ids, weights)
    return compute_grouped(module, x, ids, weights)


def is_computable(module: torch.nn.Module, x: torch.Tensor) -> bool:
    """Returns whether kernels run where x is, and the layer does nothing that they do not know."""
    if x.device.type != "cuda" or not has_kernels(x.device):
        return False
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if getattr(module, "_is_expert_parallel", False):
        return False
    return hasattr(module, "is_transposed") and not getattr(module, "has_post_expert_norm", False)


def compute_grouped(
    module: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor | None:
    """Computes a layer as transformers' grouped_mm does; None if torch has no such product."""
    if x.dtype != torch.bfloat16 or not hasattr(functional, "grouped_mm"):
        return None
    from transformers.integrations.moe import grouped_mm_experts_forward

    result: torch.Tensor = grouped_mm_experts_forward(module, x, ids, weights)
    return result


def multiply(
    module: Any,
    projections: Projections,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Computes a layer with packed experts, but for its last bias; nothing waits for the device.

    The module has its biases and its activation. Experts that do not exist contribute nothing.
    """
    up, down = projections
    x = x.contiguous()
    ids = ids.to(torch.int64).contiguous()
    weights = weights.contiguous()
    tokens, k = ids.shape
    few = tokens * k <= FEW_ROWS * up.stack.experts
    rows_fit = up.operand.rows % 8 == 0 and down.operand.rows % 8 == 0
    if few and rows_fit and x.data_ptr() % 16 == 0:
        hidden = multiply_rows(x, ids, up)
        if not up.silu:
            hidden = _activate(module, hidden, ids)
        out = multiply_rows(hidden, ids, down, weights)
    else:
        members = max(FEWEST_MEMBERS, min(64, 1 << (tokens - 1).bit_length()))
        pairs, experts = group_by_expert(ids, up.stack.experts, members)
        hidden = multiply_groups(x, pairs, experts, k, ids.numel(), up)
        if not up.silu:
            hidden = _activate(module, hidden, ids)
        flat = weights.view(-1)
        results = multiply_groups(hidden, pairs, experts, 1, ids.numel(), down, flat)
        out = results.view(tokens, k, -1).sum(1)
    return out


def add_bias(
    module: Any, out: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Adds the weighted biases of the way down, if there are any."""
    if getattr(module, "has_bias", False):
        biases = module.down_proj_bias[ids]
        out += torch.matmul(weights.to(biases.dtype).unsqueeze(1), biases).squeeze(1)
    return out


def _activate(module: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Adds biases and applies the layer's own activation to what goes down next."""
    has_gate = getattr(module, "has_gate", True)
    if getattr(module, "has_bias", False):
        bias = module.gate_up_proj_bias if has_gate else module.up_proj_bias
        hidden = hidden + bias[ids.view(-1)]
    activated = module._apply_gate(hidden) if has_gate else module.act_fn(hidden)
    result: torch.Tensor = activated.to(hidden.dtype).contiguous()
    return result


# ------------------------------------------------------------------------------- projections

_Known = tuple[PackedWeight, Projections | None]  # the weight that goes down, and both
_projections: "weakref.WeakKeyDictionary[PackedWeight, _Known]" = weakref.WeakKeyDictionary()
# by the weights that go up


def projections_of(module: Any, up: Experts4bit, down: Experts4bit) -> Projections | None:
    """Returns what a layer multiplies with; None if the kernels cannot read its weights.

    It is made once for each weight.
    """
    known = _projections.get(up.weight)
    if known is None or known[0] is not down.weight:
        known = (down.weight, _make_projections(module, up, down))
        _projections[up.weight] = known
    return known[1]


def _make_projections(module: Any, up: Experts4bit, down: Experts4bit) -> Projections | None:
    """Makes what a layer multiplies with; returns None if the kernels cannot read its weights."""
    for weight in (up, down):
        if weight.shown.ids is not None or weight.shown.is_transposed:
            return None
        if weight.weight.is_transposed != module.is_transposed:
            return None  # stored as [in, out]
        if not all(map(suits_kernels, weight.weight.parts)):
            return None
    if len(down.weight.parts) != 1:
        return None
    first = up_projection(up.weight, module)
    return None if first is None else (first, project(down.weight.parts[0]))


def up_projection(weight: PackedWeight, module: Any) -> Projection | None:
    """Returns how gate and up are multiplied, for a layer's own activation or with it."""
    gate = weight.parts[0]
    silu = applies_silu(module)
    if len(weight.parts) == 2:
        up = weight.parts[1]
        if not suits_together(gate, up):
            return None
        if weight.rows == ALTERNATING:
            return project(gate, up, up_column=1, column_step=2)
        return project(gate, up, up_column=gate.rows, silu=silu)
    if len(weight.parts) != 1:
        return None
    half = gate.rows // 2
    if weight.rows == SEPARATED:
        return project(gate, gate, rows=half, up_first_row=1, row_step=2, up_column=half, silu=silu)
    if silu:
        return project(gate, gate, rows=half, up_first_row=half, silu=True)
    return project(gate)


def applies_silu(module: Any) -> bool:
    """Returns whether a layer computes silu(gate) · up of all gate rows, then all up rows."""
    if not getattr(module, "has_gate", True) or not getattr(module, "is_concatenated", True):
        return False
    gate_function = getattr(type(module), "_apply_gate", None)
    if getattr(gate_function, "__name__", "") != "_default_apply_gate":
        return False
    activation = type(getattr(module, "act_fn", None)).__name__
    return activation in ("SiLU", "SiLUActivation") and not getattr(module, "has_bias", False)


# ------------------------------------------------------------------------------ transformers


def patch_layer(module: torch.nn.Module) -> None:
    """Has a layer of packed experts compute as this file says: outside of compiled graphs while
    gradients are recorded, or if `prepare_layers` has not known it. Others of its class compute as
    before.
    """
    kind: Any = type(module)
    if "_nf4conv_is_packed" not in vars(kind):
        kind._nf4conv_is_packed = False
        forward = kind.forward

        def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = None
            if len(args) == 3 and not kwargs:
                result = packed_experts_forward(self, *args)
            return forward(self, *args, **kwargs) if result is None else result

        disable: Any = torch.compiler.disable
        reason = "4-bit experts are trained outside of compiled graphs; leave fullgraph off"
        outside = disable(compute, reason=reason)

        @wraps(forward)
        def choose(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._nf4conv_is_packed:
                return forward(self, *args, **kwargs)
            if torch.is_grad_enabled() or not hasattr(self, "_nf4conv_key"):
                return outside(self, *args, **kwargs)
            return compute(self, *args, **kwargs)

        kind.forward = choose
    module._nf4conv_is_packed = True  # type: ignore[assignment]


# ----------------------------------------------------------------------------- torch.compile

_modules: "weakref.WeakValueDictionary[int, torch.nn.Module]" = weakref.WeakValueDictionary()
# by the address of their key


def prepare_layers(model: torch.nn.Module) -> None:
    """Gives layers of packed experts keys, by which compiled code calls them.

    torch.compile then sees one operator in the place of a layer. A key is a buffer, whose address
    names the layer: unlike a number, it leaves the code of equal layers equal, so that layers which
    are compiled one by one share it.
    """
    for module in model.modules():
        experts = getattr(module, "down_proj", None)
        if isinstance(experts, Experts4bit):
            key = torch.empty(1, dtype=torch.uint8, device=experts.device)
            module.register_buffer("_nf4conv_key", key, persistent=False)
            _modules[key.data_ptr()] = module


def _module_of(key: torch.Tensor) -> torch.nn.Module:
    """Returns the layer that a key names, also if it was moved since. Raises CodecError if there is
    none.
    """
    address = key.data_ptr()
    for _ in range(2):
        module = _modules.get(address)
        if module is not None and _address_of(module) == address:
            return module
        for moved in list(_modules.values()):
            _modules[_address_of(moved)] = moved
    raise CodecError("compiled code calls 4-bit experts of a model that was copied: load it again")


def _address_of(module: Any) -> int:
    """Returns where the key of a layer is."""
    return int(module._nf4conv_key.data_ptr())


@torch.library.custom_op("nf4conv::packed_experts", mutates_args=())
def _layer_op(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """Computes the layer of a key, as torch.compile sees it: opaque."""
    module = _module_of(key)
    result = packed_experts_forward(module, x, ids, weights)
    if result is None:
        forward = type(module).forward
        result = getattr(forward, "__wrapped__", forward)(module, x, ids, weights)
    # an operator returns no view of what it was given
    return result.clone() if result is x else result


@_layer_op.register_fake
def _(
    x: torch.Tensor,
    ids: torch.Tensor,  # noqa: ARG001 (only x decides the result's shape)
    weights: torch.Tensor,  # noqa: ARG001
    key: torch.Tensor,  # noqa: ARG001
) -> torch.Tensor:
    """Returns a tensor of the result's shape and dtype, for tracing."""
    return torch.empty_like(x)
