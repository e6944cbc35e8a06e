"""Finds what is wrong with the tensors of a packed weight: which there are, and how they lie."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from nf4conv.format import dtypes
from nf4conv.format.codebook import DYNAMIC_MAP, NESTED_BLOCKSIZE
from nf4conv.format.layout import QUANT_STATE_PREFIX, block_count
from nf4conv.sources.stored_weights import StoredWeight, Structure
from nf4conv.sources.tensors import TensorInfo


class Fault(NamedTuple):
    """A fault in one tensor of a weight."""

    suffix: str  # of the component; empty for the codes
    text: str


def check_files(
    structure: Structure, values: TensorInfo, components: Mapping[str, TensorInfo]
) -> None:
    """Notes the components that are not in the file of their weight."""
    for part in components.values():
        if part.file != values.file:
            text = (
                f"is apart from its weight in {values.file.name}; transformers 4.53 … 4.56 and "
                f"diffusers then fail"
            )
            structure.note("one shard", part.file, part.name, text)


def missing_components(components: Mapping[str, TensorInfo]) -> Iterator[Fault]:
    """Yields what a weight lacks; the text is what follows from it."""
    if not any(suffix.startswith(QUANT_STATE_PREFIX) for suffix in components):
        yield Fault("quant_state", "")
    absmax = components.get("absmax")
    is_nested = (
        "nested_absmax" in components
        or "nested_quant_map" in components
        or (absmax is not None and absmax.dtype == "U8")
    )
    if absmax is None:
        yield Fault("absmax", "")
    if "quant_map" not in components:
        yield Fault(
            "quant_map", ", as in saves of some other tools; bitsandbytes then fails: KeyError"
        )
    if is_nested:
        for suffix in ("nested_absmax", "nested_quant_map"):
            if suffix not in components:
                yield Fault(suffix, "")


def check_layout(structure: Structure, weight: StoredWeight) -> bool:
    """Notes faults of dtypes and shapes; returns True if the weight can be decoded nevertheless."""
    values = weight.values
    faults = list(_component_faults(weight))
    packed_bytes = -(-weight.elements // 2)
    if values.dtype not in dtypes.STORAGE_DTYPES:
        faults.append(Fault("", f"is {values.dtype}, expected U8 or, for FSDP, a float dtype"))
    elif values.nbytes != packed_bytes:
        expected = f"{packed_bytes:,} for {list(weight.shape)}"
        faults.append(Fault("", f"{values.nbytes:,} bytes of codes, expected {expected}"))
    elif len(values.shape) != 2 or values.shape[1] != 1:
        text = f"packed as {list(values.shape)}, not as [n, 1]: diffusers refuses it"
        structure.note("layout", values.file, weight.name, text, is_fault=False)
    for fault in faults:
        part = weight.components[fault.suffix] if fault.suffix else values
        structure.note("layout", part.file, part.name, fault.text)
    return all(fault.suffix == "quant_map" for fault in faults)


def _component_faults(weight: StoredWeight) -> Iterator[Fault]:
    """Yields components whose dtype or shape is not the one that the weight requires."""
    blocks = block_count(weight.elements, weight.format.blocksize)
    expected = {"absmax": ("F32", blocks), "quant_map": ("F32", 16)}
    if weight.format.double_quant:
        expected["absmax"] = ("U8", blocks)
        expected["nested_absmax"] = ("F32", block_count(blocks, NESTED_BLOCKSIZE))
        expected["nested_quant_map"] = ("F32", len(DYNAMIC_MAP))
    for suffix, (dtype, elements) in expected.items():
        part = weight.components.get(suffix)
        if part is None or (part.dtype == dtype and part.shape == (elements,)):
            continue
        if suffix == "absmax" and part.dtype == "BF16" and part.elements == blocks:
            text = (
                f"bfloat16 and transposed {list(part.shape)}: bitsandbytes on a CPU, saved after "
                f"a forward pass; a GPU misreads it. Expected {dtype} [{elements}]; quantize the "
                f"original again"
            )
        else:
            text = f"{part.dtype} {list(part.shape)}, expected {dtype} [{elements}]"
        yield Fault(suffix, text)
