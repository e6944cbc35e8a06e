"""Presents the tensors of a GGUF file under the names and in the layout of transformers."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nf4conv.errors import SourceError
from nf4conv.format.gguf import PLUS_ONE, ROTARY, TRANSPOSED
from nf4conv.sources.gguf.blocks import as_stored, matrix_of, undone
from nf4conv.sources.gguf.families import GgufFamily, Join
from nf4conv.sources.gguf.header import GgufTensor, Sizes, counts_of, positive
from nf4conv.sources.gguf.joining import count_matrices
from nf4conv.sources.tensors import TensorInfo

_COMPUTED: Final = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
"""Tensors that a converter computed, and that no checkpoint of transformers has."""

_IN_LAYER: Final = re.compile(r"((?:enc\.|dec\.)?blk)\.(\d+)\.(.+)")


def sizes_of(metadata: Mapping[str, Any]) -> Sizes:
    """Returns the metadata without the architecture's name in its keys."""
    prefix = f"{metadata.get('general.architecture')}."
    return {key.removeprefix(prefix): value for key, value in metadata.items()}


def names_of(tensors: Sequence[GgufTensor]) -> set[str]:
    """Returns the names of tensors, and the same with `*` for the number of a layer."""
    names = {tensor.name for tensor in tensors}
    return names | {_pattern_and_layer(name)[0] for name in names}


def present(
    tensors: Sequence[GgufTensor], family: GgufFamily, sizes: Sizes, dtype: str
) -> tuple[TensorInfo, ...]:
    """Returns the tensors that a checkpoint of transformers would have, in the dtype of a tag.

    Raises a SourceError if the family has no place for a tensor, or its shape does not fit there.
    """
    joins = {part: join for join in family.joined for part in join.parts}
    # by the name of what they are joined to or their own pattern, and by their layer
    units: dict[tuple[str, str], dict[str, TensorInfo]] = {}
    for tensor in tensors:
        pattern, layer = _pattern_and_layer(tensor.name)
        if tensor.name in _COMPUTED:
            continue
        whole = joins[pattern].name if pattern in joins else pattern
        parts = units.setdefault((whole, layer), {})
        if pattern in parts:
            raise SourceError.about(tensor.file, tensor.name, "is there twice")
        parts[pattern] = as_stored(tensor, dtype)
    found: dict[str, TensorInfo] = {}
    for (_, layer), parts in units.items():
        pattern, first = next(iter(parts.items()))
        try:
            for presented in _presented(parts, joins.get(pattern), family, layer, sizes):
                if presented.name in found:
                    raise ValueError(f"stands for {presented.name}, which is there twice")
                found[presented.name] = presented
        except ValueError as error:
            raise SourceError.about(first.file, first.name, str(error)) from error
    return tuple(found.values())


def _heads_of(sizes: Sizes) -> tuple[int, int]:
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
    parts: Mapping[str, TensorInfo],
    join: Join | None,
    family: GgufFamily,
    layer: str,
    sizes: Sizes,
) -> Iterator[TensorInfo]:
    """Yields what one tensor of the file, or several that are joined, stand for: one tensor, or a
    matrix for each expert.
    """
    before = {}
    for pattern, tensor in parts.items():
        before[pattern] = _unchanged(tensor, pattern, family, sizes)
    pattern, presented = next(iter(before.items()))
    if join is None:
        name = _name_of(pattern, family)
    else:
        name = join.name
        for part in join.parts:
            if part not in parts:
                raise ValueError(f"goes with {part.replace('*', layer)}, which is missing")
        encoding, shape = join.put_together([before[part] for part in join.parts], sizes)
        presented = presented._replace(shape=shape, encoding=encoding)
    name = name.replace("*", layer)
    if "#" in name:
        yield from _experts(presented, name)
        return
    *channels, width = presented.shape or (1,)
    match family.shapes.get(pattern):
        case "flat":
            presented = presented._replace(shape=(presented.elements,))
        case "channels":
            presented = presented._replace(shape=(math.prod(channels), 1, width))
    yield presented._replace(name=name)


def _name_of(pattern: str, family: GgufFamily) -> str:
    """Returns the name in transformers, `*` in it for the number of a layer."""
    module, ending = _split(pattern)
    if pattern in family.names:
        return family.names[pattern]
    if module in family.names:
        return f"{family.names[module]}{ending}"
    raise ValueError(f"has no name in {family.architecture}, as far as nf4conv knows")


def _experts(stack: TensorInfo, name: str) -> Iterator[TensorInfo]:
    """Yields the matrices of a stack, or its vectors, `#` in the name for their number."""
    dimensions = 3 if stack.name.endswith("_exps.weight") else 2
    if not dimensions <= len(stack.shape) <= 3:
        raise ValueError(f"is of shape {list(stack.shape)}, and no stack of experts")
    for expert in range(count_matrices(stack)):
        yield matrix_of(stack, expert)._replace(name=name.replace("#", str(expert)))


def _unchanged(tensor: TensorInfo, pattern: str, family: GgufFamily, sizes: Sizes) -> TensorInfo:
    """Returns a tensor as it was before the converter changed it."""
    module, ending = _split(pattern)
    change = family.changed.get(module)
    if change is None or (change in (TRANSPOSED, PLUS_ONE) and ending == ".bias"):
        return tensor
    if change == TRANSPOSED and len(tensor.shape) != 2:
        raise ValueError(f"is of shape {list(tensor.shape)}, and no matrix")
    if change != ROTARY:
        return undone(tensor, change)
    queries, keys = _heads_of(sizes)
    count = keys if module.endswith("attn_k") else queries
    rows = math.prod(tensor.shape[:1])
    if rows % (2 * count) != 0:
        raise ValueError(f"has {rows} rows, which do not go with {count} heads")
    return undone(tensor, change, count)
