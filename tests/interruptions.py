"""Runs a quantization many times and kills it at chosen calls; a program, so that forks start from a warm interpreter.

Usage: python tests/interruptions.py SOURCE FOLDER POINTS SEED      prints one JSON line per kill point
"""

import json
import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nf4conv.pipeline.with_torch.pack
import nf4conv.pipeline.with_torch.worker  # noqa: F401 - imported before the forks, so that each of them need not
from nf4conv.commands.quantize import quantize_checkpoint
from nf4conv.errors import OutputError
from nf4conv.options import QuantizeOptions, RunOptions

OPTIONS = QuantizeOptions(max_shard_size=60_000)
RUN = RunOptions(device="cpu", workers=2, buffer_size=2 * 65536, checksum=True)


class Counter:
    """Counts the calls that change the disk, and kills the process at one of them, before or halfway through it."""

    def __init__(self, kill_at: int | None) -> None:
        self.calls = 0
        self._kill_at = kill_at
        self._lock = threading.Lock()
        self._pwrite = os.pwrite
        os.pwrite = self._count(os.pwrite)
        os.fsync = self._count(os.fsync)
        os.ftruncate = self._count(os.ftruncate)
        os.rename = self._count(os.rename)
        os.replace = self._count(os.replace)
        Path.replace = self._count(Path.replace)
        Path.unlink = self._count(Path.unlink)
        Path.mkdir = self._count(Path.mkdir)
        Path.rmdir = self._count(Path.rmdir)

    def _count(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                self.calls += 1
                if self.calls == self._kill_at:
                    if function is self._pwrite:
                        descriptor, data, position = arguments
                        self._pwrite(descriptor, data[: len(data) // 2], position)
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return counted


def in_fork(work: Callable[[], None]) -> int:
    """Run in a child process; its wait status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the child must not return into the parent's code
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(3)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def count_calls(source: Path, out: Path) -> int:
    receiving, sending = os.pipe()

    def work() -> None:
        counter = Counter(None)
        quantize_checkpoint(source, out, OPTIONS, RUN)
        os.write(sending, str(counter.calls).encode())

    if in_fork(work):
        raise RuntimeError("the uninterrupted run failed")
    return int(os.read(receiving, 100))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def looks_finished(folder: Path) -> bool:
    return (folder / "config.json").exists()


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    points, seed = int(sys.argv[3]), int(sys.argv[4])
    total = count_calls(source, folder / "whole")
    expected = contents(folder / "whole")
    chosen = random.Random(seed)
    for number in range(points):
        out = folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        kills = [chosen.randint(1, total) for _ in range(chosen.choice((1, 1, 2)))]
        for kill_at in kills:

            def interrupted(kill_at: int = kill_at, out: Path = out) -> None:
                Counter(kill_at)
                quantize_checkpoint(source, out, OPTIONS, RUN)

            status = in_fork(interrupted)
        finished_early = looks_finished(out) and not os.WIFEXITED(status)
        kept: list[int] = []
        receiving, sending = os.pipe()

        def resumed(sending: int = sending, out: Path = out) -> None:
            report = quantize_checkpoint(source, out, OPTIONS, RUN)
            os.write(sending, str(report.shards_resumed).encode())

        # the last kill may have come after the checkpoint was complete: then there is nothing to resume, and the same
        # command says so, and removes what may be left of the work folder
        complete = looks_finished(out) and not (out / ".nf4conv/run.json").exists()

        def refused(out: Path = out) -> None:
            try:
                quantize_checkpoint(source, out, OPTIONS, RUN)
            except OutputError:
                return
            raise RuntimeError("a complete checkpoint was written again")

        status = in_fork(refused if complete else resumed)
        if not complete and status == 0:
            kept.append(int(os.read(receiving, 100)))
        os.close(receiving)
        os.close(sending)
        result = {
            "number": number,
            "kills": kills,
            "of": total,
            "status": status,
            "shards_kept": kept,
            "differing": sorted(
                name for name, content in contents(out).items() | expected.items() if content != expected.get(name)
            ),
            "same_files": contents(out).keys() == expected.keys(),
            "config_before_the_end": finished_early and not complete,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
