"""Shows how far a run is, on stderr."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from nf4conv.format.units import size
from nf4conv.report.text.terminal import tell
from nf4conv.system.background import Background, outlast

_SECONDS_BETWEEN_LINES: Final = 30.0
_SECONDS_BETWEEN_TICKS: Final = 0.5

_SLOW_IMPORTS: Final = ("torch", "transformers")
"""Libraries that take seconds to import, and longer from a busy disk."""


@contextmanager
def progress(
    verb: str, total: int, *, hidden: bool, last: str = "finishing"
) -> Iterator[Callable[[int], None]]:
    """Shows how far a run is: a bar on a terminal, and elsewhere a line now and then.

    Args:
        verb: what is being done with the source, such as "quantizing".
        total: the number of bytes that will be read.
        hidden: True to show nothing. HF_HUB_DISABLE_PROGRESS_BARS does the same.
        last: what is being done after all bytes have been read.

    Yields:
        A function to call with the number of bytes that have been read since the last call; from
        any thread.
    """
    if hidden or _is_disabled():
        yield _ignore
        return
    if not sys.stderr.isatty():
        yield _Log(verb, total).advance
        return
    from tqdm import tqdm

    with (
        tqdm(total=total, unit="B", unit_scale=True, leave=False, desc=verb) as bar,
        Ticking(bar, verb) as ticking,
    ):

        def advance(count: int) -> None:
            bar.update(min(count, total - bar.n))  # a bar that overruns would vanish
            if bar.n >= total:
                ticking.say(last)

        yield advance


class Ticking:
    """Lets the time of a bar go on while nothing is read, and says if a library is imported.

    Args:
        bar: a bar of tqdm.
        verb: what is being done.
    """

    def __init__(self, bar: Any, verb: str) -> None:
        self._bar = bar
        self._verb = verb
        self._stopped = threading.Event()
        self._thread = Background(self._tick, "nf4conv-ticks")

    def __enter__(self) -> "Ticking":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        outlast([self._thread], self._stopped.set)

    def say(self, verb: str) -> None:
        """Says what is being done from now on."""
        self._verb = verb
        self._show()

    def _tick(self) -> None:
        with suppress(Exception):  # a terminal that has gone takes nothing away from the run
            while not self._stopped.wait(_SECONDS_BETWEEN_TICKS):
                self._show()

    def _show(self) -> None:
        imported = [name for name in _SLOW_IMPORTS if _is_being_imported(name)]
        doing = f"{self._verb} (importing {imported[-1]})" if imported else self._verb
        self._bar.set_description(doing)


def _is_being_imported(name: str) -> bool:
    """Returns True while a module is being imported for the first time."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))  # importlib's own mark


def _is_disabled() -> bool:
    wanted = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper()
    return wanted in ("1", "ON", "YES", "TRUE")


def _ignore(count: int) -> None:
    """Shows nothing."""


class _Log:
    """Writes lines for a log: how much is done, how fast, and how long the rest takes."""

    def __init__(self, verb: str, total: int) -> None:
        self._verb = verb
        self._total = total
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._last_line = self._started
        self._done = 0

    def advance(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._done = min(self._done + count, self._total)
            if now - self._last_line < _SECONDS_BETWEEN_LINES or not self._done:
                return
            self._last_line = now
            self._tell(now - self._started)

    def _tell(self, seconds: float) -> None:
        rate = self._done / seconds
        percent = 100 * self._done / self._total
        minutes_left = (self._total - self._done) / max(rate, 1) / 60
        done = f"{size(self._done)} of {size(self._total)} ({percent:.0f} %)"
        speed = f"{size(rate)}/s, about {minutes_left:.0f} min left"
        tell(f"{self._verb}: {done}, {speed}")
