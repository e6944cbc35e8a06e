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

import pytest
from checkpoints import contents, write_source
from test_pipeline import Call, alive, pipeline

from nf4conv.commands.quantize import quantize_checkpoint
from nf4conv.options import QuantizeOptions, RunOptions
from nf4conv.sources.reader import Reader
from nf4conv.system.background import Background, outlast

LINES = {
    signal.SIGINT: "Error: interrupted; the same command resumes\n",
    signal.SIGTERM: "Error: stopped; the same command resumes\n",
}
OPTIONS = QuantizeOptions(max_shard_size=60_000)
RUN = RunOptions(device="cpu", workers=2, buffer_size=2 * 65536)


@pytest.fixture
def ringing() -> Iterator[None]:
    """SIGALRM raises KeyboardInterrupt, as often as it comes."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("ringing")
def test_no_worker_outlives_the_call_whatever_interrupts_come():
    """Ten in a row, the second and the following while the call waits for its workers."""
    working = threading.Event()
    left: list[int] = []

    def work() -> None:
        working.set()
        time.sleep(0.6)
        left.append(1)

    closed_at: list[int] = []

    class Watched(Reader):
        def __exit__(self, *exception: object) -> None:
            closed_at.append(len(left))
            super().__exit__(*exception)

    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.05)
    with pytest.raises(KeyboardInterrupt), Watched() as reader:
        pipeline(4).run([Call(work) for _ in range(100)], reader)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert working.is_set()
    assert closed_at == [4], "a reader was closed under workers"
    assert alive() == []
    assert len(left) == 4


@pytest.mark.usefixtures("ringing")
def test_a_transfer_is_waited_for_through_interrupts():
    steps: list[str] = []

    def transfer() -> None:
        time.sleep(0.5)
        steps.append("done")

    background = Background(transfer, "nf4conv-test")
    background.start()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(KeyboardInterrupt):
        background.wait()
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    outlast([background], lambda: None)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert steps == ["done"]


def launch(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nf4conv", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_answered(process: subprocess.Popen[str]) -> bool:
    """Returns True if the process has set up its handler of SIGINT."""
    mask = next(
        line
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if line.startswith("SigCgt")
    )
    return bool(int(mask.split()[1], 16) & 1 << signal.SIGTERM - 1)


@pytest.mark.parametrize("number", LINES, ids=["ctrl-c", "sigterm"])
def test_at_any_moment_from_the_first_import_on(tmp_path: Path, number: signal.Signals):
    """The moments are spread over the whole run; most of it is the import of torch."""
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
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
    # the first run was slower than the others if the machine was busy, so some come too late
    for moment in range(12):
        if moment >= 4 and codes.count(128 + number) >= 2:
            break
        process = launch(*command, "--overwrite")
        while not is_answered(process):
            assert process.poll() is None
        time.sleep(seconds * (moment % 4 + chosen.random()) / 4)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
        codes.append(process.returncode)
        assert output == ""
        assert errors in ("", LINES[number])
        assert process.returncode == (128 + number if errors else 0)
    assert codes.count(128 + number) >= 2
    quantize_checkpoint(source, out, OPTIONS, RunOptions(device="cpu", overwrite=True))
    quantize_checkpoint(source, tmp_path / "whole", OPTIONS, RUN)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_signal_that_a_shell_has_turned_off_stays_off(tmp_path: Path):
    """A shell turns SIGINT off for `command &` in a script."""
    ignoring = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "os.execv(sys.executable, sys.argv[1:])"
    )
    source = write_source(tmp_path / "source")
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
        time.sleep(0.5)
        for _ in range(5):
            time.sleep(0.1)
            os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 0


def test_a_full_disk_that_is_written_to_as_output(tmp_path: Path):
    """Both click and the commands write to stdout."""
    source = write_source(tmp_path / "source")
    for command in (
        ["--version"],
        ["quantize", "--help"],
        ["inspect", source],
    ):
        arguments = [sys.executable, "-m", "nf4conv", *map(str, command)]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                arguments, stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert done.returncode == 2
        assert done.stderr.endswith("No space left on device\n")
        assert done.stderr.count("\n") == 1
