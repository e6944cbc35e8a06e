"""Kills a run before and after every operation that changes its folder, and repeats the command
each time.

    python tests/helpers/interruptions.py SCENARIO FOLDER [POINTS [signals]]
    python tests/helpers/interruptions.py --at-once FOLDER

The first prints a JSON line for each kill point, or for POINTS of them; with `signals`, other
signals come in turn instead of SIGKILL. The second prints one for each number of parts that run at
once.

This is a program of its own, so that forks start from a warm interpreter. A kill point is an open
for writing, a write, an fsync, a truncation, a rename, a removal or a new folder. After every third
kill the run that resumes is killed, too. The number of operations differs a little from run to run,
as the threads do; a run that ends before its point runs to its end.
"""

import importlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # threads of OpenMP would not survive a fork

from checkpoints import contents, write_source
from scenarios import OPTIONS, RUN, Scenario, scenario, start_server

import nf4conv
from nf4conv.__main__ import _leave
from nf4conv.errors import OutputError
from nf4conv.system.signals import handle_end

SIGNALS = {
    "kill": signal.SIGKILL,
    # whose default action ends the process
    "hang up": signal.SIGHUP,
    "quit": signal.SIGQUIT,
    # that the program handles
    "interrupt": signal.SIGINT,
    "stop": signal.SIGTERM,
    # that raises KeyboardInterrupt where somebody uses the Python API
    "raise": signal.SIGINT,
}

# not transformers and what it brings, which start threads
IMPORTED = ("nf4conv", "huggingface_hub", "httpx", "httpcore", "anyio", "h11")


