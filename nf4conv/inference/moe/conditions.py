"""Decides whether the loader acts, and waits until what it changes has been imported.

NF4CONV_MOE=0 switches it off. Whatever release of transformers is installed, the loader looks
whether all that it hooks into is there and takes the arguments that it is called with.
"""

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable
from operator import attrgetter
from types import ModuleType
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


def is_off() -> bool:
    """Returns whether the environment switches the loader off."""
    return os.environ.get(SWITCH, "").strip().lower() in ("0", "off", "no", "false")


def needs_loader(version: str) -> bool:
    """Returns whether a release stacks experts: transformers 4 loads packed ones itself."""
    found = re.match(r"\d+", version)
    return found is not None and int(found[0]) >= 5


def misfit(name: str) -> str | None:
    """Returns what of an imported module of transformers the loader cannot work with; or None."""
    version = sys.modules["transformers"].__version__
    for hook, (positions, keywords) in HOOKS[name].items():
        reason = _misfit_of(sys.modules[name], hook, positions, keywords)
        if reason is not None:
            return (
                f"{hook} of transformers {version} does not fit ({reason}); "
                f"the loader works with transformers {KNOWN}"
            )
    return None


def _misfit_of(
    module: ModuleType, hook: str, positions: int, keywords: tuple[str, ...]
) -> str | None:
    """Returns why one hook cannot be called; None if it can."""
    arguments = [None] * positions
    try:
        signature = inspect.signature(attrgetter(hook)(module))
        signature.bind_partial(*arguments, **dict.fromkeys(keywords))
    except ValueError:  # what derives from a class in C has no signature
        return None
    except (AttributeError, TypeError) as error:
        return str(error)
    return None


class _Waiting:
    """Looks at every import whether a module is there by now, and finds none itself."""

    def __init__(self, act: Callable[[], bool]) -> None:
        self.act = act
        self.is_done = False

    def find_spec(self, *_: Any) -> None:
        """Acts once. What it raises becomes a warning: the import that is going on must work."""
        if self.is_done:
            return
        try:
            self.is_done = self.act()
        except Exception as error:  # noqa: BLE001 - others' imports must go on
            self.is_done = True
            log.warning("nf4conv is not active: %s: %s", type(error).__name__, error)


def act_when_there(act: Callable[[], bool]) -> None:
    """Calls a function now, and at each import from then on, until it returns True.

    A module that is being imported imports others, and those that follow it do too.
    """
    waits = any(isinstance(one, _Waiting) and one.act is act for one in sys.meta_path)
    if not waits and not act():
        sys.meta_path.insert(0, _Waiting(act))
