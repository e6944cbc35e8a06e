"""Shows how far a command is, on stderr: by tqdm on a terminal, elsewhere by lines."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from nf4conv.format.units import size
from nf4conv.report.text.terminal import tell, tell_notes

_SECONDS_BETWEEN_LINES: Final = 30.0

_BAR_OF_SHARES: Final = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"


@dataclass(frozen=True)
class Step:
    """Is a step of a command, whose progress is counted by itself.

    Attributes:
        verb: what is being done, such as "quantizing".
        total: the number of bytes that are read for it.
        last: what is being done after all of them.
        is_share: True if `total` is 1, of whatever is done; then no bytes are shown.
    """

    verb: str
    total: float
    last: str = "finishing"
    is_share: bool = False


class ProgressBar:
    """Is the `progress` of a command that tells it notes and steps before it begins.

    Args:
        hidden: True to show nothing. HF_HUB_DISABLE_PROGRESS_BARS hides the bar, and not the notes.
    """

    def __init__(self, *, hidden: bool) -> None:
        wanted = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper()
        self._shows_notes = not hidden
        self._shows_steps = not hidden and wanted not in ("1", "ON", "YES", "TRUE")
        self._steps: list[_Running] = []
        self._lock = threading.Lock()

    def begin(self, steps: Sequence[Step], notes: tuple[str, ...] = ()) -> None:
        """Shows notes, and the first step."""
        if self._shows_notes:
            tell_notes(notes)
        if self._shows_steps:
            self._steps = [_Running(step) for step in steps]
            self._steps[0].begin()

    def __call__(self, count: float) -> None:
        """Counts units that are done since the last call; from any thread."""
        with self._lock:
            while self._steps:
                count = self._steps[0].advance(count)
                if not self._steps[0].is_over or len(self._steps) == 1:
                    return
                self._steps.pop(0).close()
                self._steps[0].begin()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for step in self._steps:
            step.close()


def begin(progress: object, steps: Sequence[Step], notes: tuple[str, ...] = ()) -> None:
    """Tells what is about to be done, if `progress` is a bar and not a mere function."""
    if isinstance(progress, ProgressBar):
        progress.begin(steps, notes)


class _Running:
    """Counts and shows one step."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._done: float = 0
        self._started = 0.0
        self._last_line = 0.0
        self._bar: Any = None

    @property
    def is_over(self) -> bool:
        return self._done >= self._step.total

    def begin(self) -> None:
        self._started = self._last_line = time.monotonic()
        if not sys.stderr.isatty():
            return
        from tqdm import tqdm  # this import takes a moment

        shape = {"bar_format": _BAR_OF_SHARES} if self._step.is_share else {}
        self._bar = tqdm(
            total=self._step.total,
            desc=self._step.verb,
            unit="B",
            unit_scale=True,
            leave=False,
            **shape,
        )

    def advance(self, count: float) -> float:
        """Counts units of this step, and returns those that are left for the next one."""
        part = min(count, self._step.total - self._done)  # a bar that overruns would vanish
        self._done += part
        if self._bar is None:
            self._write_line()
            return count - part
        self._bar.update(part)
        if self.is_over:
            self._bar.set_description(self._step.last)
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
        minutes_left = (self._step.total - self._done) * seconds / self._done / 60
        tell(f"{self._step.verb}: {self._describe(seconds)}, about {minutes_left:.0f} min left")

    def _describe(self, seconds: float) -> str:
        """Says how much is done after a number of seconds."""
        done, total = self._done, self._step.total
        share = f"{100 * done / total:.0f} %"
        if self._step.is_share:
            return share
        return f"{size(done)} of {size(total)} ({share}), {size(done / seconds)}/s"
