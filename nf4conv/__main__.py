"""`nf4conv`, and `python -m nf4conv`. Signals are answered before anything is imported that takes
time.

The answer is to end at once. An exception could come anywhere, be lost in the import of another
library, or abort its threads in C++; and nothing has to be put in order: a run may be killed at any
time, and the next one takes over there.
"""

import gc
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "stopped"}


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    is_terminal = os.isatty(2)
    error = "\033[31mError:\033[0m" if is_terminal and not os.environ.get("NO_COLOR") else "Error:"
    wipe = "\r\033[K" if is_terminal else ""  # what is there of a bar
    try:
        os.write(
            2,
            f"{wipe}{error} {_WORDS[signal.Signals(number)]}; the same command resumes\n".encode(),
        )
    finally:
        os._exit(128 + number)


def run() -> NoReturn:
    """The command line, as a program of its own."""
    for number in _WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in the background of a shell
            signal.signal(number, _leave)
    gc.set_threshold(
        200_000
    )  # of many small objects that live on, looking for dead ones takes a sixth of the time
    from nf4conv.cli import main  # importing it takes a moment, in which signals may come

    code: object = 0
    try:
        try:
            main(prog_name="nf4conv")
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
    except (
        OSError
    ) as error:  # of --help and --version, which no command writes, and of what was left to write
        os.write(2, f"Error: {error.strerror}\n".encode())
        code = code or 2
    # not by way of the interpreter's end, where signals go unanswered, and stalled threads of
    # transfers are torn down
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    run()
