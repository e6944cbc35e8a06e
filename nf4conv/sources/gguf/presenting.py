"""Presents the tensors of a GGUF file under the names and in the layout of transformers."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nf4conv.errors import SourceError
from nf4conv.format.gguf import FUSED, PLAIN, PLUS_ONE, ROTARY, TRANSPOSED
from nf4conv.sources.encodings.types.gguf import GgufBlocks
from nf4conv.sources.gguf.families import COMPUTED, GgufFamily
from nf4conv.sources.gguf.header import GgufTensor
from nf4conv.sources.tensors import TensorInfo


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model.

    Attributes:
        queries: heads of the queries.
        keys: heads of the keys, and of the values.
    """

    queries: int
    keys: int


def heads_of(metadata: Mapping[str, Any]) -> Heads:
    """Returns the attention heads that the metadata names; 1 and 1 if it names none."""
    architecture = metadata.get("general.architecture")
    queries = metadata.get(f"{architecture}.attention.head_count")
    if not isinstance(queries, int) or queries <= 0:
        return Heads(1, 1)
    keys = metadata.get(f"{architecture}.attention.head_count_kv", queries)
    if not isinstance(keys, int) or keys <= 0 or queries % keys != 0:
        keys = queries
    return Heads(queries, keys)


def present(
    tensors: Sequence[GgufTensor], family: GgufFamily, heads: Heads, dtype: str
) -> tuple[TensorInfo, ...]:
    """Returns the tensors that a checkpoint of transformers would have.

    Args:
        tensors: those of the file.
        family: that of its architecture.
        heads: the attention heads.
        dtype: the tag of the dtype that they are presented in.

    Raises:
        SourceError: a tensor has no name in transformers, or a shape that does not go with the
            heads; the message names it.
    """
    found: dict[str, TensorInfo] = {}
    for tensor in tensors:
        if tensor.name in COMPUTED:
            continue
        for presented in _presented(tensor, family, heads, dtype):
            if presented.name in found:
                raise _misfit(tensor, f"stands for {presented.name}, which is there twice")
            found[presented.name] = presented
    return tuple(found.values())


def _presented(
    tensor: GgufTensor, family: GgufFamily, heads: Heads, dtype: str
) -> Iterator[TensorInfo]:
    """Yields what one tensor of the file stands for: itself, or one matrix for each expert."""
    module, ending = _split(tensor.name)
    layer = re.search(r"\d+", module)
    pattern = re.sub(r"\d+", "*", module, count=1) if module.startswith("blk.") else module
    number = layer[0] if layer is not None and module.startswith("blk.") else ""
    if pattern in family.experts:
        if len(tensor.shape) != 3:
            raise _misfit(tensor, f"is of shape {list(tensor.shape)}, and no stack of experts")
        name = family.experts[pattern].replace("*", number)
        for expert in range(tensor.shape[0]):
            matrix = _matrix_of(tensor, expert)
            yield _as_stored(matrix, f"{name.replace('#', str(expert))}{ending}", dtype)
        return
    if pattern not in family.names:
        raise _misfit(tensor, f"has no name in {family.architecture}, as far as nf4conv knows")
    name = f"{family.names[pattern].replace('*', number)}{ending}"
    change = family.changed.get(pattern)
    if change in (TRANSPOSED, PLUS_ONE) and ending == ".bias":
        change = None
    presented = _as_stored(tensor, name, dtype)
    if change is not None:
        presented = _changed(tensor, presented, pattern, change, heads)
    if pattern.endswith("ssm_conv1d") and ending == ".weight":
        channels, width = presented.shape
        presented = presented._replace(shape=(channels, 1, width))
    yield presented


def _split(name: str) -> tuple[str, str]:
    """Divides the name of a tensor into that of its module, and its ending with a dot."""
    module, dot, ending = name.rpartition(".")
    if ending in ("weight", "bias"):
        return module, f"{dot}{ending}"
    return name, ""  # such as blk.0.ssm_a


def _matrix_of(stack: GgufTensor, index: int) -> GgufTensor:
    """Returns one matrix of a stack, as a tensor of the file."""
    size = stack.nbytes // stack.shape[0]
    return GgufTensor(
        stack.name, stack.shape[1:], stack.block_type, stack.file, stack.start + index * size
    )


def _as_stored(tensor: GgufTensor, name: str, dtype: str) -> TensorInfo:
    """Returns a tensor of which nothing but the name was changed."""
    stop = tensor.start + tensor.nbytes
    block_type = tensor.block_type
    if block_type.name in PLAIN:
        values = TensorInfo(
            tensor.name, block_type.name, tensor.shape, tensor.file, tensor.start, stop
        )
        if block_type.name == dtype:
            return values._replace(name=name)
    else:
        size = tensor.shape[-1] // block_type.values * block_type.size
        stored_shape = (*tensor.shape[:-1], size)
        values = TensorInfo(tensor.name, "U8", stored_shape, tensor.file, tensor.start, stop)
    encoding = GgufBlocks(values, block_type.name)
    return TensorInfo(name, dtype, tensor.shape, tensor.file, tensor.start, stop, encoding)


def _changed(
    tensor: GgufTensor, presented: TensorInfo, pattern: str, change: str, heads: Heads
) -> TensorInfo:
    """Returns a tensor that the converter changed, as it was before."""
    encoding = presented.encoding
    if encoding is None:
        encoding = GgufBlocks(presented._replace(name=tensor.name), presented.dtype)
    assert isinstance(encoding, GgufBlocks)
    of_rows = heads.queries
    groups = heads.keys
    if change == ROTARY and pattern.endswith("attn_k"):
        of_rows = heads.keys
    together = of_rows * 2 if change == ROTARY else of_rows + 2 * groups
    rows = math.prod(tensor.shape[:1])
    if change in (ROTARY, FUSED) and rows % together != 0:
        raise _misfit(
            tensor, f"has {rows} rows, which do not go with {of_rows} heads in the metadata"
        )
    shape = presented.shape[::-1] if change == TRANSPOSED else presented.shape
    blocks = GgufBlocks(encoding.values, encoding.block_type, change, of_rows, groups)
    return presented._replace(shape=shape, encoding=blocks)


def _misfit(tensor: GgufTensor, what: str) -> SourceError:
    return SourceError(
        f"{tensor.file}: {tensor.name}: {what}", path=tensor.file, tensor=tensor.name
    )
