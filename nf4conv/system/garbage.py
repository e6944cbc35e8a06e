"""Does without Python's collection of garbage for a while."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collects no garbage meanwhile.

    Making hundreds of thousands of strings and lists takes half the time: else Python would look
    through all of them again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
