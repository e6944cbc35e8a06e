"""Limits of time that hold on any machine, however busy it is: processor time, which other
processes do not count in, also in units of a fixed piece of plain Python.
"""

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, int]
    start: int


def _work() -> int:
    pattern = re.compile(r"(^|\.)experts\.(\d+)\.")
    entries = {}
    for number in range(40_000):
        name = f"model.layers.{number % 80}.mlp.experts.{number}.gate_proj.weight"
        entry = _Entry(name, (512, 128), number)
        if pattern.search(name):
            entries[name] = entry._replace(start=number * 2)
    return len(sorted(entries))


def unit() -> float:
    """Seconds of the processor that the piece of work takes, at the best of three tries, right now
    and here.
    """
    tries = []
    for _ in range(3):
        before = time.process_time()
        _work()
        tries.append(time.process_time() - before)
    return min(tries)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Fails what takes longer: processor time, or ten times as long by the clock.

    Signals interrupt whatever Python does, and regular expressions too.
    """

    def stop(_number: int, _frame: object) -> None:
        raise AssertionError(f"still running after {seconds} seconds")

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(10 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def units_of(work: Callable[[], object], most: float) -> float:
    """Returns how long some work takes, in units of processor time.

    Other programs slow down the caches and the memory that they share with it, so work that takes
    too long is done again.

    Args:
        work: what is done, three times at most.
        most: the units that it may take.

    Returns:
        Those of the first try that takes less than `most`, or else of the best.
    """
    tries: list[float] = []
    while len(tries) < 3 and min(tries, default=most) >= most:
        started = time.process_time()
        work()
        tries.append((time.process_time() - started) / unit())
    return min(tries)
