"""Reads the JSON of a quant state, and finds what is wrong with it."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from nf4conv.format import dtypes, layout
from nf4conv.format.codebook import BLOCKSIZES, CODEBOOKS, NESTED_BLOCKSIZE
from nf4conv.format.layout import QUANT_STATE_PREFIX
from nf4conv.sources.header import LARGEST_SIZE
from nf4conv.sources.stored_weights import Structure
from nf4conv.sources.tensors import TensorInfo

_LARGEST_FLOAT32: Final = 3.4028235e38

_ALLOWED: Final = {
    "quant_type": tuple(CODEBOOKS),
    "blocksize": BLOCKSIZES,
    "dtype": tuple(dtypes.DTYPE_NAMES.values()),
    "nested_blocksize": (NESTED_BLOCKSIZE,),
}
"""The values that fields of a quant state may have."""


def read_state(
    structure: Structure, blob: TensorInfo, suffix: str, is_nested: bool, scales: str
) -> Mapping[str, Any] | None:
    """Reads the JSON of a quant state and notes its faults.

    Args:
        structure: the checkpoint, which gets the findings.
        blob: the tensor with the JSON.
        suffix: its suffix, which names the quant type.
        is_nested: True if there is a nested_absmax.
        scales: how the weight was scaled according to the record.

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
