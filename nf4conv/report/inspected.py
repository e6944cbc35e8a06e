"""Describes the tensors of a checkpoint by its headers, and how its experts are stored."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nf4conv.choose.decisions import PackedMatrix
from nf4conv.choose.experts import readers_of
from nf4conv.format.dtypes import DTYPE_NAMES
from nf4conv.format.layout import split_component
from nf4conv.models.experts import find_stack, single_expert
from nf4conv.models.families import layouts_of
from nf4conv.models.module_names import module_of
from nf4conv.models.name_patterns import ROUTER
from nf4conv.plan.rows import TensorRow
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.tensors import TensorInfo


def inspected_rows(
    tensors: Sequence[TensorInfo], weights: Mapping[str, Bitsandbytes4bit]
) -> Iterator[TensorRow]:
    """Yields a row for each tensor; all components of a packed weight share one.

    `weights` are the packed weights that can be decoded, by name.
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
        parts = {"": tensor, **components.get(tensor.name, {})}
        row = TensorRow(
            name=tensor.name,
            file=tensor.file.name,
            dtype=DTYPE_NAMES.get(tensor.dtype, tensor.dtype),
            shape=tensor.shape,
            parameters=tensor.elements,
            bytes=sum(part.nbytes for part in parts.values()),
            encoding="" if tensor.encoding is None else tensor.encoding.name,
        )
        weight = weights.get(tensor.name)
        yield row if weight is None else _as_packed(row, parts, weight)


def _as_packed(
    row: TensorRow, parts: Mapping[str, TensorInfo], weight: Bitsandbytes4bit
) -> TensorRow:
    return replace(
        row,
        dtype=weight.format.dtype,
        shape=weight.shape,
        parameters=weight.elements,
        encoding="",
        format=weight.format,
        nested_offset=weight.nested_offset,
        components={suffix: f"{part.dtype} {list(part.shape)}" for suffix, part in parts.items()},
    )


def layout_of_experts(rows: Sequence[TensorRow], config: Mapping[str, Any]) -> str:
    """Returns a line that says how the experts of a checkpoint are stored, and what loads them.

    Empty if it has no experts, or nothing in 4 bits.
    """
    experts = [row for row in rows if _is_expert(row, config)]
    packed = [row for row in experts if row.format is not None]
    if not experts or not any(row.format is not None for row in rows):
        return ""
    if not packed:
        return "experts are in 16 bits, which loads everywhere"
    text = _readers(rows, packed, config)
    kept = len(experts) - len(packed)
    if kept:
        text += f'; {kept:,} of {len(experts):,} weights of experts are in 16 bits ("dynamic")'
    return text


def _is_expert(row: TensorRow, config: Mapping[str, Any]) -> bool:
    """Returns True for a weight of experts: of one, or of all that are stacked in a tensor."""
    single = single_expert(row.name)
    if single is not None:
        return single.leaf == "weight"
    return len(row.shape) == 3 and find_stack(row.name, layouts_of(config)) is not None


def _readers(
    rows: Sequence[TensorRow], packed: Sequence[TensorRow], config: Mapping[str, Any]
) -> str:
    """Returns what loads packed experts."""
    singles = [single_expert(row.name) for row in packed]
    if any(single is not None and single.is_of_unsloth for single in singles):
        return (
            "experts are packed under the names that Unsloth gives gpt-oss (gate_up_projs.N), "
            "which Unsloth and transformers 5 with nf4conv installed read"
        )
    quantization = config.get("quantization_config")
    has_no_skip_list = isinstance(quantization, Mapping) and not quantization.get(
        "llm_int8_skip_modules"
    )
    has_stacks = any(len(row.shape) == 3 for row in packed)
    routers = [row for row in rows if row.format and ROUTER.search(module_of(row.name))]
    if has_no_skip_list and routers and not has_stacks:
        return (
            "experts are packed one by one as transformers 4 saves them, which transformers 4 and "
            "transformers 5 with nf4conv installed read"
        )
    assert packed[0].format is not None
    matrices = [PackedMatrix(row.name, row.shape) for row in packed]
    readers = readers_of(matrices, config, packed[0].format.quant_type)
    if readers is None:
        return "experts are packed one by one, which transformers 4 and 5 read for this family"
    return readers.text
