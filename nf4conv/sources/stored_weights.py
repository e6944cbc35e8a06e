"""Reads the tensors of one packed 4-bit weight and notes every fault in them.

Written against the format (docs/format.md), not against the code that writes it. Faults that other
tools are known to make are recognised and named.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nf4conv.format import layout
from nf4conv.format.codebook import BLOCKSIZES, CODEBOOKS, DYNAMIC_MAP, NESTED_BLOCKSIZE
from nf4conv.format.layout import QUANT_STATE_PREFIX, Format, block_count
from nf4conv.sources.header import LARGEST_SIZE
from nf4conv.sources.reader import read_bytes
from nf4conv.sources.tensors import TensorInfo

CLOSE: Final = 2**-8
"""Relative: how far a code map that was made in bfloat16 may be from the standard one, which
kernels decode with.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """Describes something that is wrong with a checkpoint, or worth knowing.

    Attributes:
        check: the name of the check that found it.
        file: the file, relative to the checkpoint.
        tensor: the name of the tensor. Empty if the finding is about the whole file.
        text: what was found, and what was expected.
        is_fault: True if verification fails because of it.
    """

    check: str
    file: str
    tensor: str
    text: str
    is_fault: bool = True

    def line(self) -> str:
        """The finding as one line."""
        return ": ".join(part for part in (self.file, self.tensor, self.text) if part)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A packed weight whose tensors fit together."""

    values: TensorInfo  # the packed codes
    components: Mapping[str, TensorInfo]  # the tensors beside them, by suffix
    format: Format  # how it is packed; the scales as far as that is recorded
    shape: tuple[int, ...]  # of the weight before it was quantized
    nested_offset: float | None = (
        None  # added to the decoded absmax; None without double quantization
    )
    blob: bytes | None = (
        None  # the quant state, where it is not on disk yet; then it is not among the components
    )

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
        """All its tensors by role: "values", and the suffixes of the components."""
        return {"values": self.values, **self.components}


@dataclass
class Structure:
    """A checkpoint as it lies on disk."""

    folder: Path  # where its files are
    # all tensors of the weight files that could be read, by name
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    weights: dict[str, StoredWeight] = field(
        default_factory=dict
    )  # the packed weights that can be decoded, by name
    plain: dict[str, TensorInfo] = field(
        default_factory=dict
    )  # the tensors that belong to no packed weight, by name
    findings: list[Finding] = field(default_factory=list)  # what is wrong so far
    read: Callable[[TensorInfo], bytes] = read_bytes  # reads a small tensor
    scales: str = "absmax"  # what all weights are said to be scaled by, of codebook.SCALES

    def note(
        self, check: str, file: Path | str, tensor: str, text: str, *, is_fault: bool = True
    ) -> None:
        name = file if isinstance(file, str) else file.name
        self.findings.append(Finding(check, name, tensor, text, is_fault))


def split_component(name: str) -> tuple[str, str]:
    """The weight that a tensor belongs to and the suffix it has there; an empty suffix for one that
    is no component.
    """
    for suffix in layout.COMPONENT_SUFFIXES:
        if name.endswith(f".{suffix}"):
            return name[: -len(suffix) - 1], suffix
    head, found, tail = name.partition(f".{QUANT_STATE_PREFIX}")
    return (head, f"{QUANT_STATE_PREFIX}{tail}") if found else (name, "")


def check_weight(
    structure: Structure, owner: str, components: Mapping[str, TensorInfo]
) -> StoredWeight | None:
    """Note the faults of one packed weight; the weight if it can be decoded nevertheless."""
    values = structure.tensors.get(owner)
    if values is None:
        for part in components.values():
            structure.note(
                "components", part.file, part.name, f"belongs to {owner}, which is missing"
            )
        return None
    for part in components.values():
        if part.file != values.file:
            text = f"is apart from its weight in {values.file.name}; transformers 4.53 … 4.56 and diffusers then fail"
            structure.note("one shard", part.file, part.name, text)
    missing = list(_missing(components))
    for suffix, consequence in missing:
        structure.note("components", values.file, owner, f"{suffix} is missing{consequence}")
    states = [suffix for suffix in components if suffix.startswith(QUANT_STATE_PREFIX)]
    if len(states) > 1:
        structure.note(
            "components", values.file, owner, f"has {len(states)} quant states: {', '.join(states)}"
        )
    if len(states) != 1 or any(suffix != "quant_map" for suffix, _ in missing):
        return None
    is_nested = "nested_absmax" in components
    fields = _read_state(structure, components[states[0]], states[0], is_nested)
    if fields is None:
        return None
    kind = fields["quant_type"], fields["blocksize"], is_nested, fields["dtype"]
    format = Format(*kind, layout.STORAGE_DTYPES.get(values.dtype, "uint8"), structure.scales)
    offset = fields.get("nested_offset")
    offset = None if offset is None else float(offset)
    weight = StoredWeight(values, components, format, tuple(fields["shape"]), offset)
    _check_maps(structure, weight)
    return weight if _check_layout(structure, weight) else None


def _missing(components: Mapping[str, TensorInfo]) -> Iterator[tuple[str, str]]:
    """(suffix, consequence) of what a weight lacks."""
    if not any(suffix.startswith(QUANT_STATE_PREFIX) for suffix in components):
        yield "quant_state", ""
    nested, absmax = ("nested_absmax", "nested_quant_map"), components.get("absmax")
    is_nested = any(suffix in components for suffix in nested) or (
        absmax is not None and absmax.dtype == "U8"
    )
    for suffix in ("absmax", "quant_map", *(nested if is_nested else ())):
        if suffix not in components:
            consequence = ", as in saves of some other tools; bitsandbytes then fails: KeyError"
            yield suffix, consequence if suffix == "quant_map" else ""


def _read_state(
    structure: Structure, blob: TensorInfo, suffix: str, is_nested: bool
) -> Mapping[str, Any] | None:
    fields: Any = None
    try:
        if blob.dtype != "U8" or blob.nbytes > layout.LARGEST_QUANT_STATE:
            faults = [f"{blob.nbytes:,} bytes of {blob.dtype} are none"]
        elif isinstance(fields := json.loads(structure.read(blob)), dict):
            faults = list(_state_faults(fields, is_nested, structure.scales))
        else:
            faults = ["not a JSON object"]
    except (ValueError, RecursionError) as error:
        faults = [f"not JSON: {error}"]
    if not faults and suffix != f"{QUANT_STATE_PREFIX}{fields['quant_type']}":
        structure.note("quant state", blob.file, blob.name, f"says {fields['quant_type']} inside")
    for text in faults:
        structure.note("quant state", blob.file, blob.name, text)
    return None if faults else fields


def _state_faults(fields: Mapping[str, Any], is_nested: bool, scales: str) -> Iterator[str]:
    keys = (*layout.JSON_KEYS, *layout.NESTED_JSON_KEYS) if is_nested else layout.JSON_KEYS
    for key in keys:
        if key not in fields:
            yield f"lacks {key}"
    for key in [key for key in fields if key not in keys]:
        strange, out_of_place = (
            f"has the key {key!r}, at which bitsandbytes fails",
            "but there is no nested_absmax",
        )
        yield f"has {key}, {out_of_place}" if key in layout.NESTED_JSON_KEYS else strange
    for key, allowed in (
        ("quant_type", tuple(CODEBOOKS)),
        ("blocksize", BLOCKSIZES),
        ("dtype", tuple(layout.DTYPE_NAMES.values())),
        ("nested_blocksize", (NESTED_BLOCKSIZE,)),
    ):
        if key in fields and (type(fields[key]) not in (str, int) or fields[key] not in allowed):
            yield f"{key} is {fields[key]!r}, expected {' or '.join(map(str, allowed))}"
    if "shape" in fields and not _is_shape(fields["shape"]):
        yield f"{fields['shape']!r:.100} is not a shape"
    if fields.get("nested_dtype", "float32") != "float32":
        yield (
            f"nested_dtype is {fields['nested_dtype']!r}: bitsandbytes on a CPU, saved after a "
            f"forward pass, which "
            "quantizes the absmax again; give it the original"
        )
    offset = fields.get("nested_offset", 0.0)
    least, also = (0.0, ", not negative") if scales == "absmax" else (-3.4028235e38, "")
    if type(offset) not in (int, float) or not least <= offset <= 3.4028235e38:
        yield f"nested_offset is {offset!r}, expected a finite number{also}"


def _is_shape(shape: object) -> bool:
    """Whether it is one, of a tensor that can exist: nothing as long as a product of invented sizes
    is printed.
    """
    if not (
        isinstance(shape, list)
        and all(type(size) is int and 0 <= size < LARGEST_SIZE for size in shape)
    ):
        return False
    return math.prod(shape) < LARGEST_SIZE


def _check_layout(structure: Structure, weight: StoredWeight) -> bool:
    """Whether the tensors of a weight can be decoded together."""
    values, elements = weight.values, weight.elements
    faults = list(_component_faults(weight, block_count(elements, weight.format.blocksize)))
    if values.dtype not in layout.STORAGE_DTYPES:
        faults.append(("", f"is {values.dtype}, expected U8 or, for FSDP, a float dtype"))
    elif values.nbytes != -(-elements // 2):
        expected = f"{-(-elements // 2):,} for {list(weight.shape)}"
        faults.append(("", f"{values.nbytes:,} bytes of codes, expected {expected}"))
    elif len(values.shape) != 2 or values.shape[1] != 1:
        text = f"packed as {list(values.shape)}, not as [n, 1]: diffusers refuses it"
        structure.note("layout", values.file, weight.name, text, is_fault=False)
    for suffix, text in faults:
        part = weight.components[suffix] if suffix else values
        structure.note("layout", part.file, part.name, text)
    return not any(suffix != "quant_map" for suffix, _ in faults)


def _component_faults(weight: StoredWeight, blocks: int) -> Iterator[tuple[str, str]]:
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
            yield (
                suffix,
                f"bfloat16 and transposed {list(part.shape)}: bitsandbytes on a CPU, saved after "
                f"a forward pass; a GPU "
                f"misreads it. Expected {dtype} [{elements}]; quantize the original again",
            )
        else:
            yield suffix, f"{part.dtype} {list(part.shape)}, expected {dtype} [{elements}]"


def _check_maps(structure: Structure, weight: StoredWeight) -> None:
    quant_type = weight.format.quant_type
    for suffix, values, of in (
        ("quant_map", CODEBOOKS[quant_type].values, quant_type),
        ("nested_quant_map", DYNAMIC_MAP, "the dynamic map"),
    ):
        part = weight.components.get(suffix)
        if part is None or part.dtype != "F32" or part.elements != len(values):
            continue
        stored = struct.unpack(f"<{len(values)}f", structure.read(part))
        if stored == tuple(values):
            continue
        wrong, far = (
            [place for place, value in enumerate(values) if stored[place] != value],
            distance(stored, values),
        )
        if suffix == "nested_quant_map" and far <= 2**-21:
            continue  # made on a machine without fused multiply-add (docs/format.md)
        # where one value stands out, it was damaged: lost precision shows in many
        if far <= CLOSE and len(wrong) >= len(values) // 4:
            text = f"{of} in low precision, as bitsandbytes before 0.45.3 made it under another default dtype"
            structure.note("code maps", part.file, part.name, text, is_fault=suffix == "quant_map")
            continue
        other = next(
            (name for name, book in CODEBOOKS.items() if stored == tuple(book.values)), None
        )
        text = (
            f"the values are those of {other}, not {of}"
            if other
            else f"value {wrong[0]} is not that of {of}"
        )
        structure.note("code maps", part.file, part.name, text)


def distance(stored: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of a value; NaN is infinitely far."""
    return max(
        0.0
        if found == value
        else abs(found - value) / abs(value)
        if value and found == found
        else float("inf")
        for found, value in zip(stored, expected, strict=True)
    )
