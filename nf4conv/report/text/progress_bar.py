"""Shows how far a run is, on stderr."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from nf4conv.format.units import size
from nf4conv.plan.calibration import Calibration
from nf4conv.report.text.terminal import tell
from nf4conv.system.background import Background, outlast

_SECONDS_BETWEEN_LINES: Final = 30.0
_SECONDS_BETWEEN_TICKS: Final = 0.5

_SLOW_IMPORTS: Final = ("torch", "transformers")
"""Libraries that take seconds to import, and longer from a busy disk."""

_BLOCK_BAR: Final = "{desc}: {percentage:3.0f}%|{bar}| {postfix} [{elapsed}<{remaining}]"


class _Phase(Protocol):
    """A part of a run whose work is counted by itself."""

    @property
    def verb(self) -> str:
        """Says what is being done."""

    @property
    def total(self) -> int:
        """The bytes of the source that it takes."""

    def describe(self, done: int, seconds: float) -> str:
        """Says how much is done, and if it helps how fast."""


@dataclass(frozen=True)
class _Reading:
    """Bytes that are read."""

    verb: str
    total: int

    def describe(self, done: int, seconds: float) -> str:
        percent = 100 * done / self.total
        return f"{size(done)} of {size(self.total)} ({percent:.0f} %), {size(done / seconds)}/s"


@dataclass(frozen=True)
class _Calibrating:
    """Blocks that a text runs through."""

    calibration: Calibration
    verb: str = "calibrating"

    @property
    def total(self) -> int:
        return self.calibration.bytes_to_read

    def describe(self, done: int, seconds: float) -> str:  # noqa: ARG002
        blocks = self.calibration.blocks
        tokens = self.calibration.tokens + self.calibration.judging_tokens
        finished = self._finished(done)
        run = finished * tokens
        of_pass = ""
        if self.calibration.passes > 1:
            number = min(finished // blocks + 1, self.calibration.passes)
            of_pass = f"pass {number} of {self.calibration.passes}, "
            finished -= (number - 1) * blocks
        return f"{of_pass}{finished} of {blocks} blocks, {run:,} tokens"

    def _finished(self, done: int) -> int:
        """Returns how many blocks are finished, in all passes."""
        of_pass = sum(self.calibration.block_bytes)
        passes, left = divmod(done, of_pass)
        finished = passes * self.calibration.blocks
        sizes = self.calibration.block_bytes
        if passes == 1 and self.calibration.passes > 1:
            sizes = sizes[::-1]  # the gradients come from behind
        for nbytes in sizes:
            left -= nbytes
            if left < 0:
                break
            finished += 1
        return finished


@contextmanager
def progress(
    verb: str,
    total: int,
    *,
    hidden: bool,
    last: str = "finishing",
    calibration: Calibration | None = None,
) -> Iterator[Callable[[int], None]]:
    """Shows how far a run is: a bar on a terminal, and elsewhere a line now and then.

    Args:
        verb: what is being done with the source, such as "quantizing".
        total: the number of bytes that will be read.
        hidden: True to show nothing. HF_HUB_DISABLE_PROGRESS_BARS does the same.
        last: what is being done after all bytes have been read.
        calibration: what comes before, and is shown in blocks and tokens; None for nothing.

    Yields:
        A function to call with the number of bytes that have been read since the last call; from
        any thread. Those that a calibration reads come first.
    """
    if hidden or _is_disabled():
        yield _ignore
        return
    phases: list[_Phase] = [_Reading(verb, total)]
    if calibration is not None:
        phases = [_Calibrating(calibration), _Reading(verb, total - calibration.bytes_spared)]
    shown = _Bars(last) if sys.stderr.isatty() else _Log()
    counter = _Counter(phases, shown)
    try:
        yield counter.advance
    finally:
        shown.close()


def _is_disabled() -> bool:
    wanted = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper()
    return wanted in ("1", "ON", "YES", "TRUE")


def _ignore(count: int) -> None:
    """Shows nothing."""


class _Display(Protocol):
    """Shows a phase after the other."""

    def begin(self, phase: _Phase) -> None:
        """Shows that a phase begins."""

    def show(self, phase: _Phase, done: int) -> None:
        """Shows how much of it is done."""

    def close(self) -> None:
        """Takes away what should not stay."""


class _Counter:
    """Counts what is done, phase by phase."""

    def __init__(self, phases: Sequence[_Phase], display: _Display) -> None:
        self._phases = list(phases)
        self._display = display
        self._lock = threading.Lock()
        self._done = 0
        display.begin(self._phases[0])

    def advance(self, count: int) -> None:
        with self._lock:
            while True:
                phase = self._phases[0]
                # a bar that overruns would vanish
                part = min(count, phase.total - self._done)
                self._done += part
                count -= part
                self._display.show(phase, self._done)
                if self._done < phase.total or len(self._phases) == 1:
                    return
                self._phases.pop(0)
                self._done = 0
                self._display.begin(self._phases[0])
                if not count:
                    return


class _Bars:
    """Shows a bar on a terminal.

    Args:
        last: what is being done after all bytes have been read.
    """

    def __init__(self, last: str) -> None:
        self._last = last
        self._bar: Any = None
        self._ticking: Ticking
        self._shown = ExitStack()

    def begin(self, phase: _Phase) -> None:
        from tqdm import tqdm

        self.close()
        if isinstance(phase, _Calibrating):
            self._bar = tqdm(total=phase.total, leave=False, desc=phase.verb, bar_format=_BLOCK_BAR)
            self._bar.set_postfix_str(phase.describe(0, 1.0))
        else:
            self._bar = tqdm(
                total=phase.total, unit="B", unit_scale=True, leave=False, desc=phase.verb
            )
        self._shown.enter_context(self._bar)
        self._ticking = self._shown.enter_context(Ticking(self._bar, phase.verb))

    def show(self, phase: _Phase, done: int) -> None:
        if isinstance(phase, _Calibrating):
            self._bar.set_postfix_str(phase.describe(done, 1.0), refresh=False)
        self._bar.update(done - self._bar.n)
        if done >= phase.total and not isinstance(phase, _Calibrating):
            self._ticking.say(self._last)

    def close(self) -> None:
        self._shown.close()


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


class _Log:
    """Writes lines for a log: how much is done, how fast, and how long the rest takes."""

    def __init__(self) -> None:
        self._started = 0.0
        self._last_line = 0.0

    def begin(self, phase: _Phase) -> None:  # noqa: ARG002
        self._started = time.monotonic()
        self._last_line = self._started

    def show(self, phase: _Phase, done: int) -> None:
        now = time.monotonic()
        if now - self._last_line < _SECONDS_BETWEEN_LINES or not done:
            return
        self._last_line = now
        seconds = now - self._started
        minutes_left = (phase.total - done) * seconds / done / 60
        tell(f"{phase.verb}: {phase.describe(done, seconds)}, about {minutes_left:.0f} min left")

    def close(self) -> None:
        """Leaves the lines where they are."""
