"""Makes tokenizer.json of the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Any


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of tokenizer.json and tokenizer_config.json, by their names.

    Args:
        metadata: of the file.

    Returns:
        Nothing, if nf4conv cannot make a tokenizer of the metadata.
    """
    del metadata
    return {}
