"""Lets layers of packed experts compute their own way: the seam between loader and forward.py.

transformers asks `ALL_EXPERTS_FUNCTIONS.get_interface(name, eager)` for the function that computes
a layer of experts: eager, batched_mm, grouped_mm, or one that somebody registered.
`install_dispatch` wraps what it returns. A layer whose weights are packed then calls

    packed_experts_forward(module, hidden_states, top_k_index, top_k_weights)

of forward.py, under every implementation. It returns [tokens, hidden], or None where it has no
faster way; then the implementation that was asked for runs, with Experts4bit as its weights.

Without gradients, torch.compile takes layers of packed experts into its graph. With them it goes
around these layers: which experts are decoded depends on the values of a tensor, which a graph
cannot know. What is between the layers is compiled.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from nf4conv.inference.moe.forward import packed_experts_forward
from nf4conv.inference.moe.tensor import Experts4bit


def with_packed_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an implementation of experts, so that packed layers may compute another way."""

    @wraps(forward)
    def compute(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_packed = isinstance(getattr(module, "down_proj", None), Experts4bit)
        if is_packed and len(args) == 3 and not kwargs:
            result = packed_experts_forward(module, *args, **kwargs)
            if result is not None:
                return result
        return forward(module, *args, **kwargs)

    return compute


def install_dispatch(interface: Any) -> None:
    """Wraps what transformers' interface of experts, the class of ALL_EXPERTS_FUNCTIONS, returns;
    once.
    """
    if getattr(interface, "_nf4conv", False):
        return
    choose = interface.get_interface
    wrapped: dict[Any, Callable[..., Any]] = {}

    @wraps(choose)
    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        forward = choose(self, *args, **kwargs)
        if forward not in wrapped:
            wrapped[forward] = with_packed_forward(forward)
        return wrapped[forward]

    interface.get_interface = get_interface
    interface._nf4conv = True


def leave_out_of_graphs(module: torch.nn.Module) -> None:
    """Has torch.compile call a layer of packed experts as it stands while gradients are recorded.
    Others of its class are compiled as before.
    """
    kind: Any = type(module)
    if "_nf4conv_is_packed" not in vars(kind):
        kind._nf4conv_is_packed = False
        forward = kind.forward
        disable: Any = torch.compiler.disable
        reason = "4-bit experts are trained outside of compiled graphs; leave fullgraph off"
        outside = disable(forward, reason=reason)

        @wraps(forward)
        def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._nf4conv_is_packed and torch.is_grad_enabled():
                return outside(self, *args, **kwargs)
            return forward(self, *args, **kwargs)

        kind.forward = compute
    module._nf4conv_is_packed = True  # type: ignore[assignment]
