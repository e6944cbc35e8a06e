"""The layout of one 4-bit weight on disk: the tensors it becomes, their dtypes and shapes, and the
JSON blob.

A weight `W` of n elements becomes these tensors, in bitsandbytes' order (docs/format.md):

W                    packed codes, [ceil(n / 2), 1] uint8, the even element in the high nibble; or
                     the same bytes seen as elements of another dtype
W.absmax             [blocks] float32; uint8 codes with double quantization
W.quant_map          [16] float32, the code values
W.nested_absmax      [ceil(blocks / 256)] float32, double quantization only
W.nested_quant_map   [256] float32, double quantization only
W.quant_state.bitsandbytes__nf4 (or "__fp4")
                     the JSON blob as uint8

Nothing here imports torch, so that a plan can be made, and sized, before torch is loaded.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

from nf4conv.errors import CodecError
from nf4conv.format.codebook import BLOCKSIZES, CODEBOOKS, DYNAMIC_MAP, NESTED_BLOCKSIZE
from nf4conv.format.dtypes import DTYPE_BITS, DTYPE_NAMES, STORAGE_DTYPES

QUANT_STATE_PREFIX: Final = "quant_state.bitsandbytes__"

COMPONENT_SUFFIXES: Final = (
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",
    f"{QUANT_STATE_PREFIX}nf4",
    f"{QUANT_STATE_PREFIX}fp4",
)
"""Every suffix a component of a 4-bit weight can have after `W.`."""

_MOST_DIMENSIONS: Final = 64  # of a weight; torch has this limit too
_LARGEST_SIZE: Final = 2**63  # of a dimension, and of elements
_LARGEST_FLOAT32: Final = 3.4028235e38
LARGEST_QUANT_STATE: Final = 2**16  # bytes of a JSON blob: some hundred are usual

_ALLOWED: Final[Mapping[str, tuple[str | int, ...]]] = {
    "quant_type": tuple(CODEBOOKS),
    "blocksize": BLOCKSIZES,
    "dtype": tuple(DTYPE_NAMES.values()),
    "shape": (),
    "nested_blocksize": (NESTED_BLOCKSIZE,),
    "nested_dtype": (),
    "nested_offset": (),
}
"""The fields of a JSON blob, and the values of those that have few."""

# arrays of bytes, because what compares takes only memory that could be written to
QUANT_MAPS: Final = {
    name: bytearray(struct.pack("<16f", *book.values)) for name, book in CODEBOOKS.items()
}
NESTED_QUANT_MAP: Final = bytearray(struct.pack(f"<{len(DYNAMIC_MAP)}f", *DYNAMIC_MAP))
"""The bytes of the components quant_map, by quant type, and nested_quant_map; never write to them.
"""

_LONGEST_OFFSET: Final = -1.1754943508222875e-38  # no float32 has a longer repr


PartT = TypeVar("PartT")


@dataclass(frozen=True)
class Format:
    """The format of packed weights: one choice for a whole checkpoint, as loaders require.

    Attributes:
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one absmax: 32, 64, … 4096.
        double_quant: True if absmax is quantized too.
        dtype: "float32", "float16" or "bfloat16": weights are cast to it before they are packed,
            and other float tensors are stored in it.
        quant_storage: the dtype that packed codes are stored as, of STORAGE_DTYPES.
        scales: the way to choose a block's scale, of codebook.RECORDED_SCALES.
    """

    quant_type: str
    blocksize: int
    double_quant: bool
    dtype: str
    quant_storage: str = "uint8"
    scales: str = "absmax"

    @property
    def nesting(self) -> str:
        """In words, whether absmax is quantized too."""
        return "double quantization" if self.double_quant else "no double quantization"

    @property
    def storage_tag(self) -> str:
        """Safetensors' tag of quant_storage."""
        return next(tag for tag, name in STORAGE_DTYPES.items() if name == self.quant_storage)

    def holds(self, shape: Sequence[int]) -> bool:
        """Returns True if the packed bytes of a weight divide into elements of quant_storage."""
        if self.quant_storage == "uint8":
            return True
        packed_bytes = -(-math.prod(shape) // 2)
        return 8 * packed_bytes % DTYPE_BITS[self.storage_tag] == 0

    def decodes_like(self, other: "Format") -> bool:
        """Returns True if codes and scales of both formats are decoded in the same way; dtypes may
        differ.
        """
        return (
            self.quant_type == other.quant_type
            and self.blocksize == other.blocksize
            and self.double_quant == other.double_quant
        )

    def __str__(self) -> str:
        """Returns a short form, such as "nf4+/64": the plus is double quantization."""
        text = self.quant_type
        if self.double_quant:
            text += "+"
        text += f"/{self.blocksize}"
        if self.quant_storage != "uint8":
            text += f" in {self.quant_storage}"
        return text


class Component(NamedTuple):
    """One tensor that a 4-bit weight becomes on disk.

    Attributes:
        suffix: what follows `W.` in its name; empty for the packed codes themselves.
        dtype: safetensors' dtype tag, of STORAGE_DTYPES.
        shape: its shape. The JSON blob's is the longest that it can get: the number of decimals of
            nested_offset varies.
        nbytes: its size.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def _component(suffix: str, dtype: str, *shape: int) -> Component:
    return Component(suffix, dtype, shape, math.prod(shape) * DTYPE_BITS[dtype] // 8)


def block_count(elements: int, blocksize: int) -> int:
    """Returns the number of blocks, of which the last may be partial."""
    return -(-elements // blocksize)


def quant_state_json(
    format: Format, shape: Sequence[int], nested_offset: float | None = None
) -> bytes:
    """Returns the JSON blob: the bytes of bitsandbytes' `QuantState.as_dict(packed=True)`.

    The nested offset is the float32 mean of absmax, widened to float64.
    """
    state: dict[str, object] = {
        "quant_type": format.quant_type,
        "blocksize": format.blocksize,
        "dtype": format.dtype,
        "shape": list(shape),
    }
    if nested_offset is not None:
        state["nested_blocksize"] = NESTED_BLOCKSIZE
        state["nested_dtype"] = "float32"
        state["nested_offset"] = nested_offset
    return json.dumps(state).encode()


@lru_cache(maxsize=4096)
def components(format: Format, shape: tuple[int, ...]) -> tuple[Component, ...]:
    """Returns the tensors that a weight becomes, in the order of the module docstring."""
    elements = math.prod(shape)
    blocks = block_count(elements, format.blocksize)
    tag = format.storage_tag
    packed = _component("", tag, 8 * -(-elements // 2) // DTYPE_BITS[tag], 1)
    quant_map = _component("quant_map", "F32", len(CODEBOOKS[format.quant_type].values))
    blob_suffix = f"{QUANT_STATE_PREFIX}{format.quant_type}"
    if not format.double_quant:
        absmax = _component("absmax", "F32", blocks)
        blob = _component(blob_suffix, "U8", len(quant_state_json(format, shape)))
        return (packed, absmax, quant_map, blob)
    absmax = _component("absmax", "U8", blocks)
    nested_absmax = _component("nested_absmax", "F32", block_count(blocks, NESTED_BLOCKSIZE))
    nested_quant_map = _component("nested_quant_map", "F32", len(DYNAMIC_MAP))
    longest_json = quant_state_json(format, shape, _LONGEST_OFFSET)
    blob = _component(blob_suffix, "U8", len(longest_json))
    return (packed, absmax, quant_map, nested_absmax, nested_quant_map, blob)


class StateFields(NamedTuple):
    """What a JSON blob says that decoding takes."""

    format: Format  # but for quant_storage and scales, of which it says nothing
    shape: tuple[int, ...]  # of the weight before it was packed
    nested_offset: float | None  # a float32 in float64; None without double quantization


class StateFault(NamedTuple):
    """Something that is wrong with a JSON blob."""

    text: str
    is_fatal: bool = True  # False if the weight can be decoded nevertheless


def parse_quant_state(blob: bytes, is_nested: bool) -> StateFields:
    """Reads a JSON blob in which nothing is wrong."""
    fields, faults = read_quant_state(blob, is_nested)
    if fields is None or faults:
        raise CodecError(f"quant_state: {faults[0].text}")
    return fields


def read_quant_state(
    blob: bytes, is_nested: bool
) -> tuple[StateFields | None, Sequence[StateFault]]:
    """Returns the fields of a JSON blob, None if a fault is fatal; and all faults."""
    try:
        table = json.loads(blob)
    except (ValueError, RecursionError) as error:
        return None, [StateFault(f"not JSON: {error}")]
    if not isinstance(table, dict):
        return None, [StateFault("not a JSON object")]
    faults = list(_faults_of_state(table, is_nested))
    if any(fault.is_fatal for fault in faults):
        return None, faults
    offset = float(table["nested_offset"]) if is_nested else None
    format = Format(table["quant_type"], table["blocksize"], is_nested, table["dtype"])
    return StateFields(format, tuple(table["shape"]), offset), faults


def _faults_of_state(table: Mapping[str, Any], is_nested: bool) -> Iterator[StateFault]:
    """Yields what is wrong with the fields of a quant state."""
    for key in table.keys() - _ALLOWED.keys():
        yield StateFault(f"has the key {key!r:.100}, at which bitsandbytes fails", is_fatal=False)
    for key, allowed in _ALLOWED.items():
        value = table.get(key)
        if key.startswith("nested_") and not is_nested:
            if key in table:
                text = f"has {key}, but there is no nested_absmax"
                yield StateFault(text, is_fatal=False)
        elif key not in table:
            yield StateFault(f"lacks {key}")
        elif allowed and (type(value) not in (str, int) or value not in allowed):  # 64.0 is not 64
            expected = " or ".join(map(str, allowed))
            yield StateFault(f"{key} is {value!r:.100}, expected {expected}")
        elif key == "shape" and not _is_shape(value):
            yield StateFault(f"{value!r:.100} is not a shape")
        elif key == "nested_offset" and not _is_float32(value):
            yield StateFault(f"nested_offset is {value!r:.100}, which is no float32")
        elif key == "nested_dtype" and value != "float32":
            text = (
                f"nested_dtype is {value!r:.100}: bitsandbytes on a CPU, saved after a forward "
                f"pass, which quantizes the absmax again; give it the original"
            )
            yield StateFault(text, is_fatal=False)


def _is_float32(value: object) -> bool:
    """Returns True for a number that float32 can hold, NaN and infinity among them."""
    if isinstance(value, bool) or not isinstance(value, (float, int)):
        return False
    return not _LARGEST_FLOAT32 < abs(value) < math.inf


def _is_shape(value: object) -> bool:
    """Returns True for a list of sizes that torch could hold; True and 1.0 are no sizes."""
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return False
    if not all(type(size) is int and 0 <= size < _LARGEST_SIZE for size in value):
        return False
    return math.prod(value) < _LARGEST_SIZE


def parts_of(name: str, tensors: Mapping[str, PartT]) -> dict[str, PartT]:
    """Returns what stands beside the codes of a weight, by suffix."""
    found = {}
    for suffix in COMPONENT_SUFFIXES:
        part = tensors.get(f"{name}.{suffix}")
        if part is not None:
            found[suffix] = part
    return found


def split_component(name: str) -> tuple[str, str]:
    """Divides the name of a tensor into that of a weight and a suffix."""
    for suffix in COMPONENT_SUFFIXES:
        if name.endswith(f".{suffix}"):
            return name[: -len(suffix) - 1], suffix
    head, found, tail = name.partition(f".{QUANT_STATE_PREFIX}")
    return (head, f"{QUANT_STATE_PREFIX}{tail}") if found else (name, "")
