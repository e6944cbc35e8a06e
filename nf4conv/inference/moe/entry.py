"""The way in: `import nf4conv.inference.moe`, or bitsandbytes, which calls `activate`.

bitsandbytes calls every entry point of the group `bitsandbytes.backends`, and transformers imports
bitsandbytes before it prepares a 4-bit model. Either may be imported first, so `activate` patches
transformers if its quantizer is there already, and otherwise waits until it is imported. Nothing
heavy is imported for it, and nothing is raised: bitsandbytes could not be imported then. Until a
checkpoint with packed experts is loaded, the patched methods do nothing of their own.

NF4CONV_MOE=0 switches it off. Whatever release of transformers is installed, the loader looks
whether all that it hooks into is there and takes the arguments that it is called with.
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, Final

from nf4conv.inference.moe.loading.checkpoints import KNOWN, QUANTIZER, install, log

SWITCH: Final = "NF4CONV_MOE"


def _is_off() -> bool:
    """Returns whether the environment switches the loader off."""
    return os.environ.get(SWITCH, "").strip().lower() in ("0", "off", "no", "false")


def _needs_loader(version: str) -> bool:
    """Returns whether a release stacks experts: transformers 4 loads packed ones itself."""
    return int(version.partition(".")[0]) >= 5


class _Waiting:
    """Looks at every import whether transformers' quantizer is there by now, and finds nothing.

    A module that is being imported imports others, and those that follow it do too.
    """

    is_done = False

    def find_spec(self, *_: Any) -> None:
        """Acts once. What it raises becomes a warning: the import that is going on must work."""
        if self.is_done:
            return
        try:
            self.is_done = _patch_if_there()
        except Exception as error:  # noqa: BLE001 - others' imports must go on
            self.is_done = True
            log.warning("nf4conv is not active: %s: %s", type(error).__name__, error)


def activate() -> None:
    """Patches transformers' quantizer, now or when it is imported. Raises nothing."""
    waiting = _Waiting()
    if _is_off() or any(isinstance(one, _Waiting) for one in sys.meta_path):
        return
    waiting.find_spec()
    if not waiting.is_done:
        sys.meta_path.insert(0, waiting)


def _patch_if_there() -> bool:
    """Prepares transformers' quantizer by checkpoints.py, once; returns whether it is there."""
    quantizer = getattr(sys.modules.get(QUANTIZER), "Bnb4BitHfQuantizer", None)
    if quantizer is None:
        return False
    if "_nf4conv" in vars(quantizer) or not _needs_loader(sys.modules["transformers"].__version__):
        return True
    quantizer._nf4conv = None  # before an import, at which this is called again
    install(quantizer)
    return True


def status() -> str:
    """Returns in words whether 4-bit experts load here, by what is installed; imports nothing."""
    if _is_off():
        return f"off: {SWITCH}={os.environ[SWITCH]}"
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return "not active: transformers is not installed"
    if not _needs_loader(found):
        return f"not needed: transformers {found} loads experts one by one"
    names = [entry.value for entry in entry_points(group="bitsandbytes.backends")]
    if not any(name.startswith("nf4conv.inference.moe") for name in names):
        documented = "`import nf4conv.inference.moe`"
        return f"transformers {found}, after {documented}: no entry point is installed"
    return f"active for transformers {found}; known to work with {KNOWN}"
