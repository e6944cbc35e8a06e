"""Ctrl-C and SIGTERM: one line, the exit code of the signal, and nobody who works on when the call
is over.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import contents
from test_pipeline import Call, alive, pipeline

import nf4conv
from nf4conv.sources.reader import Reader
from nf4conv.system.background import Background, outlast

LINES = {
    signal.SIGINT: "Error: interrupted; the same command resumes\n",
    signal.SIGTERM: "Error: stopped; the same command resumes\n",
}
OPTIONS = {"max_shard_size": 60_000}
RUN = {"device": "cpu", "workers": 2, "buffer_size": 2 * 65536}


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


def launch(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nf4conv", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_answered(process: subprocess.Popen[str]) -> bool:
    """Returns True if the process has set up its handlers of SIGINT and SIGTERM."""
    return is_among(process, "SigCgt", signal.SIGTERM)


def is_among(process: subprocess.Popen[Any], which: str, number: signal.Signals) -> bool:
    """Returns True if a signal is in a set of signals of a process, by its name in /proc."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    [mask] = [line for line in lines if line.startswith(f"{which}:")]
    return bool(int(mask.split()[1], 16) & 1 << number - 1)


@pytest.mark.parametrize("number", LINES, ids=["ctrl-c", "sigterm"])
def test_at_any_moment_from_the_first_import_on(
    source: Path, tmp_path: Path, number: signal.Signals
):
    """The moments are spread over the whole run; most of it is the import of torch."""
    out = tmp_path / "out"
    command = [
        "quantize",
        source,
        out,
        "--device",
        "cpu",
        "--workers",
        2,
        "--max-shard-size",
        "60kB",
        "--quiet",
    ]
    started = time.monotonic()
    assert launch(*command).wait() == 0
    seconds = time.monotonic() - started
    chosen = random.Random(int(number))
    codes: list[int] = []
    # where the machine was busier before, the signal comes too late, and earlier the next time
    for moment in range(24):
        if moment >= 4 and codes.count(128 + number) >= 2:
            break
        process = launch(*command, "--overwrite")
        while not is_answered(process):
            assert process.poll() is None
        time.sleep(seconds * (moment % 4 + chosen.random()) / 4)
        process.send_signal(number)
        output, errors = process.communicate(timeout=600)
        codes.append(process.returncode)
        if process.returncode == 0:
            seconds *= 0.8
        assert output == ""
        assert errors in ("", LINES[number])
        assert process.returncode == (128 + number if errors else 0)
    assert codes.count(128 + number) >= 2
    nf4conv.quantize(source, out, **OPTIONS, device="cpu", overwrite=True)
    nf4conv.quantize(source, tmp_path / "whole", **OPTIONS, **RUN)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_signal_that_a_shell_has_turned_off_stays_off(source: Path, tmp_path: Path):
    """A shell turns SIGINT off for `command &` in a script."""
    ignoring = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "os.execv(sys.executable, sys.argv[1:])"
    )
    inner = [
        sys.executable,
        "-m",
        "nf4conv",
        "quantize",
        str(source),
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    with subprocess.Popen([sys.executable, "-c", ignoring, *inner, "--quiet"]) as process:
        while not is_among(process, "SigIgn", signal.SIGINT):
            assert process.poll() is None
        time.sleep(0.3)
        for _ in range(5):
            time.sleep(0.1)
            os.kill(process.pid, signal.SIGINT)
        assert process.wait(600) == 0


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
