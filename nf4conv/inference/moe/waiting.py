"""Waits for a module that others import, and acts when it is complete."""

import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

log = logging.getLogger("nf4conv.inference.moe")


def is_waiting_for(name: str) -> bool:
    """Returns True if something waits for a module."""
    return any(isinstance(finder, WaitingFor) and finder.name == name for finder in sys.meta_path)


class WaitingFor:
    """Waits on sys.meta_path for a module, and acts once when it is complete.

    Args:
        name: the module's name.
        act: does what is to be done, and returns whether the module was there. What it raises
            becomes a warning, for the module must stay importable.

    Attributes:
        name: the module's name.
    """

    def __init__(self, name: str, act: Callable[[], bool]) -> None:
        self.name = name
        self._act = act

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds the module as others do, with a loader that acts."""
        if name != self.name:
            # it was half imported when this began to wait, and is whole now
            if self.name in sys.modules and self._act():
                self._stop()
            return None
        self._stop()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._act_after(spec.loader)
        return spec

    def _stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _act_after(self, loader: Any) -> None:
        """Makes a loader of modules act after it has executed its module."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                self._act()
            except Exception as error:  # noqa: BLE001 - the module must stay importable
                log.warning("nf4conv is not active: %s: %s", type(error).__name__, error)

        loader.exec_module = exec_module
