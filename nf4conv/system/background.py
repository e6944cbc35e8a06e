"""A thread that can be waited for, whatever interrupts come.

`Thread.join` cannot: up to Python 3.12 an interrupt in it makes a thread that runs pass for one
that has ended (threading.py: _wait_for_tstate_lock). So the thread itself says when it begins and
when it is over.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress


class Background:
    """Work that goes on beside its caller's, in a thread of this name, and raises nothing."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._guard = threading.Lock()
        self._begun = self._unwanted = self._is_over = False
        self._wake = threading.Lock()  # free when it is over and nobody has noticed
        self._wake.acquire()
        self.start = self._thread.start

    @property
    def is_busy(self) -> bool:
        """Whether it has begun and is not over."""
        return self._begun and not self._is_over

    def _run(self) -> None:
        with self._guard:
            if self._unwanted:
                return
            self._begun = True
        try:
            self._work()
        finally:
            self._is_over = True
            self._wake.release()

    def wait(self) -> None:
        """Wait until it is over; an interrupt is raised."""
        while not self._is_over:
            self._wake.acquire(timeout=0.2)  # so that signals are handled meanwhile

    def give_up(self, deadline: float) -> None:
        """Wait until it is over, or a time by the monotonic clock; if it has not begun, see that it
        never does.
        """
        with self._guard:
            self._unwanted = True
        while self.is_busy and time.monotonic() < deadline:
            self._wake.acquire(timeout=0.2)


def outlast(
    threads: Sequence[Background], stop: Callable[[], None], patience: float = math.inf
) -> None:
    """Wait until all is over, even through interrupts, of threads that work, have worked, or have
    not begun.

    `stop`, which may be called more than once, tells them to end; after seconds of patience they
    are left alone.
    """
    deadline, is_over = time.monotonic() + patience, False
    while not is_over:
        with suppress(BaseException):  # the first of them is what the caller leaves with
            stop()
            for thread in threads:
                thread.give_up(deadline)
            is_over = True
