"""Describes the tensors of a checkpoint: a row for each, and sums by kind."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nf4conv.format.dtypes import DTYPE_NAMES, STORAGE_DTYPES
from nf4conv.format.layout import QUANT_STATE_PREFIX
from nf4conv.report.places import by_kind, place_of
from nf4conv.report.rows.figures import format_name
from nf4conv.report.rows.inspection import (
    InspectedKind,
    InspectedRow,
    InspectionTotals,
    StoredQuantization,
)
from nf4conv.sources.header import LARGEST_SIZE
from nf4conv.sources.stored_weights import split_component
from nf4conv.sources.tensors import TensorInfo


def inspected_rows(
    tensors: Sequence[TensorInfo], contents: Mapping[str, bytes]
) -> Iterator[InspectedRow]:
    """Yields a row for each tensor; all components of a packed weight share one.

    Args:
        tensors: all tensors of a checkpoint.
        contents: the bytes of quant states and code maps, by name.
    """
    names = {tensor.name for tensor in tensors}
    components: defaultdict[str, dict[str, TensorInfo]] = defaultdict(dict)
    alone: list[TensorInfo] = []
    for tensor in tensors:
        owner, suffix = split_component(tensor.name)
        if suffix and owner in names:
            components[owner][suffix] = tensor
        else:
            alone.append(tensor)
    for tensor in alone:
        yield _row(tensor, components.get(tensor.name, {}), contents)


def _row(
    tensor: TensorInfo, components: Mapping[str, TensorInfo], contents: Mapping[str, bytes]
) -> InspectedRow:
    """Describes one tensor, or one packed weight with its components by suffix."""
    size = tensor.nbytes + sum(part.nbytes for part in components.values())
    shape = tensor.shape
    dtype = DTYPE_NAMES.get(tensor.dtype, tensor.dtype)
    format = dtype if tensor.encoding is None else tensor.encoding.name
    quantization = None
    state = _state_of(components, contents)
    if state is not None:
        shape = state.shape
        dtype = state.dtype
        quantization = _quantization(state, tensor, components)
        format = format_name(state.quant_type, quantization.double_quant, state.blocksize)
    parameters = math.prod(shape)
    bits_per_parameter = 8 * size / max(parameters, 1)
    return InspectedRow(
        name=tensor.name,
        file=tensor.file.name,
        dtype=dtype,
        shape=shape,
        parameters=parameters,
        bytes=size,
        bits_per_parameter=bits_per_parameter,
        format=format,
        quantization=quantization,
    )


@dataclass(frozen=True)
class _QuantState:
    """The fields of a quant state, as far as they can be told."""

    quant_type: str
    blocksize: int
    dtype: str  # of the weight
    shape: tuple[int, ...]  # of the weight
    nested_offset: Any  # whatever the file says; None if it says nothing


def _quantization(
    state: _QuantState, values: TensorInfo, components: Mapping[str, TensorInfo]
) -> StoredQuantization:
    """Describes how a packed weight is stored, by its quant state and its tensors."""
    tensors = {"": _dtype_and_shape(values)}
    for suffix, part in components.items():
        tensors[suffix] = _dtype_and_shape(part)
    storage = STORAGE_DTYPES.get(values.dtype, values.dtype)
    return StoredQuantization(
        quant_type=state.quant_type,
        blocksize=state.blocksize,
        double_quant="nested_absmax" in components,
        nested_offset=state.nested_offset,
        storage=storage,
        tensors=tensors,
    )


def _dtype_and_shape(tensor: TensorInfo) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _state_of(
    components: Mapping[str, TensorInfo], contents: Mapping[str, bytes]
) -> _QuantState | None:
    """Reads the quant state of a weight; None if it has none, or one that says too little."""
    for suffix, part in components.items():
        if suffix.startswith(QUANT_STATE_PREFIX):
            return _read_state(contents.get(part.name, b""))
    return None


def _read_state(blob: bytes) -> _QuantState | None:
    """Reads a quant state; None if it is none. `verify` says what is wrong with it."""
    try:
        fields = json.loads(blob)
        shape = tuple(int(size) for size in fields["shape"])
        if min(shape, default=0) < 0 or math.prod(shape) >= LARGEST_SIZE:
            return None
        return _QuantState(
            quant_type=str(fields["quant_type"]),
            blocksize=int(fields["blocksize"]),
            dtype=str(fields["dtype"]),
            shape=shape,
            nested_offset=fields.get("nested_offset"),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def inspected_kinds(rows: Sequence[InspectedRow]) -> Iterator[InspectedKind]:
    """Sums up the rows of each kind of module in each stack of layers."""
    for stack, kind, members in by_kind(rows, lambda row: place_of(row.name.removesuffix(".bias"))):
        totals = InspectionTotals.of(members)
        formats = sorted({row.format for row in members})
        yield InspectedKind(
            stack=stack,
            kind=kind,
            tensors=totals.tensors,
            formats=tuple(formats),
            parameters=totals.parameters,
            bytes=totals.bytes,
            bits_per_parameter=totals.bits_per_parameter,
        )
