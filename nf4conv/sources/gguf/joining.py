"""Puts tensors together that are several in the file and one in transformers.

Each function undoes what a class of llama.cpp's converter did, which its docstring names. It gets
the tensors in the order in which families.toml names them, and the sizes of the metadata by their
keys without the architecture's name.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from nf4conv.format.gguf import NEGATIVE_EXP, TILED, TRANSPOSED
from nf4conv.sources.arranged import StackedExperts
from nf4conv.sources.gguf.blocks import matrix_of, rows_of, undone
from nf4conv.sources.gguf.header import positive
from nf4conv.sources.tensors import TensorInfo

Parts: TypeAlias = Sequence[TensorInfo]
"""The tensors of a file that are one in transformers."""

Sizes: TypeAlias = Mapping[str, Any]
"""The metadata without the architecture's name in its keys."""

_MOST_GROUPS: Final = 2**16
"""Experts or heads of a layer, many more than any model has."""


Stack: TypeAlias = tuple[StackedExperts, tuple[int, ...]]
"""How the parts are put together, and the shape of the whole.

Groups are those of each expert or head: matrices above each other.
"""


def join_experts(parts: Parts, _sizes: Sizes) -> Stack:
    """Returns [experts, rows, in]: the rows of each part one after the other (GraniteMoeModel)."""
    return _experts(parts)


def join_transposed_experts(parts: Parts, _sizes: Sizes) -> Stack:
    """Returns [experts, in, rows]: the transpose of what `join_experts` returns (Llama4Model)."""
    return _experts(parts, is_transposed=True)


def join_alternating_experts(parts: Parts, _sizes: Sizes) -> Stack:
    """Returns [experts, in, rows], of biases [experts, rows]: rows of the parts alternate.

    Source: GptOssModel.
    """
    _require(len({part.shape for part in parts}) == 1)
    return _experts(parts, is_transposed=len(parts[0].shape) == 3, is_interleaved=True)


def join_rows(parts: Parts, _sizes: Sizes) -> Stack:
    """Returns [rows, in]: the rows of each part one after the other (GraniteMoeModel)."""
    _require(_are_as_wide(parts))
    rows = sum(part.shape[0] for part in parts)
    return StackedExperts((tuple(parts),)), (rows, *parts[0].shape[1:])


def join_latent_heads(parts: Parts, _sizes: Sizes) -> Stack:
    """Returns [heads · (key + value), latent] of [heads, latent, key] and [heads, value, latent].

    Source: DeepseekV2Model, which takes kv_b_proj apart.
    """
    keys, values = parts
    _require(len(keys.shape) == 3)
    _require(len(values.shape) == 3)
    _require(keys.shape[1] == values.shape[2])
    groups = []
    for head in range(_common_count(parts)):
        key = undone(matrix_of(keys, head), TRANSPOSED)
        groups.append((key, matrix_of(values, head)))
    rows_of_head = keys.shape[2] + values.shape[1]
    shape = (len(groups) * rows_of_head, keys.shape[1])
    return StackedExperts(tuple(groups)), shape


def join_linear_attention(parts: Parts, sizes: Sizes) -> Stack:
    """Returns query, key, values and gates of each key head, one head after the other.

    The first part has all queries, all keys and all values; the second all gates. Source:
    Qwen3NextModel, which takes in_proj_qkvz apart.
    """
    mixed, gates = parts
    _require(_are_as_wide(parts))
    heads = _size(sizes, "ssm.group_count")
    keys = heads * _size(sizes, "ssm.state_size")
    values = _size(sizes, "ssm.inner_size")
    _require(values % heads == 0 and gates.shape[0] == values)
    _require(mixed.shape[0] == 2 * keys + values)
    before_values = 2 * keys
    kinds = (
        rows_of(mixed, 0, keys),
        rows_of(mixed, keys, before_values),
        rows_of(mixed, before_values, before_values + values),
        gates,
    )
    groups = []
    for head in range(heads):
        group = tuple(_share(kind, head, heads) for kind in kinds)
        groups.append(group)
    rows = mixed.shape[0] + gates.shape[0]
    width = mixed.shape[1:]
    return StackedExperts(tuple(groups)), (rows, *width)


def join_tiled_heads(parts: Parts, sizes: Sizes) -> Stack:
    """Returns rows of value heads sorted by the keys that they share.

    Rows of queries and keys may stand before them. Source: _LinearAttentionVReorderBase.
    """
    [tensor] = parts
    return StackedExperts((_untiled(tensor, sizes, None),)), tensor.shape


