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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

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
LARGEST_QUANT_STATE: Final = 2**16  # bytes of a JSON blob: some hundred are usual

JSON_KEYS: Final = ("quant_type", "blocksize", "dtype", "shape")
NESTED_JSON_KEYS: Final = ("nested_blocksize", "nested_dtype", "nested_offset")

_LONGEST_OFFSET: Final = -1.1754943508222875e-38  # no float32 has a longer repr


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


@dataclass(frozen=True)
class Component:
    """One tensor that a 4-bit weight becomes on disk.

    Attributes:
        suffix: what follows `W.` in its name; empty for the packed codes themselves.
        dtype: safetensors' dtype tag, of STORAGE_DTYPES.
        shape: its shape. The JSON blob's is the longest that it can get: the number of decimals of
            nested_offset varies.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def block_count(elements: int, blocksize: int) -> int:
    """Returns the number of blocks, of which the last may be partial."""
    return -(-elements // blocksize)


def quant_state_json(
    format: Format, shape: Sequence[int], nested_offset: float | None = None
) -> bytes:
    """Returns the JSON blob: the bytes of bitsandbytes' `QuantState.as_dict(packed=True)`.

    Args:
        format: of the weight.
        shape: of the weight before it was packed.
        nested_offset: the float32 mean of absmax, widened to float64; None without double
            quantization.
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
    """Returns the tensors that a weight becomes, in the order of the module docstring.

    Args:
        format: of the weight.
        shape: of the weight before it is packed.
    """
    elements = math.prod(shape)
    blocks = block_count(elements, format.blocksize)
    packed_bytes = -(-elements // 2)
    packed_shape = (8 * packed_bytes // DTYPE_BITS[format.storage_tag], 1)
    packed = Component("", format.storage_tag, packed_shape)
    quant_map = Component("quant_map", "F32", (len(CODEBOOKS[format.quant_type].values),))
    blob_suffix = f"{QUANT_STATE_PREFIX}{format.quant_type}"
    if not format.double_quant:
        absmax = Component("absmax", "F32", (blocks,))
        blob = Component(blob_suffix, "U8", (len(quant_state_json(format, shape)),))
        return (packed, absmax, quant_map, blob)
    absmax = Component("absmax", "U8", (blocks,))
    nested_absmax = Component("nested_absmax", "F32", (block_count(blocks, NESTED_BLOCKSIZE),))
    nested_quant_map = Component("nested_quant_map", "F32", (len(DYNAMIC_MAP),))
    longest_json = quant_state_json(format, shape, _LONGEST_OFFSET)
    blob = Component(blob_suffix, "U8", (len(longest_json),))
    return (packed, absmax, quant_map, nested_absmax, nested_quant_map, blob)


def parse_quant_state(blob: bytes, *, may_say_more: bool = False) -> dict[str, Any]:
    """Reads a JSON blob.

    Args:
        blob: the bytes.
        may_say_more: True to accept other keys besides bitsandbytes' own.

    Returns:
        Its fields by name. "quant_type", "blocksize", "dtype" and "shape" are there and valid; the
        nested ones may be missing or of any kind, see `nested_offset_of`.

    Raises:
        CodecError: bitsandbytes could not read it.
    """
    try:
        fields = json.loads(blob)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"quant_state: not JSON ({error})") from error
    needed = set(JSON_KEYS)
    known = {*JSON_KEYS, *NESTED_JSON_KEYS}
    has_right_keys = isinstance(fields, dict) and needed <= fields.keys()
    if has_right_keys and not may_say_more:
        has_right_keys = fields.keys() <= known
    if not has_right_keys:
        raise CodecError(f"quant_state: expected the keys {sorted(known)}, found {fields!r:.200}")
    if not _is_shape(fields["shape"]):
        raise CodecError(f"quant_state: shape {fields['shape']!r:.100} is not a list of sizes")
    _check_choice(fields, "quant_type", tuple(CODEBOOKS))
    _check_choice(fields, "blocksize", BLOCKSIZES)
    _check_choice(fields, "dtype", tuple(DTYPE_NAMES.values()))
    checked: dict[str, Any] = fields
    return checked


def _is_shape(value: object) -> bool:
    """Returns True for a list of sizes that torch could hold; True and 1.0 are no sizes."""
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size < 2**63 for size in value)


def _check_choice(
    fields: Mapping[str, Any], key: str, allowed: tuple[str, ...] | tuple[int, ...]
) -> None:
    """Raises a CodecError unless a field has one of the allowed values; 64.0 is not 64."""
    value = fields[key]
    if type(value) not in (str, int) or value not in allowed:
        raise CodecError(f"quant_state: {key} {value!r}, expected one of {list(allowed)}")


def nested_offset_of(fields: Mapping[str, Any]) -> float:
    """Returns the nested_offset of a JSON blob's fields, a float32 in float64.

    Raises:
        CodecError: there is none, or it is no number that float32 holds.
    """
    if not fields.keys() >= set(NESTED_JSON_KEYS):
        raise CodecError(
            f"quant_state: there is a nested_absmax, but not the keys {sorted(NESTED_JSON_KEYS)}"
        )
    if fields["nested_blocksize"] != NESTED_BLOCKSIZE:
        raise CodecError(
            f"quant_state: nested_blocksize {fields['nested_blocksize']}, expected "
            f"{NESTED_BLOCKSIZE}"
        )
    offset = fields["nested_offset"]
    if type(offset) not in (float, int):
        raise CodecError(f"quant_state: nested_offset {offset!r:.100} is not a number")
    try:
        struct.pack("<f", offset)
    except (OverflowError, struct.error):  # of a float, of an integer
        raise CodecError(
            f"quant_state: nested_offset {offset!r:.100} is too large for float32"
        ) from None
    return float(offset)
