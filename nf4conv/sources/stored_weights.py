"""Reads the tensors of packed 4-bit weights as they lie on disk, and notes every fault in them.

It is written against the format (docs/format.md), not against the code that writes the format. It
recognises and names faults that other tools are known to make.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from nf4conv.format import layout
from nf4conv.format.codebook import BLOCKSIZES, CODEBOOKS, DYNAMIC_MAP, NESTED_BLOCKSIZE
from nf4conv.format.layout import QUANT_STATE_PREFIX, Format, block_count
from nf4conv.sources.header import LARGEST_SIZE
from nf4conv.sources.reader import read_bytes
from nf4conv.sources.tensors import TensorInfo

CLOSE: Final = 2**-8
"""Relative distance at which a code map still passes for the standard one, made in bfloat16.

Kernels decode with the standard map.
"""

_NEARLY_EQUAL: Final = 2**-21
"""Relative distance of a dynamic map that was made on a machine without fused multiply-add
(docs/format.md).
"""

_LARGEST_FLOAT32: Final = 3.4028235e38

_ALLOWED: Final = {
    "quant_type": tuple(CODEBOOKS),
    "blocksize": BLOCKSIZES,
    "dtype": tuple(layout.DTYPE_NAMES.values()),
    "nested_blocksize": (NESTED_BLOCKSIZE,),
}
"""The values that fields of a quant state may have."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or worth knowing.

    Attributes:
        check: which of CHECKS found it.
        file: the name of the file, relative to the checkpoint.
        tensor: the name of the tensor; empty if it concerns the file.
        text: what was found, and what was expected.
        is_fault: True if verification fails for it.
    """

    check: str
    file: str
    tensor: str
    text: str
    is_fault: bool = True

    def line(self) -> str:
        """Returns the finding as one line."""
        return ": ".join(part for part in (self.file, self.tensor, self.text) if part)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A packed weight whose tensors fit together.

    Attributes:
        values: the packed codes.
        components: the tensors beside them, by suffix.
        format: how it is packed; the scales as far as that is recorded.
        shape: of the weight before it was quantized.
        nested_offset: added to the decoded absmax; None without double quantization.
        blob: the quant state if it is not on disk yet; then it is not among the components.
    """

    values: TensorInfo
    components: Mapping[str, TensorInfo]
    format: Format
    shape: tuple[int, ...]
    nested_offset: float | None = None
    blob: bytes | None = None

    @property
    def name(self) -> str:
        return self.values.name

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + sum(part.nbytes for part in self.components.values())

    def parts(self) -> dict[str, TensorInfo]:
        """Returns all its tensors by role: "values", and the suffixes of the components."""
        return {"values": self.values, **self.components}


@dataclass
class Structure:
    """A checkpoint as it lies on disk.

    Attributes:
        folder: the folder with its files.
        tensors: all tensors of the weight files that could be read, by name.
        weights: the packed weights that can be decoded, by name.
        plain: the tensors that belong to no packed weight, by name.
        findings: what is wrong so far.
        read: reads a small tensor.
        scales: tells how a weight is said to be scaled, of codebook.SCALES, given its name.
        record: what it says of its making; None if it says nothing that can be read.
    """

    folder: Path
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    weights: dict[str, StoredWeight] = field(default_factory=dict)
    plain: dict[str, TensorInfo] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    read: Callable[[TensorInfo], bytes] = read_bytes
    scales: Callable[[str], str] = lambda _: "absmax"
    record: Mapping[str, Any] | None = None

    def note(
        self, check: str, file: Path | str, tensor: str, text: str, *, is_fault: bool = True
    ) -> None:
        """Adds a finding; arguments as the attributes of `Finding`."""
        name = file if isinstance(file, str) else file.name
        self.findings.append(Finding(check, name, tensor, text, is_fault))


class _Fault(NamedTuple):
    """A fault in one tensor of a weight."""

    suffix: str  # of the component; empty for the codes
    text: str


