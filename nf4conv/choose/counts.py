"""Refuses configs with many more layers or experts than the tensors of a checkpoint show.

transformers makes a module for each of them before it looks at a single tensor.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from nf4conv.models.config import levels

_ALWAYS_ALLOWED: Final = 1024  # stacked experts, and layers that share weights, have no numbers

_COUNTED: Final = ("layer", "depth", "expert")
_NO_COUNTS: Final = ("size", "dim", "width", "channels")
"""Words in the keys of numbers that are counts, and of those that are none."""


def excess_of(config: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Returns what is wrong with the counts of a config; None if nothing is.

    Args:
        config: the content of config.json.
        names: the names of the tensors of the checkpoint, which number layers and experts.
    """
    shown = 0
    listed = list(names)
    for name in listed:
        for number in re.findall(r"(?<![^.])[0-9]{1,9}(?![^.])", name):
            # no more of them can have weights than there are tensors
            shown = max(shown, min(int(number) + 1, len(listed)))
    for key, value in _counts_in(config):
        if value > max(_ALWAYS_ALLOWED, 2 * shown):
            return f"{key} is {value:,}, and the tensors show {shown:,} layers or experts at most"
    return None


def _counts_in(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yields (key, value) of all numbers of layers or experts, those in lists among them."""
    for _, level in levels(config):
        for key, value in level.items():
            if not any(word in key for word in _COUNTED) or any(word in key for word in _NO_COUNTS):
                continue
            for number in value if isinstance(value, list) else [value]:
                if type(number) is int:
                    yield key, number
