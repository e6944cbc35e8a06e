"""Holds what is taken over from the model card of the original.

Every plan carries it. report/card/ reads it: that imports YAML, which takes a moment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OriginalCard:
    """The content of the original's README.md.

    Attributes:
        fields: its front matter; only fields whose value is a string or a list of strings.
        body: the text below the front matter. Empty if the original has no card.
    """

    fields: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    body: str = ""
