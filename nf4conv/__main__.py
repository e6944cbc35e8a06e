"""Runs the command line as a program: `nf4conv`, or `python -m nf4conv`.

SIGINT and SIGTERM get their handlers here, before any slow import. The handler ends the process at
once. It does not raise an exception: one that is raised during the import of another library may
get lost, or abort the library's C++ threads. Nothing needs to be tidied up either, because a run
may be killed at any time and the next run continues from what it left.
"""

import gc
import os
import sys
from types import FrameType
from typing import NoReturn

from nf4conv.system.signals import WORDS, handle_end


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """Handles a signal: writes one line to stderr and ends the process."""
    line = f"Error: {WORDS[number]}; the same command resumes\n"
    if os.isatty(2):
        line = f"\r\033[K{line}"  # wipes what is there of a progress bar
    try:
        os.write(2, line.encode())
    finally:
        os._exit(128 + number)


def run() -> NoReturn:
    """Runs the command line and ends the process."""
    handle_end(_leave)
    # A plan makes many small objects that live on. With Python's own threshold, looking for dead
    # ones takes a sixth of the time.
    gc.set_threshold(200_000)
    # numpy only sums here. As it is imported, OpenBLAS would start a thread for each core, which
    # takes a quarter of a second of a machine with 16.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from nf4conv.cli import main  # this import takes a moment, in which signals may come

    code = 0
    try:
        try:
            main(prog_name="nf4conv")
        except SystemExit as end:
            code = int(end.code or 0)
        sys.stdout.flush()
    except OSError as error:
        # Stdout cannot be written: --help, --version, or what was left in the buffer.
        os.write(2, f"Error: {error.strerror}\n".encode())
        code = code or 2
    # The usual end of the interpreter would leave signals unanswered, and tear down threads of
    # stalled transfers.
    os._exit(code)


if __name__ == "__main__":
    run()
