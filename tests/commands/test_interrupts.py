"""Ctrl-C and SIGTERM: one line, the exit code of the signal, and nobody who works on when the call
is over.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_pipeline import Call, alive, pipeline

from nf4conv.sources.reader import Reader
from nf4conv.system.background import Background, outlast


class Alarm:
    """Raises KeyboardInterrupt in the main thread: ten times, when it is told to, and no more.

    So no interrupt comes before a slow machine is ready for it, nor once the call is over.

    Attributes:
        has_rung: set when the last one is raised.
    """

    def __init__(self) -> None:
        self.has_rung = threading.Event()
        self._left = 10

    def ring_once(self) -> None:
        """Lets the first interrupt come. May be called from any thread."""
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    def ring_on(self) -> None:
        """Lets all that are left come, one after the other."""
        if self._left > 0:
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)

    def ring(self, _number: int, _frame: object) -> None:
        """Handles SIGALRM."""
        if self._left == 0:
            return
        self._left -= 1
        if self._left == 0:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.has_rung.set()
        raise KeyboardInterrupt


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    made = Alarm()
    before = signal.signal(signal.SIGALRM, made.ring)
    yield made
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_no_worker_outlives_the_call_whatever_interrupts_come(alarm: Alarm):
    """Ten in a row, the second and the following while the call waits for its workers."""
    left: list[int] = []
    all_work = threading.Barrier(4, action=alarm.ring_once, timeout=60)

    def work() -> None:
        all_work.wait()
        assert alarm.has_rung.wait(60)
        time.sleep(0.1)
        left.append(1)

    closed_at: list[int] = []

    class Watched(Reader):
        def interrupt(self) -> None:
            alarm.ring_on()  # the call waits for its workers from now on

        def __exit__(self, *exception: object) -> None:
            closed_at.append(len(left))
            super().__exit__(*exception)

    with pytest.raises(KeyboardInterrupt), Watched() as reader:
        pipeline(4).run([Call(work) for _ in range(100)], reader)
    assert alarm.has_rung.is_set()
    assert closed_at == [4], "a reader was closed under workers"
    assert alive() == []
    assert len(left) == 4


def test_a_transfer_is_waited_for_through_interrupts(alarm: Alarm):
    steps: list[str] = []

    def transfer() -> None:
        assert alarm.has_rung.wait(60)
        time.sleep(0.1)
        steps.append("done")

    background = Background(transfer, "nf4conv-test")

    def start_and_wait() -> None:
        background.start()
        alarm.ring_once()
        background.wait()

    with pytest.raises(KeyboardInterrupt):
        start_and_wait()
    outlast([background], alarm.ring_on)
    assert steps == ["done"]


def test_a_full_disk_that_is_written_to_as_output(source: Path):
    """Both click and the commands write to stdout."""
    for command in (["--version"], ["quantize", "--help"], ["inspect", source]):
        arguments = [sys.executable, "-m", "nf4conv", *map(str, command)]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                arguments, stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert done.returncode == 2
        assert done.stderr.endswith("No space left on device\n")
        assert done.stderr.count("\n") == 1
