"""Shows how far a run is, on stderr: by tqdm on a terminal, elsewhere by a line now and then."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from nf4conv.format.units import size
from nf4conv.plan.calibration import Calibration
from nf4conv.report.text.terminal import tell

_SECONDS_BETWEEN_LINES: Final = 30.0

_BLOCK_BAR: Final = "{desc}: {percentage:3.0f}%|{bar}| {postfix} [{elapsed}<{remaining}]"


@contextmanager
def progress(
    verb: str,
    total: int,
    *,
    hidden: bool,
    last: str = "finishing",
    calibration: Calibration | None = None,
) -> Iterator[Callable[[int], None]]:
    """Shows how many of `total` bytes of the source have been read.

    Yields a function to call, from any thread, with the number of bytes that have been read since
    the last call. Those that a calibration reads come first. `verb` is what is being done, such as
    "quantizing", and `last` what is left when all bytes have been read.
    """
    wanted = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper()
    if hidden or wanted in ("1", "ON", "YES", "TRUE"):
        yield lambda _: None
        return
    phases = [_Phase(verb, total, last)]
    if calibration is not None:
        own = _Phase("calibrating", calibration.bytes_to_read, "calibrating", calibration)
        phases = [own, _Phase(verb, total - calibration.bytes_spared, last)]
    lock = threading.Lock()
    phases[0].begin()

    def advance(count: int) -> None:
        with lock:
            while True:
                count = phases[0].advance(count)
                if not phases[0].is_over or len(phases) == 1:
                    return
                phases.pop(0).close()
                phases[0].begin()

    try:
        yield advance
    finally:
        phases[0].close()


class _Phase:
    """A part of a run whose bytes are counted by themselves."""

    def __init__(
        self, verb: str, total: int, last: str, calibration: Calibration | None = None
    ) -> None:
        self._verb = verb
        self._total = total
        self._last = last
        self._calibration = calibration
        self._done = 0
        self._started = 0.0
        self._last_line = 0.0
        self._bar: Any = None

    @property
    def is_over(self) -> bool:
        return self._done >= self._total

    def begin(self) -> None:
        self._started = self._last_line = time.monotonic()
        if not sys.stderr.isatty():
            return
        from tqdm import tqdm  # this import takes a moment

        shape = {} if self._calibration is None else {"bar_format": _BLOCK_BAR}
        self._bar = tqdm(
            total=self._total, desc=self._verb, unit="B", unit_scale=True, leave=False, **shape
        )
        if self._calibration is not None:
            self._bar.set_postfix_str(self._describe(1.0))

    def advance(self, count: int) -> int:
        """Counts bytes of this phase, and returns those that are left for the next one."""
        part = min(count, self._total - self._done)  # a bar that overruns would vanish
        self._done += part
        if self._bar is None:
            self._write_line()
            return count - part
        if self._calibration is not None:
            self._bar.set_postfix_str(self._describe(1.0), refresh=False)
        self._bar.update(part)
        if self.is_over:
            self._bar.set_description(self._last)
        return count - part

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _write_line(self) -> None:
        now = time.monotonic()
        if now - self._last_line < _SECONDS_BETWEEN_LINES or not self._done:
            return
        self._last_line = now
        seconds = now - self._started
        minutes_left = (self._total - self._done) * seconds / self._done / 60
        tell(f"{self._verb}: {self._describe(seconds)}, about {minutes_left:.0f} min left")

    def _describe(self, seconds: float) -> str:
        """Says how much is done after a number of seconds."""
        if self._calibration is not None:
            return self._calibration.describe(self._done)
        percent = 100 * self._done / self._total
        speed = size(self._done / seconds)
        return f"{size(self._done)} of {size(self._total)} ({percent:.0f} %), {speed}/s"