def prepare_signal(how: str) -> None:
    """Handles a signal as the program does, as Python does, or by its default action."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if how == "raise":
        signal.signal(signal.SIGINT, signal.default_int_handler)
    elif how in ("interrupt", "stop"):
        signal.signal(SIGNALS[how], signal.SIG_DFL)
        handle_end(_leave)
    elif how != "kill":
        signal.signal(SIGNALS[how], signal.SIG_DFL)


class Counter:
    """Counts operations, and sends this process a signal before or after one of them.

    SIGKILL before a write comes halfway through it.
    """

    NAMES = (
        "open", "write", "pwrite", "fsync", "ftruncate", "rename", "replace", "link", "unlink",
        "rmdir", "mkdir",
    )  # fmt: skip

    def __init__(self, kill_at: int | None, *, is_before: bool = True, how: str = "kill") -> None:
        self.calls = 0
        self._kill_at = kill_at
        self._is_before = is_before
        self._number = SIGNALS[how]
        prepare_signal(how)
        self._lock = threading.RLock()  # a handler of the signal writes, too
        for name in self.NAMES:  # which pathlib and shutil look up in os at each call
            setattr(os, name, self._count(name, getattr(os, name)))

    def _count(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR):
                return function(*arguments, **named)
            with self._lock:
                self.calls += 1
                is_last = self.calls == self._kill_at
                if is_last and self._is_before:
                    if name in ("write", "pwrite") and self._number == signal.SIGKILL:
                        descriptor, data, *position = arguments
                        function(descriptor, data[: len(data) // 2], *position)
                    os.kill(os.getpid(), self._number)
                done = function(*arguments, **named)
                if is_last and not self._is_before:
                    os.kill(os.getpid(), self._number)
                return done

        return counted


def in_fork(work: Callable[[], object], *, is_loud: bool = True) -> int:
    """Begins work in a child process and returns its id."""
    child = os.fork()
    if child:
        return child
    status = 0
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - the child must not return into the parent's code
        status = 3
        if is_loud:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(status)


def status_of(child: int) -> int:
    """Waits for a child process and returns its wait status."""
    _, status = os.waitpid(child, 0)
    return status


def count_calls(made: Scenario, out: Path) -> int:
    """Runs to the end, and returns the number of operations.

    What the run imports, this process imports too, for two thirds of a fork's time went there.
    """
    receiving, sending = os.pipe()
    made.prepare(out)
    write = os.write

    def work() -> None:
        counter = Counter(None)
        made.run(out)
        modules = [name for name in sys.modules if name.startswith(IMPORTED)]
        write(sending, " ".join([str(counter.calls), *modules]).encode())

    if status_of(in_fork(work)):
        raise RuntimeError("the uninterrupted run failed")
    calls, *modules = os.read(receiving, 1 << 16).decode().split()
    for name in modules:
        importlib.import_module(name)
    return int(calls)


def finished(out: Path, mark: str) -> dict[str, bytes] | None:
    """Returns the files that a loader would find, or None if it would find no model.

    What a run keeps beside them, in `.nf4conv/`, `NAME.unfinished/` or `.NAME.partial`, the next
    run clears.
    """
    if not (out / mark).exists():
        return None
    return {
        name: content
        for name, content in contents(out).items()
        if not any(mark in name for mark in (".nf4conv/", ".unfinished/", ".partial"))
    }


def differing(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """Returns the names of files that two folders do not share, or have with other bytes."""
    names = found.keys() | expected.keys()
    return sorted(name for name in names if found.get(name) != expected.get(name))


def attempt(
    made: Scenario, out: Path, kill_at: int | None, *, is_before: bool, how: str = "kill"
) -> int:
    """Runs in a fork that gets a signal at an operation, or none. Returns the wait status."""

    def work() -> None:
        Counter(kill_at, is_before=is_before, how=how)
        try:
            made.run(out)
        except OutputError as error:
            # it is complete, and what may be left of the work folder has been removed
            reasons = ("exists and is not empty", "holds weights already", "exists; choose another")
            if not any(reason in str(error) for reason in reasons):
                raise
            if not (out / made.mark).exists():
                raise

    return status_of(in_fork(work, is_loud=how == "kill"))


def kill_at_random(
    make: Callable[[str], object], names: list[str], most: int, chosen: random.Random
) -> tuple[int, int]:
    """Makes all parts at once and kills some, `most` times at most.

    Parts that are killed or refused are begun again. Returns how many were killed and how many
    were refused.
    """
    killed = 0
    refused = 0
    victim = names.pop(0)
    operation = chosen.randint(1, 10)

    def kill_itself() -> None:
        """Ends for certain, however long this process takes to look at its children."""
        Counter(operation)
        make(victim)

    running = {in_fork(kill_itself, is_loud=False): victim}
    while names or running:
        for name in chosen.sample(names, len(names)):
            names.remove(name)
            running[in_fork(partial(make, name), is_loud=False)] = name
        time.sleep(chosen.uniform(0, 0.1))
        if killed < most and running:
            os.kill(chosen.choice(list(running)), signal.SIGKILL)
        for child in list(running):
            found, status = os.waitpid(child, os.WNOHANG)
            if not found:
                continue
            name = running.pop(child)
            if status:
                names.append(name)
                if os.WIFSIGNALED(status):
                    killed += 1
                else:
                    refused += 1
    return killed, refused


def kill_parts_at_once(folder: Path) -> None:
    """Makes 1, 2, 3 and 7 parts at once, one of them twice.

    The source is a local folder, then a repository that is streamed.
    """
    source = write_source(folder / "source", layers=8)
    server = start_server(source)
    chosen = random.Random(18)

    def make(place: str | Path, where: dict[str, Any], out: Path, name: str) -> None:
        nf4conv.quantize(place, out, **OPTIONS, **RUN, part=name or None, **where)

    streamed = {"stream": True, "cache_dir": folder / "cache"}
    for place, where in ((source, {}), ("org/name", streamed)):
        kind = "streamed" if where else "local"
        single = folder / f"single {kind}"
        status_of(in_fork(partial(make, place, where, single, "")))
        for count in (1, 2, 3, 7):
            out = folder / f"{count} {kind}"
            names = [f"{number}/{count}" for number in range(1, count + 1)]
            names.append(f"{count}/{count}")
            make_one = partial(make, place, where, out)
            killed, refused = kill_at_random(make_one, names, 3 + count, chosen)
            result = {
                "parts": count,
                "streamed": bool(where),
                "killed": killed,
                "refused": refused,
                "differing": differing(contents(out), contents(single)),
            }
            print(json.dumps(result), flush=True)
    server.kill()


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name == "--at-once":
        kill_parts_at_once(folder)
        return
    made = scenario(name, folder)
    total = count_calls(made, folder / "whole")
    expected = contents(folder / "whole")
    points = list(itertools.product(range(1, total + 1), (True, False)))
    chosen = random.Random(total)
    if len(sys.argv) > 3:
        points = sorted(chosen.sample(points, min(int(sys.argv[3]), len(points))))
    hows = list(SIGNALS)[1:] if sys.argv[4:] == ["signals"] else ["kill"]
    out = folder / "out"
    for number, (kill_at, is_before) in enumerate(points):
        shutil.rmtree(out, ignore_errors=True)
        made.prepare(out)
        before = finished(out, made.mark)
        how = hows[number % len(hows)]
        first = attempt(made, out, kill_at, is_before=is_before, how=how)
        found = finished(out, made.mark)
        wrong = made.elsewhere(out, False)
        second = chosen.randint(1, total) if number % 3 == 0 else None
        if second is not None:
            attempt(made, out, second, is_before=chosen.random() < 0.5, how=how)
        status = attempt(made, out, None, is_before=True)
        is_unlike = found is not None and found not in (expected, before)
        result = {
            "killed": [kill_at, is_before, second, how, first],
            "of": total,
            "status": status,
            "differing": differing(contents(out), expected) + made.elsewhere(out, True),
            "looks finished and is not": is_unlike or bool(wrong),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
