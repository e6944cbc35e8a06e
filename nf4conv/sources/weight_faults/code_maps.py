"""Finds code maps that differ from the standard ones."""

import math
import struct
from collections.abc import Sequence
from typing import Final

from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP
from nf4conv.sources.stored_weights import StoredWeight, Structure
from nf4conv.sources.tensors import TensorInfo

CLOSE: Final = 2**-8
"""Relative distance at which a code map still passes for the standard one, made in bfloat16.

Kernels decode with the standard map.
"""

_NEARLY_EQUAL: Final = 2**-21
"""Relative distance of a dynamic map that was made on a machine without fused multiply-add
(docs/format.md).
"""


def check_maps(structure: Structure, weight: StoredWeight) -> None:
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
        name: the name of the standard map.
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
