"""Which tensor of one checkpoint stands for which of another: of what it was made from, or of any."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nf4conv.choose.decisions import PackedMatrix
from nf4conv.choose.selection import split_experts
from nf4conv.models.families import families_of, is_transposed
from nf4conv.models.module_names import HEADS, module_of
from nf4conv.plan.jobs import FLOAT_TAGS, PackJob, footprint
from nf4conv.sources.source import Source
from nf4conv.sources.stored_weights import StoredWeight, Structure
from nf4conv.sources.tensors import DTYPE_BITS, Strided, TensorInfo

_BUFFERS: Final = re.compile(
    r"(^|\.)(position_ids|token_type_ids|inv_freq|masked_bias|attn\.bias|attention\.bias)$"
)
"""Computed at load time; transformers leaves them out of what it saves."""


@dataclass(frozen=True)
class Pairs:
    """What is to be compared with what."""

    weights: Sequence[
        tuple[StoredWeight, PackJob]
    ] = ()  # with how to read what the packed weight was made from
    copies: Sequence[
        tuple[TensorInfo, TensorInfo]
    ] = ()  # of each that is not packed the tensor of the source


def pair(structure: Structure, source: Source) -> Pairs:
    """Find the counterpart of every tensor, and note those that have none."""
    by_name = {tensor.name: tensor for tensor in source.tensors}
    pairs = Pairs(tuple(_weights(structure, source, by_name)), tuple(_copies(structure, by_name)))
    used = {*structure.weights, *structure.plain, *(job.source.name for _, job in pairs.weights)}
    is_tied = bool((source.config or {}).get("tie_word_embeddings", True))
    for tensor in source.tensors:
        if tensor.name not in used:
            is_fault = not (
                (is_tied and module_of(tensor.name) in HEADS) or _BUFFERS.search(tensor.name)
            )
            structure.note(
                "names",
                tensor.file,
                tensor.name,
                "is in the source but not here",
                is_fault=is_fault,
            )
    return pairs


def _weights(
    structure: Structure, source: Source, by_name: Mapping[str, TensorInfo]
) -> Iterator[tuple[StoredWeight, PackJob]]:
    experts = {
        matrix.name: (tensor, matrix)
        for tensor in source.tensors
        for matrix in split_experts(tensor)
    }
    for weight in structure.weights.values():
        found = by_name.get(weight.name)
        origin = (
            experts.get(weight.name)
            if found is None
            else _matrix(weight, found, source.config or {})
        )
        if origin is not None and math.prod(origin[1].shape) != weight.elements:
            found, origin = origin[0], None
        if origin is None:
            text = "is not in the source"
            if found is not None:
                text = f"was packed from {list(weight.shape)}; the source has {found.dtype} {list(found.shape)}"
            structure.note("names", weight.values.file, weight.name, text)
            continue
        tensor, matrix = origin
        yield (
            weight,
            PackJob(tensor, matrix, "stored in 4 bits", footprint(weight.format, matrix.shape)),
        )


def _copies(
    structure: Structure, by_name: Mapping[str, TensorInfo]
) -> Iterator[tuple[TensorInfo, TensorInfo]]:
    floats = {*FLOAT_TAGS}
    for tensor in structure.plain.values():
        found = by_name.get(tensor.name)
        if found is None:
            structure.note("names", tensor.file, tensor.name, "is not in the source")
        elif found.shape != tensor.shape or not (
            found.dtype == tensor.dtype or {found.dtype, tensor.dtype} <= floats
        ):
            text = f"is {tensor.dtype} {list(tensor.shape)}, but the source has {found.dtype} {list(found.shape)}"
            structure.note("copies", tensor.file, tensor.name, text)
        else:
            yield tensor, found


def alike(tensors: Sequence[TensorInfo], others: Sequence[TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors by name; experts in one tensor are taken apart where the other checkpoint has them
    one by one.
    """
    names = {other.name for other in others}
    found = {}
    for tensor in tensors:
        experts = () if tensor.encoding is not None else _experts(tensor)
        is_apart = any(expert.name in names for expert in experts)
        found.update({part.name: part for part in (experts if is_apart else (tensor,))})
    return found


def _experts(tensor: TensorInfo) -> tuple[TensorInfo, ...]:
    """The weights of stacked experts as views of the stack."""
    size = DTYPE_BITS[tensor.dtype] // 8
    found = []
    for matrix in split_experts(tensor):
        columns, (first, _) = tensor.shape[2], matrix.columns or (0, 0)
        outputs, inputs = matrix.shape
        length = (inputs - 1) * columns + outputs
        start = tensor.start + ((matrix.expert or 0) * tensor.shape[1] * columns + first) * size
        stored = tensor._replace(shape=(length,), start=start, stop=start + length * size)
        encoding = Strided(stored, strides=(1, columns))
        found.append(stored._replace(name=matrix.name, shape=matrix.shape, encoding=encoding))
    return tuple(found)


def _matrix(
    weight: StoredWeight, source: TensorInfo, config: Mapping[str, Any]
) -> tuple[TensorInfo, PackedMatrix] | None:
    shape = weight.shape
    if source.dtype not in FLOAT_TAGS:
        return None
    if len(shape) == 2 and is_transposed(module_of(weight.name), families_of(config)):
        rows, columns = shape
        return (
            (source, PackedMatrix(weight.name, (rows, columns), True))
            if source.shape == (columns, rows)
            else None
        )
    if source.shape != shape:
        return None
    if (
        len(shape) != 2 and source.encoding is None
    ):  # blocks run over the flat order, whatever the shape
        source = source._replace(shape=(1, source.elements))
    height, width = shape if len(shape) == 2 else (1, source.elements)
    return source, PackedMatrix(weight.name, (height, width))
