"""Presents the tensors of a GGUF file under the names and in the layout of transformers."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nf4conv.errors import SourceError
from nf4conv.format.gguf import PLUS_ONE, ROTARY, TRANSPOSED
from nf4conv.sources.gguf.blocks import as_stored, matrix_of, undone
from nf4conv.sources.gguf.families import CHANNELS, FLAT, GgufFamily, Join
from nf4conv.sources.gguf.header import GgufTensor, counts_of, positive
from nf4conv.sources.gguf.joining import count_matrices
from nf4conv.sources.tensors import TensorInfo

_COMPUTED: Final = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
"""Tensors that a converter computed, and that no checkpoint of transformers has."""

_IN_LAYER: Final = re.compile(r"((?:enc\.|dec\.)?blk)\.(\d+)\.(.+)")


def sizes_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata without the architecture's name in its keys."""
    prefix = f"{metadata.get('general.architecture')}."
    return {key.removeprefix(prefix): value for key, value in metadata.items()}


def names_of(tensors: Sequence[GgufTensor]) -> set[str]:
    """Returns the names of tensors, and the same with `*` for the number of a layer."""
    names = {tensor.name for tensor in tensors}
    return names | {_pattern_and_layer(name)[0] for name in names}


def present(
    tensors: Sequence[GgufTensor], family: GgufFamily, sizes: Mapping[str, Any], dtype: str
) -> tuple[TensorInfo, ...]:
    """Returns the tensors that a checkpoint of transformers would have, in the dtype of a tag."""
    joins = {part: join for join in family.joined for part in join.parts}
    waiting: dict[tuple[Join, str], dict[str, TensorInfo]] = {}
    found: dict[str, TensorInfo] = {}
    heads = _heads_of(sizes)
    for described in tensors:
        tensor = as_stored(described, dtype)
        pattern, layer = _pattern_and_layer(tensor.name)
        if tensor.name in _COMPUTED:
            continue
        if pattern in joins:
            waiting.setdefault((joins[pattern], layer), {})[pattern] = tensor
            continue
        for presented in _presented(tensor, family, heads):
            _add(found, presented, tensor)
    for (join, layer), parts in waiting.items():
        first = next(iter(parts.values()))
        _add(found, _joined(join, layer, parts, sizes), first)
    return tuple(found.values())


def _add(found: dict[str, TensorInfo], presented: TensorInfo, tensor: TensorInfo) -> None:
    if presented.name in found:
        raise _misfit(tensor, f"stands for {presented.name}, which is there twice")
    found[presented.name] = presented


def _heads_of(sizes: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many heads of queries, and of keys and values, the metadata names; 1 and 1 if it
    names none.
    """
    queries = positive(sizes, "attention.head_count")
    if queries is None:
        return 1, 1
    keys = positive(sizes, "attention.head_count_kv")
    if keys is None:  # those of each layer, 0 where it has no attention
        keys = max(counts_of(sizes, "attention.head_count_kv"), default=queries)
    if keys == 0 or queries % keys != 0:
        keys = queries
    return queries, keys


def _pattern_and_layer(name: str) -> tuple[str, str]:
    """Returns a name with `*` for the number of a layer, and that number, which may be empty."""
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return name, ""
    return f"{match[1]}.*.{match[3]}", match[2]


def _split(name: str) -> tuple[str, str]:
    """Divides the name of a tensor into that of its module, and its ending with a dot."""
    module, dot, ending = name.rpartition(".")
    if ending in ("weight", "bias"):
        return module, f"{dot}{ending}"
    return name, ""  # such as blk.0.ssm_a


def _presented(
    tensor: TensorInfo, family: GgufFamily, heads: tuple[int, int]
) -> Iterator[TensorInfo]:
    """Yields what one tensor of the file stands for: itself, or one matrix for each expert."""
    pattern, layer = _pattern_and_layer(tensor.name)
    module, ending = _split(pattern)
    if "#" in family.names.get(module, ""):
        name = family.names[module].replace("*", layer)
        yield from _experts(tensor, f"{name}{ending}")
        return
    if pattern in family.names:
        name = family.names[pattern].replace("*", layer)
    elif module in family.names:
        name = f"{family.names[module].replace('*', layer)}{ending}"
    else:
        raise _misfit(tensor, f"has no name in {family.architecture}, as far as nf4conv knows")
    change = family.changed.get(module)
    if change in (TRANSPOSED, PLUS_ONE) and ending == ".bias":
        change = None
    presented = tensor._replace(name=name)
    if change is not None:
        presented = _changed(tensor, module, change, heads)._replace(name=name)
    shape = family.shapes.get(pattern)
    if shape == CHANNELS and len(tensor.shape) < 2:
        raise _misfit(tensor, f"is of shape {list(tensor.shape)}, and no convolution of channels")
    yield presented if shape is None else _reshaped(presented, shape)


def _experts(stack: TensorInfo, name: str) -> Iterator[TensorInfo]:
    """Yields the matrices of a stack, or its vectors, `#` in the name for their number."""
    dimensions = 3 if stack.name.endswith("_exps.weight") else 2
    if not dimensions <= len(stack.shape) <= 3:
        raise _misfit(stack, f"is of shape {list(stack.shape)}, and no stack of experts")
    try:
        count = count_matrices(stack)
    except ValueError as error:
        raise _misfit(stack, str(error)) from error
    for expert in range(count):
        yield matrix_of(stack, expert)._replace(name=name.replace("#", str(expert)))


def _joined(
    join: Join, layer: str, parts: Mapping[str, TensorInfo], sizes: Mapping[str, Any]
) -> TensorInfo:
    """Returns a tensor that is several in the file."""
    first = next(iter(parts.values()))
    for part in join.parts:
        if part not in parts:
            raise _misfit(first, f"goes with {part.replace('*', layer)}, which is missing")
    tensors = [parts[part] for part in join.parts]
    try:
        encoding, shape = join.put_together(tensors, sizes)
    except ValueError as error:
        raise _misfit(first, str(error)) from error
    name = join.name.replace("*", layer)
    return first._replace(name=name, shape=shape, encoding=encoding)


def _changed(tensor: TensorInfo, module: str, change: str, heads: tuple[int, int]) -> TensorInfo:
    """Returns a tensor that the converter changed, as it was before."""
    if change == TRANSPOSED and len(tensor.shape) != 2:
        raise _misfit(tensor, f"is of shape {list(tensor.shape)}, and no matrix")
    if change != ROTARY:
        return undone(tensor, change)
    queries, keys = heads
    count = keys if module.endswith("attn_k") else queries
    rows = math.prod(tensor.shape[:1])
    if rows % (2 * count) != 0:
        raise _misfit(tensor, f"has {rows} rows, which do not go with {count} heads")
    return undone(tensor, change, count)


def _reshaped(presented: TensorInfo, shape: str) -> TensorInfo:
    """Returns a tensor in the shape that transformers gives it."""
    if shape == FLAT:
        return presented._replace(shape=(presented.elements,))
    assert shape == CHANNELS
    *channels, width = presented.shape
    return presented._replace(shape=(math.prod(channels), 1, width))


def _misfit(tensor: TensorInfo, what: str) -> SourceError:
    return SourceError.about(tensor.file, tensor.name, what)
