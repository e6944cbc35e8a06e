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
        body: the text of its authors, below the front matter. Empty if it has none.
        is_ours: True if nf4conv wrote the card.
    """

    fields: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    body: str = ""
    is_ours: bool = False

    @property
    def base_of_ours(self) -> str | None:
        """Returns what a card of nf4conv names as the base model; None for any other card."""
        base = self.fields.get("base_model")
        return base if self.is_ours and isinstance(base, str) else None

    @property
    def bases_of_others(self) -> tuple[str, ...]:
        """Returns what a card that nf4conv did not write names as the base models."""
        bases = self.fields.get("base_model", ())
        if self.is_ours:
            return ()
        return (bases,) if isinstance(bases, str) else tuple(bases)
