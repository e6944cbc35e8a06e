"""Lets transformers parse a config.json that may come from a stranger.

With the package `kernels` installed, transformers downloads and runs what an `attn_implementation`
such as "org/name" names, as soon as a model is built.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_KEYS: Final = frozenset(
    ("auto_map", "custom_pipelines", "custom_generate", "kernel_config", "use_kernels")
)
"""Keys that name code, or turn kernels of the Hub on."""

_ENDINGS: Final = ("_implementation", "_implementation_internal")
"""Ends of keys that name a kernel: those of attention, of experts, and of what comes next."""


def parse_config(config: Mapping[str, Any], config_class: Any) -> Any:
    """Returns what a class of transformers, or AutoConfig, makes of a config.json without code."""
    # only a file goes through all the code by which transformers reads a config
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(without_fetched_code(config)))
        return config_class.from_pretrained(folder, local_files_only=True)


def without_fetched_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a config without what makes transformers fetch code, at all levels.

    transformers then takes what it brings along, as for a config that names nothing.
    """
    return {
        key: _cleaned(value)
        for key, value in config.items()
        if key not in _KEYS and not key.endswith(_ENDINGS)
    }


def _cleaned(value: object) -> object:
    if isinstance(value, Mapping):
        return without_fetched_code(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return value
