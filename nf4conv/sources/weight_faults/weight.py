"""Notes the faults of one packed weight, and describes it if it can be decoded nevertheless."""

from collections.abc import Mapping
from typing import Any

from nf4conv.format import dtypes
from nf4conv.format.layout import QUANT_STATE_PREFIX, Format
from nf4conv.sources.stored_weights import StoredWeight, Structure
from nf4conv.sources.tensors import TensorInfo
from nf4conv.sources.weight_faults.code_maps import check_maps
from nf4conv.sources.weight_faults.components import check_files, check_layout, missing_components
from nf4conv.sources.weight_faults.quant_state import read_state


def check_weight(
    structure: Structure, owner: str, components: Mapping[str, TensorInfo]
) -> StoredWeight | None:
    """Notes the faults of one packed weight.

    Args:
        structure: the checkpoint, which gets the findings.
        owner: the name of the weight.
        components: the tensors beside its codes, by suffix.

    Returns:
        The weight if it can be decoded nevertheless; otherwise None.
    """
    values = structure.tensors.get(owner)
    if values is None:
        for part in components.values():
            text = f"belongs to {owner}, which is missing"
            structure.note("components", part.file, part.name, text)
        return None
    check_files(structure, values, components)
    missing = list(missing_components(components))
    for fault in missing:
        text = f"{fault.suffix} is missing{fault.text}"
        structure.note("components", values.file, owner, text)
    states = [suffix for suffix in components if suffix.startswith(QUANT_STATE_PREFIX)]
    if len(states) > 1:
        text = f"has {len(states)} quant states: {', '.join(states)}"
        structure.note("components", values.file, owner, text)
    if len(states) != 1 or any(fault.suffix != "quant_map" for fault in missing):
        return None
    is_nested = "nested_absmax" in components
    scales = structure.scales(owner)
    fields = read_state(structure, components[states[0]], states[0], is_nested, scales)
    if fields is None:
        return None
    weight = _weight_of(values, components, fields, scales)
    check_maps(structure, weight)
    return weight if check_layout(structure, weight) else None


def _weight_of(
    values: TensorInfo,
    components: Mapping[str, TensorInfo],
    fields: Mapping[str, Any],
    scales: str,
) -> StoredWeight:
    """Returns the weight that codes, components and the fields of a quant state describe."""
    format = Format(
        quant_type=fields["quant_type"],
        blocksize=fields["blocksize"],
        double_quant="nested_absmax" in components,
        dtype=fields["dtype"],
        quant_storage=dtypes.STORAGE_DTYPES.get(values.dtype, "uint8"),
        scales=scales,
    )
    offset = fields.get("nested_offset")
    if offset is not None:
        offset = float(offset)
    return StoredWeight(values, components, format, tuple(fields["shape"]), offset)
