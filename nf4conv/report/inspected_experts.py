"""Says in which layout the experts of a checkpoint are, and what loads them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from nf4conv.choose.decisions import PackedMatrix
from nf4conv.choose.experts import readers_of
from nf4conv.models.experts import find_stack, single_expert
from nf4conv.models.families import layouts_of
from nf4conv.models.module_names import module_of
from nf4conv.models.name_patterns import ROUTER
from nf4conv.report.rows.inspection import InspectedRow

_UNSLOTH_NAMES: Final = (
    "experts are packed one by one under the names that Unsloth gives gpt-oss (gate_up_projs.N), "
    "which Unsloth and transformers 5 with nf4conv installed read; nf4conv dequantize gives them "
    "the names of gpt-oss"
)
_TRANSFORMERS_4: Final = (
    "experts are packed one by one as transformers 4 saves them (no skip list, routers packed "
    "too), which transformers 4 and transformers 5 with nf4conv installed read"
)


def layout_of_experts(rows: Sequence[InspectedRow], config: Mapping[str, Any]) -> str:
    """Returns how the experts of a checkpoint are stored, and what loads them.

    Args:
        rows: its tensors.
        config: the content of its config.json; empty if there is none.

    Returns:
        A line; empty if the checkpoint has no experts, or nothing in 4 bits.
    """
    if not any(row.quantization is not None for row in rows):
        return ""
    packed = []
    layers_packed = set()
    layers_kept = set()
    is_of_unsloth = False
    for row in rows:
        layer = _layer_of(row, config)
        if layer is None:
            continue
        if row.quantization is None:
            layers_kept.add(layer)
            continue
        layers_packed.add(layer)
        packed.append(row)
        single = single_expert(row.name)
        is_of_unsloth = is_of_unsloth or (single is not None and single.is_of_unsloth)
    if not packed:
        return "experts are in 16 bits, which loads everywhere" if layers_kept else ""
    if is_of_unsloth:
        text = _UNSLOTH_NAMES
    elif _is_of_transformers_4(rows, packed, config):
        text = _TRANSFORMERS_4
    else:
        text = _readers(packed, config)
    only_kept = layers_kept - layers_packed
    if only_kept:
        every = len(layers_packed | layers_kept)
        text += f'; those of {len(only_kept):,} of {every:,} layers are in 16 bits ("dynamic")'
    partly = layers_kept & layers_packed
    if partly:
        text += f"; in {len(partly):,} layers some experts are in 16 bits, which no loader reads"
    return text


def _layer_of(row: InspectedRow, config: Mapping[str, Any]) -> str | None:
    """Returns the path of the experts that a weight belongs to; None for any other tensor."""
    single = single_expert(row.name)
    if single is not None:
        return single.experts if single.leaf == "weight" else None
    if len(row.shape) not in (2, 3):
        return None
    found = find_stack(row.name, layouts_of(config))
    if found is None or found.stack.is_flat != (len(row.shape) == 2):
        return None
    return found.experts


def _is_of_transformers_4(
    rows: Sequence[InspectedRow], packed: Sequence[InspectedRow], config: Mapping[str, Any]
) -> bool:
    """Returns True for what transformers 4 saves: no skip list, and routers that are packed."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("llm_int8_skip_modules"):
        return False
    if any(len(row.shape) == 3 for row in packed):
        return False
    return any(row.quantization is not None and ROUTER.search(module_of(row.name)) for row in rows)


def _readers(packed: Sequence[InspectedRow], config: Mapping[str, Any]) -> str:
    """Returns a line that says what loads packed experts."""
    matrices = [PackedMatrix(row.name, row.shape) for row in packed]
    first = packed[0].quantization
    assert first is not None
    readers = readers_of(matrices, config, first.quant_type)
    if readers is None:
        return "experts are packed one by one, which transformers 4 and 5 read for this family"
    return readers.text
