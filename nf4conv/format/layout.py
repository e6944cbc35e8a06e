"""How one 4-bit weight is laid out on disk: which tensors it becomes, their dtypes and shapes, and
the JSON blob.

A weight `W` of n elements becomes these tensors, in bitsandbytes' order (docs/format.md):

    W                                       packed codes, [ceil(n / 2), 1] uint8, the even element in the high nibble;
                                            or the same bytes seen as elements of another dtype
    W.absmax                                [blocks] float32; uint8 codes when the absmax is quantized too
    W.quant_map                             [16] float32, the code values
    W.nested_absmax                         [ceil(blocks / 256)] float32, double quantization only
    W.nested_quant_map                      [256] float32, double quantization only
    W.quant_state.bitsandbytes__nf4         the JSON below as uint8 ("__fp4" for FP4)

Nothing here imports torch, so that a plan can be made, and sized, before torch is loaded.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from nf4conv.errors import CodecError
from nf4conv.format.codebook import BLOCKSIZES, CODEBOOKS, DYNAMIC_MAP, NESTED_BLOCKSIZE

QUANT_STATE_PREFIX: Final = "quant_state.bitsandbytes__"

COMPONENT_SUFFIXES: Final = (
    *("absmax", "quant_map", "nested_absmax", "nested_quant_map"),
    *(f"{QUANT_STATE_PREFIX}{quant_type}" for quant_type in CODEBOOKS),
)
"""Every suffix a component of a 4-bit weight can have after `W.`."""

_MOST_DIMENSIONS: Final = 64  # as torch
LARGEST_QUANT_STATE: Final = 2**16  # bytes of a JSON blob: some hundred are usual

DTYPE_NAMES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""safetensors' dtype tags of the weights that can be quantized, and the names the JSON uses for
them.
"""

TAGS: Final = {name: tag for tag, name in DTYPE_NAMES.items()}

STORAGE_DTYPES: Final = {"U8": "uint8", "BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""What packed codes may be stored as, and how config.json calls it: FSDP shards only floats, all of
one dtype.
"""

ITEMSIZES: Final = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}  # bytes of an element of these

JSON_KEYS: Final = ("quant_type", "blocksize", "dtype", "shape")
NESTED_JSON_KEYS: Final = ("nested_blocksize", "nested_dtype", "nested_offset")

_LONGEST_OFFSET: Final = -1.1754943508222875e-38  # no float32 has a longer repr


@dataclass(frozen=True)
class Format:
    """How weights are packed: one choice for a whole checkpoint, as loaders require."""

    quant_type: str  # "nf4" or "fp4"
    blocksize: int  # elements that share one absmax
    double_quant: bool  # whether absmax is quantized too
    # "float32", "float16" or "bfloat16": what weights are cast to before they are packed, and what
    # other float tensors are stored in
    dtype: str
    quant_storage: str = "uint8"  # what packed codes are stored as, of STORAGE_DTYPES
    scales: str = "absmax"  # "absmax", or "search" for those that make the error small

    @property
    def storage_tag(self) -> str:
        """Safetensors' tag of quant_storage."""
        return next(tag for tag, name in STORAGE_DTYPES.items() if name == self.quant_storage)

    def decodes_like(self, other: "Format") -> bool:
        """Whether codes and scales of one are read as those of the other, which may be of other
        dtypes.
        """
        return (
            replace(self, dtype=other.dtype, quant_storage=other.quant_storage, scales=other.scales)
            == other
        )

    def __str__(self) -> str:
        storage = "" if self.quant_storage == "uint8" else f" in {self.quant_storage}"
        return f"{self.quant_type}{'+' if self.double_quant else ''}/{self.blocksize}{storage}"


@dataclass(frozen=True)
class Component:
    """One tensor that a 4-bit weight becomes on disk."""

    suffix: str  # what follows `W.` in its name; empty for the packed codes themselves
    dtype: str  # safetensors' dtype tag, of STORAGE_DTYPES
    shape: tuple[
        int, ...
    ]  # its shape. For the JSON blob the longest it can get: the decimals of nested_offset vary

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZES[self.dtype]


def block_count(elements: int, blocksize: int) -> int:
    return -(-elements // blocksize)


def quant_state_json(
    format: Format, shape: Sequence[int], nested_offset: float | None = None
) -> bytes:
    """The JSON blob, byte for byte as bitsandbytes' `QuantState.as_dict(packed=True)` writes it.

    The shape is that of the weight that was quantized; `nested_offset` is the float32 mean of
    absmax, widened, or None without double quantization.
    """
    state: dict[str, object] = {
        "quant_type": format.quant_type,
        "blocksize": format.blocksize,
        "dtype": format.dtype,
        "shape": list(shape),
    }
    if nested_offset is not None:
        state |= {
            "nested_blocksize": NESTED_BLOCKSIZE,
            "nested_dtype": "float32",
            "nested_offset": nested_offset,
        }
    return json.dumps(state).encode()


@lru_cache(maxsize=4096)
def components(format: Format, shape: tuple[int, ...]) -> tuple[Component, ...]:
    """The tensors that a weight of a shape becomes, in the order of the module docstring."""
    elements = math.prod(shape)
    blocks = block_count(elements, format.blocksize)
    longest_json = quant_state_json(format, shape, _LONGEST_OFFSET if format.double_quant else None)
    blob = Component(f"{QUANT_STATE_PREFIX}{format.quant_type}", "U8", (len(longest_json),))
    packed = Component(
        "", format.storage_tag, (-(-elements // 2) // ITEMSIZES[format.storage_tag], 1)
    )
    absmax = Component("absmax", "U8" if format.double_quant else "F32", (blocks,))
    quant_map = Component("quant_map", "F32", (16,))
    nested_absmax = Component("nested_absmax", "F32", (block_count(blocks, NESTED_BLOCKSIZE),))
    nested_quant_map = Component("nested_quant_map", "F32", (len(DYNAMIC_MAP),))
    nested = (nested_absmax, nested_quant_map) if format.double_quant else ()
    return (packed, absmax, quant_map, *nested, blob)


def parse_quant_state(blob: bytes, *, may_say_more: bool = False) -> dict[str, Any]:
    """The content of a JSON blob; a CodecError if bitsandbytes could not read it. It
    `may_say_more`: have more keys.
    """
    try:
        fields = json.loads(blob)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"quant_state: not JSON ({error})") from error
    known = {*JSON_KEYS, *NESTED_JSON_KEYS}
    if not isinstance(fields, dict) or not {*JSON_KEYS} <= fields.keys() <= (
        known if not may_say_more else {*fields}
    ):
        raise CodecError(f"quant_state: expected the keys {sorted(known)}, found {fields!r:.200}")
    shape = fields["shape"]
    is_short = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS
    if not is_short or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise CodecError(f"quant_state: shape {shape!r:.100} is not a list of sizes")
    for key, allowed in (
        ("quant_type", tuple(CODEBOOKS)),
        ("blocksize", BLOCKSIZES),
        ("dtype", tuple(DTYPE_NAMES.values())),
    ):
        if type(fields[key]) not in (str, int) or fields[key] not in allowed:
            raise CodecError(f"quant_state: {key} {fields[key]!r}, expected one of {list(allowed)}")
    return fields


def nested_offset_of(fields: Mapping[str, Any]) -> float:
    """The nested_offset of a blob's content; a CodecError if there is none, or it cannot be one."""
    if not fields.keys() >= {*NESTED_JSON_KEYS}:
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
