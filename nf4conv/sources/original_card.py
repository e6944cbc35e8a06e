"""Reads what is taken over from the model card of the original."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nf4conv.errors import SourceError
from nf4conv.sources.files import require_own

OWN_TAGS: Final = ("bitsandbytes", "4-bit", "nf4", "fp4", "nf4conv")
"""Tags that cards of nf4conv have."""

_FRONT_MATTER: Final = re.compile(rb"\A---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_OURS: Final = re.compile(
    r"# (?:.+ in 4 bits|A merged model)\n\n.+\bnf4conv \d+\.\d+[\w.+-]*\.(?: .+)?(?:\n|\Z)"
)
"""The beginning of a card that nf4conv wrote (report/card.md.jinja)."""

_LONGEST_FRONT_MATTER: Final = 2**17  # bytes
_LONGEST_CARD: Final = 2**20  # bytes


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
    def tags(self) -> list[str]:
        """Returns its tags, without those that nf4conv wrote."""
        found = self.fields.get("tags", [])
        tags = [found] if isinstance(found, str) else list(found)
        return [tag for tag in tags if tag not in OWN_TAGS] if self.is_ours else tags


def read_front_matter(path: Path) -> tuple[OriginalCard, tuple[str, ...]]:
    """Reads a README.md, which may be missing, and no link that leads out of its folder.

    Returns the card, empty if there is none, or if it cannot be read; and why it cannot be read.
    """
    if not path.is_file():
        return OriginalCard(), ()
    try:
        require_own(path, path.parent)
        return _read_card(path), ()
    except (OSError, ValueError, RecursionError, SourceError) as error:
        reason = " ".join(str(error).removeprefix(f"{path}: ").split())
        note = f"README.md: its front matter cannot be read, so the new card ignores it: {reason}"
        return OriginalCard(), (note,)


def _read_card(path: Path) -> OriginalCard:
    """Reads a card; raises anything for one that cannot be read."""
    with path.open("rb") as file:
        content = file.read(_LONGEST_CARD)
    fields = {}
    block = _FRONT_MATTER.match(content)
    if block is not None:
        if block.end() > _LONGEST_FRONT_MATTER:
            raise ValueError(f"it does not end within {_LONGEST_FRONT_MATTER:,} bytes")
        front = _parsed(block[1].decode())
        fields = {key: value for key, value in front.items() if _is_plain(value)}
        content = content[block.end() :]
    text = content.decode(errors="replace").strip()
    body = _of_authors(text)
    return OriginalCard(fields, body, is_ours=body != text)


def _of_authors(text: str) -> str:
    """Returns a text without what an earlier nf4conv wrote at its beginning.

    Our cards have the text of the original's authors below a line of dashes. There is no such line
    above it.
    """
    while _OURS.match(text) is not None:
        text = text.partition("\n---\n")[2].strip()
    return text


def _parsed(front: str) -> dict[str, Any]:
    """Reads strings, lists and mappings.

    Refuses aliases: with them a few lines stand for gigabytes.
    """
    import yaml  # importing it takes a moment

    # while it is composed: to go through its events first takes minutes where they are nested
    class PlainLoader(yaml.BaseLoader):  # type: ignore[misc]  # yaml has no types
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has aliases")
            return super().compose_node(parent, index)

    try:
        found = yaml.load(front, PlainLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return found if isinstance(found, dict) else {}


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return value not in ("", "null", "~")  # YAML's ways to say nothing
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
