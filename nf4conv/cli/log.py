"""Shows on stderr what the library logs: with --verbose, each stage of a command as it ends."""

import logging
import sys
from typing import Final

import click

from nf4conv.report.text.terminal import printable, tell

_LIBRARY: Final = logging.getLogger("nf4conv")


class _Lines(logging.Handler):
    """Writes each record as a line, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        seconds = record.relativeCreated / 1000
        line = f"[{seconds:6.1f} s] {printable(record.getMessage())}"
        bars = sys.modules.get("tqdm")
        if bars is None:
            tell(line)
        else:
            bars.tqdm.write(line, file=sys.stderr)


def show_log(context: click.Context, _parameter: click.Parameter, wanted: bool) -> bool:
    """Shows the log as long as a command runs; the callback of --verbose."""
    if not wanted or context.resilient_parsing:
        return wanted
    handler = _Lines()
    before = _LIBRARY.level

    def end() -> None:
        _LIBRARY.removeHandler(handler)
        _LIBRARY.setLevel(before)

    _LIBRARY.addHandler(handler)
    _LIBRARY.setLevel(logging.INFO)
    context.call_on_close(end)
    return wanted
