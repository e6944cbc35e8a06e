"""Finds the model card that belongs to a GGUF file, or makes the beginning of one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nf4conv.sources.gguf.incoming import Texts

CARD: Final = "README.md"

_FIELDS: Final = {
    "general.license": "license",
    "general.license.name": "license_name",
    "general.license.link": "license_link",
}
"""Fields of a card's front matter by the keys of the metadata (docs/gguf.md in ggml)."""

_LONGEST: Final = 200  # letters of a field; those that models have are shorter
_MOST_LANGUAGES: Final = 200


def card_beside(file: Path) -> Path | None:
    """Returns the model card in the folder of a GGUF file; None if there is none."""
    card = file.parent / CARD
    return card if card.is_file() else None


def card_of(metadata: Mapping[str, Any]) -> bytes:
    """Returns the front matter of a card, with what the metadata says of licence and languages.

    The metadata's base models are left out: they are those of the model that was converted, which
    need not be what this file was made from.
    """
    fields: dict[str, str | list[str]] = {}
    for key, name in _FIELDS.items():
        value = metadata.get(key)
        if isinstance(value, str) and 0 < len(value) <= _LONGEST:
            fields[name] = value
    languages = metadata.get("general.languages")
    if isinstance(languages, Texts) and 0 < len(languages) <= _MOST_LANGUAGES:
        fields["language"] = [language[:_LONGEST] for language in languages]
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    return "\n".join(["---", *lines, "---", ""]).encode()
