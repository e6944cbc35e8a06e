"""Undoes what llama.cpp's converter did to weights (the classes in its folder conversion/)."""

import torch

from nf4conv.format.gguf import FUSED, NEGATIVE_EXP, PLUS_ONE, ROTARY, TILED, TRANSPOSED


def undo_change(
    values: torch.Tensor, change: str, heads: int, key_value_heads: int
) -> torch.Tensor:
    """Returns a weight as it was before it was converted.

    Args:
        values: the weight as it is in the file: [rows], or [rows, columns].
        change: what was done to it, one of the words of format/gguf.py.
        heads: how many heads the rows are divided into; of fused rows, those of the queries; of
            tiled columns, those of the keys.
        key_value_heads: heads of the keys and values in fused rows; of tiled columns, the heads
            that share a key.

    Returns:
        The weight; in float32 where the change was arithmetic.
    """
    if change == ROTARY:
        halves = values.view(heads, -1, 2, *values.shape[1:])
        return halves.transpose(1, 2).reshape(values.shape)
    if change == FUSED:
        return _undo_fused(values, heads, key_value_heads)
    if change == TILED:
        by_number = values.view(values.shape[0], key_value_heads, heads, -1)
        return by_number.transpose(1, 2).reshape(values.shape)
    if change == TRANSPOSED:
        return values.t().contiguous()
    if change == PLUS_ONE:
        return values.float() - 1
    if change == NEGATIVE_EXP:
        return torch.log(-values.float())
    raise AssertionError(change)


def _undo_fused(values: torch.Tensor, heads: int, key_value_heads: int) -> torch.Tensor:
    """Returns rows in groups: the queries that share a key and a value, that key, that value."""
    size = values.shape[0] // (heads + 2 * key_value_heads)
    rest = values.shape[1:]
    queries, keys, values_of_heads = torch.split(
        values, [heads * size, key_value_heads * size, key_value_heads * size]
    )
    groups = [
        queries.reshape(key_value_heads, -1, size, *rest),
        keys.reshape(key_value_heads, 1, size, *rest),
        values_of_heads.reshape(key_value_heads, 1, size, *rest),
    ]
    return torch.cat(groups, dim=1).reshape(values.shape)
