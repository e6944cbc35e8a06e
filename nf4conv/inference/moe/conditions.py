"""Decides whether the loader acts.

It acts if the environment does not switch it off, if it knows the release of transformers, and if
all hooks are there that it needs.
"""

import inspect
import os
import re
from typing import Any, Final

SWITCH: Final = "NF4CONV_MOE"

FIRST_KNOWN: Final = (5, 8)
LAST_KNOWN: Final = (5, 23)
KNOWN: Final = "5.8 to 5.23"

_HOOKS: Final = (
    "_process_model_before_weight_loading",
    "param_element_size",
    "update_weight_conversions",
    "param_needs_quantization",
    "get_quantize_ops",
    "get_state_dict_and_metadata",
    "_process_model_after_weight_loading",
)
"""Methods of transformers' Bnb4BitHfQuantizer that the loader replaces or calls."""


def is_off() -> bool:
    """Returns whether the environment switches the loader off."""
    return os.environ.get(SWITCH, "").strip().lower() in ("0", "off", "no", "false")


def quantizes() -> bool:
    """Returns whether the environment asks to pack experts of 16-bit models too."""
    return os.environ.get(SWITCH, "").strip().lower() == "quantize"


def release_of(version: str) -> tuple[int, int]:
    """Returns the first two numbers of a version; (0, 0) if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def needs_loader(version: str) -> bool:
    """Returns whether a release stacks experts: transformers 4 loads packed ones itself."""
    return release_of(version) >= (5, 0)


def why_unknown(version: str, quantizer: Any = None) -> str | None:
    """Returns why the loader does not patch a release of transformers; None if it does.

    Args:
        version: the version of transformers.
        quantizer: the Bnb4BitHfQuantizer of that release, which must have the hooks; None to look
            at the version only.
    """
    release = release_of(version)
    if release < FIRST_KNOWN:
        return f"transformers {version} is older than the releases it knows ({KNOWN})"
    if release > LAST_KNOWN:
        return f"transformers {version} is newer than the releases it knows ({KNOWN})"
    if quantizer is None:
        return None
    missing = [name for name in _HOOKS if not callable(getattr(quantizer, name, None))]
    if missing:
        return f"transformers {version} lacks {missing[0]}, which the releases {KNOWN} have"
    before = inspect.signature(quantizer._process_model_before_weight_loading)
    if not any(each.kind is each.VAR_KEYWORD for each in before.parameters.values()):
        return f"transformers {version} does not tell a quantizer which files it loads"
    return None
