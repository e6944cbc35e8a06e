"""Reads numbers of metadata and configs, where anything may stand."""

import struct
from collections.abc import Mapping
from typing import Any, Final

_LARGEST: Final = 2**24
"""Larger than any count or size of a model."""


def positive(values: Mapping[str, Any], key: str) -> int | None:
    """Returns a count or a size; None if there is no whole number above 0, or one beyond sense."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value <= _LARGEST else None


def counts_of(values: Mapping[str, Any], key: str) -> list[int]:
    """Returns a list of whole numbers; an empty one if there is something else."""
    found = values.get(key)
    if not isinstance(found, list) or len(found) > _LARGEST:
        return []
    if not all(isinstance(count, int) and 0 <= count <= _LARGEST for count in found):
        return []
    return [int(count) for count in found]


def shortest(value: float) -> float:
    """Returns the shortest decimal that is the same number in float32, as which it is stored."""
    for digits in range(1, 10):
        rounded = float(f"{value:.{digits}g}")
        if struct.pack("<f", rounded) == struct.pack("<f", value):
            return rounded
    return value
