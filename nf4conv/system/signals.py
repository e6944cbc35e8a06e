"""Handles the signals that end a command, and output that nobody reads any more.

An interrupt (Ctrl-C) and a request to stop exist on every system. On Windows the latter is
Ctrl-Break; to end a process from outside gives it no signal there at all, as SIGKILL on POSIX.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, TypeAlias

from nf4conv.system.machine import IS_POSIX

Handler: TypeAlias = Callable[[int, FrameType | None], Any]

INTERRUPT: Final = int(signal.SIGINT)
STOP: Final = int(signal.SIGTERM)
_BREAK: Final = int(getattr(signal, "SIGBREAK", STOP))  # which only Windows has

INTERRUPTED_EXIT: Final = 128 + INTERRUPT
STOPPED_EXIT: Final = 128 + STOP
UNREAD_EXIT: Final = 128 + 13
"""The exit code of a program whose output nobody reads any more; SIGPIPE is 13 where it exists."""

WORDS: Final = {INTERRUPT: "interrupted", STOP: "stopped", _BREAK: "stopped"}
"""What happened to a command that got a signal, by its number."""


def handle_end(handler: Handler) -> None:
    """Handles every signal that ends a command, unless it is to be ignored.

    A shell makes its background jobs ignore interrupts, which must stay so.
    """
    for number in WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def handle_stop(handler: Handler) -> None:
    """Handles the request to stop, if nobody does yet."""
    if signal.getsignal(STOP) is signal.SIG_DFL:
        signal.signal(STOP, handler)


def stop_handler() -> Any:
    """Returns what handles the request to stop now, for `restore_stop_handler`."""
    return signal.getsignal(STOP)


def restore_stop_handler(handler: Any) -> None:
    """Handles the request to stop as before."""
    signal.signal(STOP, handler)


def end_when_stopped() -> None:
    """Lets the request to stop end this process at once, without a word."""
    signal.signal(STOP, signal.SIG_DFL)


def ignore_interrupts() -> None:
    """Ignores interrupts from a terminal, which reach all of its processes."""
    signal.signal(INTERRUPT, signal.SIG_IGN)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Keeps interrupts from this thread for a while, and from processes that it starts meanwhile.

    Such a process is not interrupted while it is being set up. Does nothing on Windows.
    """
    if not IS_POSIX:
        yield
        return
    from multiprocessing import resource_tracker  # which is seldom needed

    # a process that every first one brings along, and at whose start interrupts are let through
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {INTERRUPT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_unread(error: OSError) -> bool:
    """Returns True if output cannot be written because nobody reads it any more.

    Windows says of such a pipe that the argument is invalid.
    """
    if isinstance(error, BrokenPipeError):
        return True
    return not IS_POSIX and error.errno == errno.EINVAL and error.filename is None


def discard_stdout() -> None:
    """Sends what is still to be printed nowhere.

    The interpreter would otherwise complain at its exit that stdout is closed.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
