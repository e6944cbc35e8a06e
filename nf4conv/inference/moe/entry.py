"""The way in: `import nf4conv.inference.moe`, or bitsandbytes, which calls `activate`.

bitsandbytes calls every entry point of the group `bitsandbytes.backends`, and transformers imports
bitsandbytes before it prepares a 4-bit model. Either may be imported first, so `activate` patches
transformers if its quantizer is there already, and otherwise waits until it is imported. Nothing
heavy is imported for it, and nothing is raised: bitsandbytes could not be imported then.

NF4CONV_MOE=0         switches the loader off
NF4CONV_MOE=quantize  packs the experts of 16-bit models too, with `load_in_4bit=True`
"""

import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, Final

from nf4conv.inference.moe.conditions import SWITCH, is_off, needs_loader, why_unknown
from nf4conv.inference.moe.waiting import WaitingFor, is_waiting_for

GROUP: Final = "bitsandbytes.backends"
_QUANTIZER: Final = "transformers.quantizers.quantizer_bnb_4bit"
_CLASS: Final = "Bnb4BitHfQuantizer"

log = logging.getLogger("nf4conv.inference.moe")


def activate() -> None:
    """Patches transformers' quantizer, now or when it is imported. Raises nothing."""
    try:
        if is_off() or is_waiting_for(_QUANTIZER):
            return
        if not _patch_if_there():
            sys.meta_path.insert(0, WaitingFor(_QUANTIZER, _patch_if_there))
    except Exception as error:  # noqa: BLE001 - bitsandbytes must stay importable
        log.warning("nf4conv is not active: %s: %s", type(error).__name__, error)


def _patch_if_there() -> bool:
    """Patches the quantizer if it has been imported; returns whether it has."""
    quantizer = getattr(sys.modules.get(_QUANTIZER), _CLASS, None)
    if quantizer is None:
        return False
    patch(quantizer, sys.modules["transformers"].__version__)
    return True


def patch(quantizer: Any, transformers_version: str) -> None:
    """Gives transformers' quantizer the methods of hooks.py, if the release is known; once.

    Args:
        quantizer: the class Bnb4BitHfQuantizer.
        transformers_version: the version of transformers that it belongs to.
    """
    if "_nf4conv" in vars(quantizer) or not needs_loader(transformers_version):
        return
    quantizer._nf4conv = None
    reason = why_unknown(transformers_version, quantizer)
    if reason is not None:
        log.warning("nf4conv does not load 4-bit experts here: %s", reason)
        return
    from nf4conv.inference.moe.hooks import (
        install,  # its imports are light, but it is rarely needed
    )

    install(quantizer)


def status() -> str:
    """Returns in words whether 4-bit experts load here, by what is installed; imports nothing."""
    if is_off():
        return f"off: {SWITCH}={os.environ[SWITCH]}"
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return "not active: transformers is not installed"
    if not needs_loader(found):
        return f"not needed: transformers {found} loads experts one by one"
    reason = why_unknown(found)
    if reason is not None:
        return f"not active: {reason}"
    names = [entry.value for entry in entry_points(group=GROUP)]
    if not any(name.startswith("nf4conv.inference.moe") for name in names):
        documented = "`import nf4conv.inference.moe`"
        return f"transformers {found}, after {documented}: no entry point is installed"
    return f"active for transformers {found}"
