"""Computes a layer of packed experts."""

import torch


def packed_experts_forward(
    module: torch.nn.Module,  # noqa: ARG001 - kernels are to come
    hidden_states: torch.Tensor,  # noqa: ARG001
    top_k_index: torch.Tensor,  # noqa: ARG001
    top_k_weights: torch.Tensor,  # noqa: ARG001
) -> torch.Tensor | None:
    """Returns what the experts compute, or None to have the chosen implementation do it.

    Args:
        module: the layer of experts; `nf4conv.moe.dispatch.packed_weights` returns its weights.
        hidden_states: [tokens, hidden].
        top_k_index: [tokens, k] integers, the experts of each token.
        top_k_weights: [tokens, k], their weights.

    Returns:
        [tokens, hidden], or None.
    """
    return None