def split_component(name: str) -> tuple[str, str]:
    """Divides the name of a tensor into that of a weight and a suffix.

    Returns:
        owner: the weight that the tensor belongs to; the name itself if it is no component.
        suffix: the component's suffix; empty if the tensor is no component.
    """
    for suffix in layout.COMPONENT_SUFFIXES:
        if name.endswith(f".{suffix}"):
            return name[: -len(suffix) - 1], suffix
    head, found, tail = name.partition(f".{QUANT_STATE_PREFIX}")
    return (head, f"{QUANT_STATE_PREFIX}{tail}") if found else (name, "")


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
    _check_files(structure, values, components)
    missing = list(_missing(components))
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
    fields = _read_state(structure, components[states[0]], states[0], is_nested, scales)
    if fields is None:
        return None
    weight = _weight_of(values, components, fields, scales)
    _check_maps(structure, weight)
    return weight if _check_layout(structure, weight) else None


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
        quant_storage=layout.STORAGE_DTYPES.get(values.dtype, "uint8"),
        scales=scales,
    )
    offset = fields.get("nested_offset")
    if offset is not None:
        offset = float(offset)
    return StoredWeight(values, components, format, tuple(fields["shape"]), offset)


def _check_files(
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


def _missing(components: Mapping[str, TensorInfo]) -> Iterator[_Fault]:
    """Yields what a weight lacks; the text is what follows from it."""
    if not any(suffix.startswith(QUANT_STATE_PREFIX) for suffix in components):
        yield _Fault("quant_state", "")
    absmax = components.get("absmax")
    is_nested = (
        "nested_absmax" in components
        or "nested_quant_map" in components
        or (absmax is not None and absmax.dtype == "U8")
    )
    if absmax is None:
        yield _Fault("absmax", "")
    if "quant_map" not in components:
        yield _Fault(
            "quant_map", ", as in saves of some other tools; bitsandbytes then fails: KeyError"
        )
    if is_nested:
        for suffix in ("nested_absmax", "nested_quant_map"):
            if suffix not in components:
                yield _Fault(suffix, "")


def _read_state(
    structure: Structure, blob: TensorInfo, suffix: str, is_nested: bool, scales: str
) -> Mapping[str, Any] | None:
    """Reads the JSON of a quant state and notes its faults.

    Args:
        structure: the checkpoint, which gets the findings.
        blob: the tensor with the JSON.
        suffix: its suffix, which names the quant type.
        is_nested: True if there is a nested_absmax.
        scales: how the weight is said to be scaled.

    Returns:
        The fields; None if there are faults that leave the weight unreadable.
    """
    fields, faults = _parsed_state(structure, blob, is_nested, scales)
    if not faults and suffix != f"{QUANT_STATE_PREFIX}{fields['quant_type']}":
        structure.note("quant state", blob.file, blob.name, f"says {fields['quant_type']} inside")
    for text in faults:
        structure.note("quant state", blob.file, blob.name, text)
    return None if faults else fields


def _parsed_state(
    structure: Structure, blob: TensorInfo, is_nested: bool, scales: str
) -> tuple[Mapping[str, Any], list[str]]:
    """Returns the fields of a quant state, and what is wrong with them."""
    if blob.dtype != "U8" or blob.nbytes > layout.LARGEST_QUANT_STATE:
        return {}, [f"{blob.nbytes:,} bytes of {blob.dtype} are none"]
    try:
        fields = json.loads(structure.read(blob))
        if not isinstance(fields, dict):
            return {}, ["not a JSON object"]
        return fields, list(_state_faults(fields, is_nested, scales))
    except (ValueError, RecursionError) as error:
        return {}, [f"not JSON: {error}"]


def _state_faults(fields: Mapping[str, Any], is_nested: bool, scales: str) -> Iterator[str]:
    """Yields what is wrong with the fields of a quant state."""
    yield from _key_faults(fields, is_nested)
    yield from _value_faults(fields)
    yield from _offset_faults(fields.get("nested_offset", 0.0), scales)


def _key_faults(fields: Mapping[str, Any], is_nested: bool) -> Iterator[str]:
    """Yields the keys that a quant state lacks, and those that it must not have."""
    expected = [*layout.JSON_KEYS]
    if is_nested:
        expected += layout.NESTED_JSON_KEYS
    for key in expected:
        if key not in fields:
            yield f"lacks {key}"
    for key in fields:
        if key in expected:
            continue
        if key in layout.NESTED_JSON_KEYS:
            yield f"has {key}, but there is no nested_absmax"
        else:
            yield f"has the key {key!r}, at which bitsandbytes fails"


def _value_faults(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with the values of a quant state, but for nested_offset."""
    for key, allowed in _ALLOWED.items():
        if key not in fields:
            continue
        value = fields[key]
        if type(value) not in (str, int) or value not in allowed:
            yield f"{key} is {value!r}, expected {' or '.join(map(str, allowed))}"
    if "shape" in fields and not _is_shape(fields["shape"]):
        yield f"{fields['shape']!r:.100} is not a shape"
    if fields.get("nested_dtype", "float32") != "float32":
        yield (
            f"nested_dtype is {fields['nested_dtype']!r}: bitsandbytes on a CPU, saved after a "
            f"forward pass, which quantizes the absmax again; give it the original"
        )


def _offset_faults(offset: Any, scales: str) -> Iterator[str]:
    """Yields what is wrong with a nested_offset: the mean of absmax, or of searched scales."""
    least = -_LARGEST_FLOAT32
    also = ""
    if scales == "absmax":
        least = 0.0
        also = ", not negative"
    is_number = isinstance(offset, (int, float)) and not isinstance(offset, bool)
    if not is_number or not least <= offset <= _LARGEST_FLOAT32:
        yield f"nested_offset is {offset!r}, expected a finite number{also}"


def _is_shape(shape: object) -> bool:
    """Returns True for the shape of a tensor that can exist.

    So no error prints a number as long as a product of invented sizes.
    """
    if not isinstance(shape, list):
        return False
    if not all(type(size) is int and 0 <= size < LARGEST_SIZE for size in shape):
        return False
    return math.prod(shape) < LARGEST_SIZE


def _check_layout(structure: Structure, weight: StoredWeight) -> bool:
    """Notes faults of dtypes and shapes; returns True if the weight can be decoded nevertheless."""
    values = weight.values
    faults = list(_component_faults(weight))
    packed_bytes = -(-weight.elements // 2)
    if values.dtype not in layout.STORAGE_DTYPES:
        faults.append(_Fault("", f"is {values.dtype}, expected U8 or, for FSDP, a float dtype"))
    elif values.nbytes != packed_bytes:
        expected = f"{packed_bytes:,} for {list(weight.shape)}"
        faults.append(_Fault("", f"{values.nbytes:,} bytes of codes, expected {expected}"))
    elif len(values.shape) != 2 or values.shape[1] != 1:
        text = f"packed as {list(values.shape)}, not as [n, 1]: diffusers refuses it"
        structure.note("layout", values.file, weight.name, text, is_fault=False)
    for fault in faults:
        part = weight.components[fault.suffix] if fault.suffix else values
        structure.note("layout", part.file, part.name, fault.text)
    return all(fault.suffix == "quant_map" for fault in faults)


def _component_faults(weight: StoredWeight) -> Iterator[_Fault]:
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
        yield _Fault(suffix, text)


def _check_maps(structure: Structure, weight: StoredWeight) -> None:
    """Notes code maps that differ from the standard ones."""
    quant_type = weight.format.quant_type
    values = CODEBOOKS[quant_type].values
    _check_map(structure, weight.components.get("quant_map"), values, quant_type)
    nested = weight.components.get("nested_quant_map")
    _check_map(structure, nested, DYNAMIC_MAP, "the dynamic map")


def _check_map(
    structure: Structure, part: TensorInfo | None, values: Sequence[float], name: str
) -> None:
    """Notes a code map that differs from the standard one.

    Args:
        structure: the checkpoint, which gets the finding.
        part: the map; None if there is none, which is noted elsewhere.
        values: the standard map.
        name: of the standard map.
    """
    if part is None or part.dtype != "F32" or part.elements != len(values):
        return
    stored = struct.unpack(f"<{len(values)}f", structure.read(part))
    wrong = [place for place, value in enumerate(values) if stored[place] != value]
    if not wrong:
        return
    is_nested = values is DYNAMIC_MAP
    far = distance(stored, values)
    if is_nested and far <= _NEARLY_EQUAL:
        return
    # where one value stands out, it was damaged: lost precision shows in many
    if far <= CLOSE and len(wrong) >= len(values) // 4:
        text = (
            f"{name} in low precision, as bitsandbytes before 0.45.3 made it under another "
            f"default dtype"
        )
        structure.note("code maps", part.file, part.name, text, is_fault=not is_nested)
        return
    text = f"value {wrong[0]} is not that of {name}"
    for other, book in CODEBOOKS.items():
        if stored == tuple(book.values):
            text = f"the values are those of {other}, not {name}"
    structure.note("code maps", part.file, part.name, text)


def distance(stored: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest relative difference of a value; NaN is infinitely far."""
    largest = 0.0
    for found, value in zip(stored, expected, strict=True):
        if found == value:
            continue
        if value == 0 or math.isnan(found):
            return math.inf
        largest = max(largest, abs(found - value) / abs(value))
    return largest
