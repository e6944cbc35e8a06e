"""Reads the front matter of the original's card, and writes that of ours."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from nf4conv.errors import SourceError
from nf4conv.report.card.subject import Subject
from nf4conv.sources.original_card import OriginalCard
from nf4conv.sources.own_files import require_own
from nf4conv.sources.source import Source

_INHERITED: Final = (
    "license",
    "license_name",
    "license_link",
    "language",
    "library_name",
    "pipeline_tag",
    "datasets",
)
"""Fields that hold for the result as for the original."""

_OWN_TAGS: Final = ("bitsandbytes", "4-bit", "nf4", "fp4", "nf4conv")

_FRONT_MATTER: Final = re.compile(rb"\A---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_OURS: Final = re.compile(
    r"# (?:.+ in 4 bits|A merged model)\n\n.+\bnf4conv \d+\.\d+[\w.+-]*\.(?: .+)?(?:\n|\Z)"
)
"""The beginning of a card that nf4conv wrote: see `introduction` in sections.py."""

_LONGEST_FRONT_MATTER: Final = 2**17  # bytes
_LONGEST_CARD: Final = 2**20  # bytes


def card_of(source: Source) -> tuple[OriginalCard, tuple[str, ...]]:
    """Reads the card of a source, as `read_front_matter` does, or what its header says for one."""
    if source.stated is not None:
        return source.stated, ()
    return read_front_matter(source.card, source.root_of_card)


def read_front_matter(path: Path, root: Path) -> tuple[OriginalCard, tuple[str, ...]]:
    """Reads the card of the original.

    Args:
        path: its README.md, which may be missing.
        root: the folder that links may not lead out of.

    Returns:
        The card, empty if there is none, or if it cannot be read; and a line for the user that says
        why it cannot be read.
    """
    if not path.is_file():
        return OriginalCard(), ()
    try:
        require_own(path, root)
        return _read_card(path), ()
    except (OSError, ValueError, RecursionError, yaml.YAMLError, SourceError) as error:
        reason = " ".join(str(error).removeprefix(f"{path}: ").split())
        note = f"README.md: its front matter cannot be read, so the new card ignores it: {reason}"
        return OriginalCard(), (note,)


def _read_card(path: Path) -> OriginalCard:
    """Reads a card; raises anything for one that cannot be read."""
    with path.open("rb") as file:
        start = file.read(_LONGEST_FRONT_MATTER)
        rest = file.read(_LONGEST_CARD)
    block = _FRONT_MATTER.match(start)
    if block is None:
        if len(start) == _LONGEST_FRONT_MATTER and start.startswith(b"---"):
            raise ValueError(f"it does not end within {_LONGEST_FRONT_MATTER:,} bytes")
        text = _text_of(start + rest)
        body = _of_authors(text)
        return OriginalCard(body=body, is_ours=body != text)
    front = yaml.load(block[1].decode(), _PlainLoader)
    if not isinstance(front, dict):
        front = {}
    fields = {key: value for key, value in front.items() if _is_plain(value)}
    text = _text_of(start[block.end() :] + rest)
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


def _text_of(raw: bytes) -> str:
    return raw.decode(errors="replace").strip()


class _PlainLoader(yaml.BaseLoader):  # type: ignore[misc]  # yaml has no types
    """Reads strings, lists and mappings.

    Refuses aliases: with them a few lines stand for gigabytes.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases")
        return super().compose_node(parent, index)


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return value not in ("", "null", "~")  # YAML's ways to say nothing
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def quantized_front_matter(subject: Subject) -> str:
    """Returns the front matter of a quantized model."""
    front = _common_fields(subject)
    tags = _original_tags(subject)
    tags += ["bitsandbytes", "4-bit", *subject.quant_types, "nf4conv"]
    front["tags"] = list(dict.fromkeys(tags))
    return _as_yaml(front)


def merged_front_matter(subject: Subject) -> str:
    """Returns the front matter of a model that adapters are merged into.

    Some of its weights may have stayed in 4 bits.
    """
    front = _common_fields(subject)
    tags = [tag for tag in _original_tags(subject) if tag not in _OWN_TAGS]
    if subject.weights:
        tags += ["bitsandbytes", "4-bit", *subject.quant_types]
    front["tags"] = list(dict.fromkeys([*tags, "nf4conv"]))
    return _as_yaml(front)


def _common_fields(subject: Subject) -> dict[str, Any]:
    """Returns all fields but the tags. The Hub files the result under its `base_model`."""
    front: dict[str, Any] = {}
    base_model = subject.name.base_model
    if base_model is not None and subject.adapters:
        merged = [adapter.origin for adapter in subject.adapters]
        repos = [origin.repo for origin in merged if origin is not None]
        front["base_model"] = [base_model, *repos]
        front["base_model_relation"] = "merge"
    elif base_model is not None:
        front["base_model"] = base_model
        front["base_model_relation"] = "quantized"
    for key in _INHERITED:
        value = subject.original.fields.get(key)
        if value:
            front[key] = value
    front.setdefault("library_name", subject.library)
    if subject.pipeline_tag:
        front.setdefault("pipeline_tag", subject.pipeline_tag)
    return front


def _original_tags(subject: Subject) -> list[str]:
    found = subject.original.fields.get("tags", [])
    tags = [found] if isinstance(found, str) else list(found)
    if subject.original.is_ours:
        return [tag for tag in tags if tag not in _OWN_TAGS]
    return tags


def _as_yaml(front: Mapping[str, Any]) -> str:
    return f"---\n{yaml.safe_dump(dict(front), sort_keys=False, allow_unicode=True)}---\n"
