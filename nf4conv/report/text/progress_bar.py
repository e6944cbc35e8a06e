"""Shows how far a command is, on stderr: by tqdm on a terminal, elsewhere by lines."""

import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from nf4conv.report.text.terminal import tell, tell_notes

_SECONDS_BETWEEN_LINES: Final = 30.0

_BAR: Final = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining} left, {rate_fmt}]"
_LINE: Final = (
    "{desc}: {n_fmt}{unit} of {total_fmt}{unit} ({percentage:.0f} %), {rate_fmt}, {remaining} left"
)


class Step(NamedTuple):
    """Is a step of a command.

    Attributes:
        verb: what is being done, such as "quantizing".
        total: the number of bytes that are read for it, or of what `unit` names.
        last: what is being done after all of them.
    """

    verb: str
    total: int
    last: str = "finishing"
    unit: str = "B"


class ProgressBar:
    """Is the `progress` of a command that tells it notes and steps before it begins.

    Args:
        hidden: True to show nothing. HF_HUB_DISABLE_PROGRESS_BARS hides the bar, and not the notes.
    """

    def __init__(self, *, hidden: bool) -> None:
        wanted = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper()
        self._shows_notes = not hidden
        self._shows_steps = not hidden and wanted not in ("1", "ON", "YES", "TRUE")
        self._steps: Sequence[Step] = ()
        self._bar: Any = None
        self._lock = threading.Lock()

    def begin(self, steps: Sequence[Step], notes: tuple[str, ...] = ()) -> None:
        """Shows notes, and that nothing is done yet."""
        if self._shows_notes:
            tell_notes(notes)
        if self._shows_steps:
            self._steps = steps
            self._bar = _bar(steps)

    def __call__(self, count: int) -> None:
        """Counts units that are done since the last call; from any thread."""
        with self._lock:
            if self._bar is None:
                return
            # a bar that overruns its total vanishes
            self._bar.update(min(count, self._bar.total - self._bar.n))
            doing = self._doing()
            if doing != self._bar.desc:
                self._bar.set_description_str(doing, refresh=sys.stderr.isatty())

    def _doing(self) -> str:
        """Returns what is being done after what has been counted."""
        done = self._bar.n
        for step in self._steps:
            if done < step.total:
                return step.verb
            done -= step.total
        return self._steps[-1].last

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def begin(progress: object, steps: Sequence[Step], notes: tuple[str, ...] = ()) -> None:
    """Tells what is about to be done, if `progress` is a bar and not a mere function."""
    if isinstance(progress, ProgressBar):
        progress.begin(steps, notes)


def _bar(steps: Sequence[Step]) -> Any:
    """Makes a bar for all steps; where no terminal is, one that writes lines."""
    from tqdm import tqdm  # this import takes a moment

    shape: dict[str, Any] = {"bar_format": _BAR}
    if not sys.stderr.isatty():
        shape = {
            "bar_format": _LINE,
            "file": _Lines(),
            "delay": _SECONDS_BETWEEN_LINES,
            "mininterval": _SECONDS_BETWEEN_LINES,
            "maxinterval": _SECONDS_BETWEEN_LINES,
        }
    return tqdm(
        total=sum(step.total for step in steps),
        desc=steps[0].verb,
        unit=steps[0].unit,
        unit_scale=True,
        leave=False,
        **shape,
    )


class _Lines:
    """Is a file for tqdm that makes a line of each state of a bar."""

    def write(self, text: str) -> None:
        line = text.strip()
        if line:
            tell(line)

    def flush(self) -> None:
        """Does nothing: a line is written at once."""
