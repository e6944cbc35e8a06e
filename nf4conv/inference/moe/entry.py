"""The way in: `import nf4conv.inference.moe`, or bitsandbytes, which calls `activate`.

bitsandbytes calls every entry point of the group `bitsandbytes.backends`, and transformers imports
bitsandbytes before it prepares a 4-bit model. Either may be imported first, so `activate` patches
transformers if its quantizer is there already, and otherwise waits until it is imported. Nothing
heavy is imported for it, and nothing is raised: bitsandbytes could not be imported then. Until a
checkpoint with packed experts is loaded, the patched methods do nothing of their own.
"""

import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Final

from nf4conv.inference.moe.conditions import (
    KNOWN,
    QUANTIZER,
    SWITCH,
    act_when_there,
    is_off,
    misfit,
    needs_loader,
)

GROUP: Final = "bitsandbytes.backends"

log = logging.getLogger("nf4conv.inference.moe")


def activate() -> None:
    """Patches transformers' quantizer, now or when it is imported. Raises nothing."""
    try:
        if not is_off():
            act_when_there(_patch_if_there)
    except Exception as error:  # noqa: BLE001 - bitsandbytes must stay importable
        log.warning("nf4conv is not active: %s: %s", type(error).__name__, error)


def _patch_if_there() -> bool:
    """Gives transformers' quantizer the methods of hooks.py, once; returns whether it is there."""
    quantizer = getattr(sys.modules.get(QUANTIZER), "Bnb4BitHfQuantizer", None)
    if quantizer is None:
        return False
    if "_nf4conv" in vars(quantizer) or not needs_loader(sys.modules["transformers"].__version__):
        return True
    quantizer._nf4conv = None
    reason = misfit(QUANTIZER)
    if reason is not None:
        log.warning("nf4conv does not load 4-bit experts here: %s", reason)
        return True
    from nf4conv.inference.moe.hooks import install  # its imports are rarely needed

    install(quantizer)
    return True


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
    names = [entry.value for entry in entry_points(group=GROUP)]
    if not any(name.startswith("nf4conv.inference.moe") for name in names):
        documented = "`import nf4conv.inference.moe`"
        return f"transformers {found}, after {documented}: no entry point is installed"
    return f"active for transformers {found}; known to work with {KNOWN}"
