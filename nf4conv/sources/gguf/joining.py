"""Puts tensors together that are several in the file and one in transformers.

Each function undoes what a class of llama.cpp's converter did, which its docstring names. It gets
the tensors in the order in which families.toml names them, and the sizes of the metadata by their
keys without the architecture's name. It raises a ValueError if they do not go together.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias

from nf4conv.format.gguf import TILED, TRANSPOSED
from nf4conv.sources.arranged import StackedExperts
from nf4conv.sources.gguf.blocks import matrix_of, rows_of, undone
from nf4conv.sources.gguf.header import Sizes, positive
from nf4conv.sources.tensors import TensorInfo

Parts: TypeAlias = Sequence[TensorInfo]
"""The tensors of a file that are one in transformers."""

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
    return _rows([parts])


def join_latent_heads(parts: Parts, _sizes: Sizes) -> Stack:
    """Returns [heads · (key + value), latent] of [heads, latent, key] and [heads, value, latent].

    Source: DeepseekV2Model, which takes kv_b_proj apart.
    """
    keys, values = parts
    _require(len(keys.shape) == 3)
    groups = []
    for head in range(_common_count(parts)):
        key = undone(matrix_of(keys, head), TRANSPOSED)
        groups.append([key, matrix_of(values, head)])
    return _rows(groups)


def join_linear_attention(parts: Parts, sizes: Sizes) -> Stack:
    """Returns query, key, values and gates of each key head, one head after the other.

    The first part has all queries, all keys and all values; the second all gates. Source:
    Qwen3NextModel, which takes in_proj_qkvz apart.
    """
    mixed, gates = parts
    heads = _size(sizes, "ssm.group_count")
    key = _size(sizes, "ssm.state_size")
    values = _size(sizes, "ssm.inner_size")
    before_values = 2 * heads * key
    _require(values % heads == 0)
    _require(mixed.shape[:1] == (before_values + values,))
    _require(gates.shape[:1] == (values,))
    value = values // heads
    groups = []
    for head in range(heads):
        group = [
            rows_of(mixed, head * key, key),
            rows_of(mixed, (heads + head) * key, key),
            rows_of(mixed, before_values + head * value, value),
            rows_of(gates, head * value, value),
        ]
        groups.append(group)
    return _rows(groups)


def join_tiled_heads(parts: Parts, sizes: Sizes) -> Stack:
    """Returns rows of value heads sorted by the keys that they share.

    Rows of queries and keys may stand before them. Source: _LinearAttentionVReorderBase.
    """
    [tensor] = parts
    keys, shared = _heads_of_keys(sizes)
    rows = tensor.shape[0] if tensor.shape else 0
    values = keys * shared  # one row for each head
    if rows != values:
        values = _size(sizes, "ssm.inner_size")
    before = rows - values
    _require(before >= 0 and values % (keys * shared) == 0)
    size = values // (keys * shared)
    pieces = [rows_of(tensor, 0, before)] if before else []
    for key in range(keys):
        for number in range(shared):
            first = before + (number * keys + key) * size
            pieces.append(rows_of(tensor, first, size))
    return _rows([pieces])


def join_tiled_columns(parts: Parts, sizes: Sizes) -> Stack:
    """Returns a matrix whose columns are sorted as `join_tiled_heads` sorts rows."""
    [tensor] = parts
    keys, shared = _heads_of_keys(sizes)
    _require(len(tensor.shape) == 2 and tensor.shape[1] % (keys * shared) == 0)
    return _rows([[undone(tensor, TILED, keys, shared)]])


def count_matrices(stack: TensorInfo) -> int:
    """Returns how many matrices a stack has; raises a ValueError if that cannot be."""
    count = stack.shape[0] if stack.shape else 0
    if not 0 < count <= _MOST_GROUPS:
        raise ValueError(f"is a stack of {count:,} matrices, which cannot be")
    return count


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError("does not go with the others of its layer, or with the metadata")


def _rows(groups: Sequence[Sequence[TensorInfo]]) -> Stack:
    """Stacks matrices of one width, or vectors, above each other."""
    widths = set()
    rows = 0
    for group in groups:
        for matrix in group:
            widths.add(matrix.shape[1:])
            rows += matrix.shape[0]
    width = widths.pop()
    _require(not widths and len(width) < 2)
    return StackedExperts(tuple(map(tuple, groups))), (rows, *width)


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


def _common_count(stacks: Parts) -> int:
    """Returns how many matrices each of some stacks has."""
    counts = {count_matrices(stack) for stack in stacks}
    _require(len(counts) == 1)
    return counts.pop()


def _heads_of_keys(sizes: Sizes) -> tuple[int, int]:
    """Returns how many keys linear attention has, and how many values share each of them."""
    keys = _size(sizes, "ssm.group_count")
    values = _size(sizes, "ssm.time_step_rank")
    _require(values % keys == 0 and values <= _MOST_GROUPS)
    return keys, values // keys


def _size(sizes: Sizes, key: str) -> int:
    value = positive(sizes, key)
    if value is None:
        raise ValueError(f"needs {key}, which the metadata does not say")
    return value
