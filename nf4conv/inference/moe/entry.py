"""The way in: `import nf4conv.inference.moe`, or bitsandbytes, which calls `activate`.

bitsandbytes calls every entry point of the group `bitsandbytes.backends`, and transformers imports
bitsandbytes before it prepares a 4-bit model. Either may be imported first, so `activate` patches
transformers if its quantizer is there already, and otherwise waits until it is imported. Nothing
heavy is imported for it, and nothing is raised: bitsandbytes could not be imported then. Until a
checkpoint with packed experts is loaded, the patched methods do nothing of their own.

NF4CONV_MOE=0 switches it off. Whatever release of transformers is installed, the loader looks
whether all that it hooks into is there and takes the arguments that it is called with.
"""

import inspect
import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from operator import attrgetter
from typing import Any, Final

SWITCH: Final = "NF4CONV_MOE"

KNOWN: Final = "5.8 to 5.24"
"""The releases of transformers that the loader was tested with."""

QUANTIZER: Final = "transformers.quantizers.quantizer_bnb_4bit"
_CLASS: Final = "Bnb4BitHfQuantizer"

Filled = dict[str, tuple[int, tuple[str, ...]]]
"""By names, how many positions and which keywords of a call are filled."""

_METHODS: Final[Filled] = {
    f"{_CLASS}._process_model_before_weight_loading": (2, ("device_map", "checkpoint_files")),
    f"{_CLASS}.update_weight_conversions": (2, ()),
    f"{_CLASS}.param_element_size": (3, ()),
    f"{_CLASS}.get_state_dict_and_metadata": (2, ()),
    f"{_CLASS}._process_model_after_weight_loading": (2, ()),
}

HOOKS: Final[dict[str, Filled]] = {
    QUANTIZER: _METHODS,
    "transformers.core_model_loading": {
        "ConversionOps": (0, ()),
        "ErnieFuseAndSplitTextVisionExperts": (0, ()),
        "MergeModulelist": (1, ()),
        "SkipParameters": (0, ()),
        "WeightConverter": (3, ()),
        "WeightRenaming": (2, ()),
        "rename_source_key": (5, ()),
    },
    "transformers.integrations.moe": {
        "ALL_EXPERTS_FUNCTIONS.get_interface": (2, ()),
        "grouped_mm_experts_forward": (4, ()),
    },
}
"""What the loader hooks into, by modules of transformers."""

log = logging.getLogger("nf4conv.inference.moe")


def _is_off() -> bool:
    """Returns whether the environment switches the loader off."""
    return os.environ.get(SWITCH, "").strip().lower() in ("0", "off", "no", "false")


def _needs_loader(version: str) -> bool:
    """Returns whether a release stacks experts: transformers 4 loads packed ones itself."""
    return int(version.partition(".")[0]) >= 5


def misfit(name: str) -> str | None:
    """Returns what of an imported module of transformers the loader cannot work with; or None."""
    version = sys.modules["transformers"].__version__
    for hook, (positions, keywords) in HOOKS[name].items():
        try:
            signature = inspect.signature(attrgetter(hook)(sys.modules[name]))
            signature.bind_partial(*[None] * positions, **dict.fromkeys(keywords))
        except ValueError:  # what derives from a class in C has no signature
            continue
        except (AttributeError, TypeError) as reason:
            return (
                f"{hook} of transformers {version} does not fit ({reason}); "
                f"the loader works with transformers {KNOWN}"
            )
    return None


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
    """Gives transformers' quantizer the methods of hooks.py, once; returns whether it is there."""
    quantizer = getattr(sys.modules.get(QUANTIZER), "Bnb4BitHfQuantizer", None)
    if quantizer is None:
        return False
    if "_nf4conv" in vars(quantizer) or not _needs_loader(sys.modules["transformers"].__version__):
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