def join_tiled_states(parts: Parts, sizes: Sizes) -> Stack:
    """Returns logarithms sorted as by `join_tiled_heads`; the converter stored -exp of them."""
    [tensor] = parts
    return StackedExperts((_untiled(tensor, sizes, NEGATIVE_EXP),)), tensor.shape


def join_tiled_channels(parts: Parts, sizes: Sizes) -> Stack:
    """Returns convolutions, [channels, 1, width], sorted as by `join_tiled_heads`."""
    [tensor] = parts
    _require(len(tensor.shape) == 2)
    channels, width = tensor.shape
    return StackedExperts((_untiled(tensor, sizes, None),)), (channels, 1, width)


def join_tiled_columns(parts: Parts, sizes: Sizes) -> Stack:
    """Returns a matrix whose columns are sorted as `join_tiled_heads` sorts rows."""
    [tensor] = parts
    keys, shared = _heads_of_keys(sizes)
    heads = keys * shared
    _require(len(tensor.shape) == 2 and tensor.shape[1] % heads == 0)
    return StackedExperts(((undone(tensor, TILED, keys, shared),),)), tensor.shape


def _untiled(tensor: TensorInfo, sizes: Sizes, change: str | None) -> tuple[TensorInfo, ...]:
    """Returns the rows of a tensor, those of values sorted by the keys that they share."""
    keys, shared = _heads_of_keys(sizes)
    rows = tensor.shape[0] if tensor.shape else 0
    heads = keys * shared
    values = heads  # one row for each head
    if rows != values:
        values = _size(sizes, "ssm.inner_size")
    before = rows - values
    _require(rows > 0 and before >= 0 and values % heads == 0)
    size = values // heads
    runs = [(0, before)] if before else []
    for key in range(keys):
        for number in range(shared):
            first = before + (number * keys + key) * size
            runs.append((first, first + size))
    pieces = [rows_of(tensor, first, stop) for first, stop in runs]
    if change is not None:
        pieces = [undone(piece, change) for piece in pieces]
    return tuple(pieces)


def _heads_of_keys(sizes: Sizes) -> tuple[int, int]:
    """Returns how many keys linear attention has, and how many values share each of them."""
    keys = _size(sizes, "ssm.group_count")
    values = _size(sizes, "ssm.time_step_rank")
    _require(values % keys == 0 and values <= _MOST_GROUPS)
    return keys, values // keys


def count_matrices(stack: TensorInfo) -> int:
    """Returns how many matrices a stack has; raises a ValueError if that cannot be."""
    count = stack.shape[0] if stack.shape else 0
    if not 0 < count <= _MOST_GROUPS:
        raise ValueError(f"is a stack of {count:,} matrices, which cannot be")
    return count


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError("does not go with the others of its layer, or with the metadata")


def _are_as_wide(parts: Parts) -> bool:
    """Returns True if parts are matrices of one width."""
    widths = {part.shape[1:] for part in parts}
    return len(widths) == 1 and len(parts[0].shape) == 2


def _experts(parts: Parts, *, is_transposed: bool = False, is_interleaved: bool = False) -> Stack:
    """Stacks the matrices of each expert, or the vectors of biases."""
    columns = {part.shape[2:] for part in parts}
    dimensions = {len(part.shape) for part in parts}
    _require(len(columns) == 1 and dimensions <= {2, 3})
    groups = []
    for expert in range(_common_count(parts)):
        matrices = [matrix_of(part, expert) for part in parts]
        groups.append(tuple(matrices))
    matrix = (sum(part.shape[1] for part in parts), *parts[0].shape[2:])
    if is_transposed:
        matrix = matrix[::-1]
    return StackedExperts(tuple(groups), is_transposed, is_interleaved), (len(groups), *matrix)


def _common_count(stacks: Sequence[TensorInfo]) -> int:
    counts = {count_matrices(stack) for stack in stacks}
    _require(len(counts) == 1)
    return counts.pop()


def _share(tensor: TensorInfo, index: int, count: int) -> TensorInfo:
    """Returns one of `count` equal runs of rows."""
    rows = tensor.shape[0] // count
    return rows_of(tensor, index * rows, (index + 1) * rows)


def _size(sizes: Sizes, key: str) -> int:
    value = positive(sizes, key)
    if value is None:
        raise ValueError(f"needs {key}, which the metadata does not say")
    return value
