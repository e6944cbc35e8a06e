"""Describes the tensors of a checkpoint as they are stored, and how its experts are."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nf4conv.choose.decisions import PackedMatrix
from nf4conv.choose.experts import readers_of
from nf4conv.format.dtypes import DTYPE_NAMES
from nf4conv.format.layout import split_component
from nf4conv.plan.rows import TensorRow
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.tensors import TensorInfo


def tensor_row(tensor: TensorInfo) -> TensorRow:
    """Describes a tensor as it is stored."""
    return TensorRow(
        name=tensor.name,
        file=tensor.file.name,
        dtype=DTYPE_NAMES.get(tensor.dtype, tensor.dtype),
        shape=tensor.shape,
        parameters=tensor.elements,
        bytes=tensor.nbytes,
        encoding="" if tensor.encoding is None else tensor.encoding.name,
    )


def weight_row(weight: Bitsandbytes4bit) -> TensorRow:
    """Describes a packed weight."""
    return TensorRow(
        name=weight.values.name,
        file=weight.values.file.name,
        dtype=weight.format.dtype,
        shape=weight.shape,
        parameters=weight.elements,
        bytes=weight.nbytes,
        format=weight.format,
    )


def inspected_rows(
    tensors: Sequence[TensorInfo], weights: Mapping[str, Bitsandbytes4bit]
) -> Iterator[TensorRow]:
    """Yields a row for each tensor; all components of a packed weight share one.

    `weights` are the packed weights that can be decoded, by name.
    """
    names = {tensor.name for tensor in tensors}
    beside: Counter[str] = Counter()  # bytes of the components of each weight
    alone: list[TensorInfo] = []
    for tensor in tensors:
        owner, suffix = split_component(tensor.name)
        if suffix and owner in names:
            beside[owner] += tensor.nbytes
        else:
            alone.append(tensor)
    for tensor in alone:
        if tensor.name in weights:
            yield weight_row(weights[tensor.name])
        else:
            yield replace(tensor_row(tensor), bytes=tensor.nbytes + beside[tensor.name])


def layout_of_experts(rows: Sequence[TensorRow], config: Mapping[str, Any]) -> str:
    """Returns a line that says how experts in 4 bits are stored, and what loads them; or nothing.

    There is none of a family whose experts load everywhere.
    """
    packed = [row for row in rows if row.format is not None]
    if not packed or packed[0].format is None:
        return ""
    matrices = [PackedMatrix(row.name, row.shape) for row in packed]
    readers = readers_of(matrices, config, packed[0].format.quant_type)
    return "" if readers is None else readers.text
