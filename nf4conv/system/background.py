"""Runs work in a thread that can be waited for, whatever interrupts come.

`Thread.join` is not enough: up to Python 3.12 an interrupt in it makes a thread that still runs
pass for one that has ended (threading.py: _wait_for_tstate_lock). So the thread itself notes when
it begins and when it is over.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress


class Background:
    """Work that goes on in a thread beside its caller's; it must not raise anything."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._guard = threading.Lock()
        self._begun = False
        self._unwanted = False
        self._is_over = False
        self._wake = threading.Lock()  # free when the work is over and nobody has noticed
        self._wake.acquire()
        self.start = self._thread.start

    @property
    def is_busy(self) -> bool:
        """Returns True if the work has begun and is not over."""
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
        """Waits until the work is over; an interrupt is raised."""
        while not self._is_over:
            self._wake.acquire(timeout=0.2)  # so that signals are handled meanwhile

    def give_up(self, deadline: float) -> None:
        """Waits until the work is over; work that has not begun never will."""
        with self._guard:
            self._unwanted = True
        while self.is_busy and time.monotonic() < deadline:
            self._wake.acquire(timeout=0.2)


def outlast(
    threads: Sequence[Background], stop: Callable[[], None], patience: float = math.inf
) -> None:
    """Waits until all work is over, or `patience` seconds, whatever interrupts come.

    `stop` tells the threads to end, and may be called more than once.
    """
    deadline = time.monotonic() + patience
    is_over = False
    while not is_over:
        with suppress(BaseException):  # the first of them is what the caller leaves with
            stop()
            for thread in threads:
                thread.give_up(deadline)
            is_over = True
