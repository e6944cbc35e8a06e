"""Kills a run before and after every operation that changes its folder, and repeats the command
each time.

    python tests/interruptions.py SCENARIO FOLDER [POINTS]
    python tests/interruptions.py --at-once FOLDER

The first prints a JSON line for each kill point, or for POINTS of them. The second prints one for
each number of parts that run at once.

A program, so that forks start from a warm interpreter. A kill point is an open for writing, write,
fsync, truncation, rename, removal or new folder; of some there is a second kill in the run that
resumes. Which operations there are differs a little from run to run, as threads do; a point beyond
the last is a run to its end.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from checkpoints import contents, write_source

SERVER = """
import sys
from pathlib import Path
from hub_server import HUB, Repo
repo = Repo()
repo.commit({path.name: path.read_bytes() for path in Path(sys.argv[1]).iterdir()})
HUB.repos["org/name"] = repo
print(HUB.url, flush=True)
sys.stdin.read()
"""


class Counter:
    """Counts operations, and kills the process at one of them: before it (a write: halfway
    through), or after it.
    """

    NAMES = (
        "open",
        "write",
        "pwrite",
        "fsync",
        "ftruncate",
        "rename",
        "replace",
        "link",
        "unlink",
        "rmdir",
        "mkdir",
    )

    def __init__(self, kill_at: int | None, *, is_before: bool = True) -> None:
        self.calls = 0
        self._kill_at = kill_at
        self._is_before = is_before
        self._lock = threading.Lock()
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
                    if name in ("write", "pwrite"):
                        descriptor, data, *position = arguments
                        function(descriptor, data[: len(data) // 2], *position)
                    os.kill(os.getpid(), signal.SIGKILL)
                done = function(*arguments, **named)
                if is_last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return done

        return counted


@dataclass
class Scenario:
    """A command that is interrupted.

    Attributes:
        run: it, into a folder.
        prepare: what is there before.
        mark: without which no loader takes the result for a model.
    """

    run: Callable[[Path], Any]
    prepare: Callable[[Path], None] = lambda _: None
    mark: str = "config.json"


def scenario(name: str, folder: Path) -> Scenario:
    """Made once; imports come late, because the Hub's address must be known before its client is
    imported.
    """
    source = write_source(folder / "source", layers=4)
    stop = start_server(source) if "stream" in name else None
    from nf4conv.commands.dequantize import dequantize_checkpoint
    from nf4conv.commands.finish import finish_checkpoint
    from nf4conv.commands.quantize import quantize_checkpoint
    from nf4conv.options import DequantizeOptions, QuantizeOptions, RunOptions, SourceOptions

    options = QuantizeOptions(max_shard_size=60_000)
    run = RunOptions(device="cpu", workers=2, buffer_size=2 * 65536, checksum=True)
    quantize = Scenario(lambda out: quantize_checkpoint(source, out, options, run))
    if name == "quantize":
        return quantize
    if name == "overwrite":
        old = folder / "old"
        quantize_checkpoint(source, old, replace(options, quant_type="fp4"), run)
        again = replace(run, overwrite=True)
        return Scenario(
            lambda out: quantize_checkpoint(source, out, options, again),
            lambda out: shutil.copytree(old, out),
        )
    if name == "dequantize":
        quantize.run(folder / "packed")
        large = DequantizeOptions(max_shard_size=150_000)
        return Scenario(lambda out: dequantize_checkpoint(folder / "packed", out, large, run))
    if name == "stream":
        assert stop is not None
        where = SourceOptions(stream=True, cache_dir=folder / "cache")
        return Scenario(lambda out: quantize_checkpoint("org/name", out, options, run, where=where))
    if name in ("parts", "streamed-parts"):
        place, where = (
            (source, None)
            if stop is None
            else ("org/name", SourceOptions(stream=True, cache_dir=folder / "cache"))
        )

        def in_parts(out: Path) -> None:
            for number in (2, 3, 1):
                quantize_checkpoint(
                    place, out, options, replace(run, part=f"{number}/3"), where=where
                )
            finish_checkpoint(out)

        return Scenario(in_parts)
    whole = folder / "pipeline"
    whole.mkdir()
    for part in ("text_encoder", "text_encoder_2"):
        shutil.copytree(source, whole / part)
    (whole / "scheduler").mkdir()
    (whole / "scheduler/scheduler_config.json").write_text("{}")
    parts = {part: ["transformers", "LlamaModel"] for part in ("text_encoder", "text_encoder_2")}
    (whole / "model_index.json").write_text(
        json.dumps({"_class_name": "StableDiffusionPipeline", **parts})
    )
    return Scenario(
        lambda out: quantize_checkpoint(whole, out, options, run), mark="model_index.json"
    )


def start_server(source: Path) -> subprocess.Popen[str]:
    """A hub in a process of its own, which ends with this one."""
    words = [sys.executable, "-c", SERVER, str(source)]
    here = Path(__file__).parent
    server = subprocess.Popen(
        words, cwd=here, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    os.environ |= {
        "HF_ENDPOINT": server.stdout.readline().strip(),
        "HF_HOME": str(source.parent / "hub home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return server


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


def count_calls(made: Scenario, out: Path) -> int:
    receiving, sending = os.pipe()
    made.prepare(out)
    write = os.write

    def work() -> None:
        counter = Counter(None)
        made.run(out)
        write(sending, str(counter.calls).encode())

    if in_fork(work):
        raise RuntimeError("the uninterrupted run failed")
    return int(os.read(receiving, 100))


def finished(out: Path, mark: str) -> dict[str, bytes] | None:
    """What a loader would find; None if it would find no model."""
    if not (out / mark).exists():
        return None
    return {name: content for name, content in contents(out).items() if ".nf4conv/" not in name}


def attempt(made: Scenario, out: Path, kill_at: int | None, *, is_before: bool) -> int:
    def work() -> None:
        from nf4conv.errors import OutputError

        Counter(kill_at, is_before=is_before)
        try:
            made.run(out)
        except OutputError as error:
            # it is complete, and what may be left of the work folder has been removed
            if "exists and is not empty" not in str(error) or not (out / made.mark).exists():
                raise

    return in_fork(work)


def begun(work: Callable[[], object]) -> int:
    """A child process that does something; its id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the child must not return into the parent's code
            os._exit(3)
        os._exit(0)
    return child


def kill_at_random(
    make: Callable[[str], object], names: list[str], most: int, chosen: random.Random
) -> tuple[int, int]:
    """Make all at once; what is killed, so many times at most, or refused is begun again; how often
    it was each.
    """
    running: dict[int, str] = {}
    killed = refused = 0
    while names or running:
        for name in chosen.sample(names, len(names)):
            if name != "finish" or chosen.random() < 0.2:
                names.remove(name)
                running[begun(partial(make, name))] = name
        time.sleep(chosen.uniform(0, 0.1))
        if killed < most and running:
            os.kill(chosen.choice(list(running)), signal.SIGKILL)
        for child in list(running):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                killed, refused = (
                    killed + os.WIFSIGNALED(status),
                    refused + os.WIFEXITED(status) * (status != 0),
                )
                name = running.pop(child)
                names += [name] if status else []
    return killed, refused


def kill_parts_at_once(folder: Path) -> None:
    """1, 2, 3 and 7 parts at once, one of them twice, and finish; also of a source that is
    streamed.
    """
    source = write_source(folder / "source", layers=8)
    server = start_server(source)
    from nf4conv.commands.finish import finish_checkpoint
    from nf4conv.commands.quantize import quantize_checkpoint
    from nf4conv.options import QuantizeOptions, RunOptions, SourceOptions

    options = QuantizeOptions(max_shard_size=60_000)
    run = RunOptions(device="cpu", workers=2, buffer_size=2 * 65536, checksum=True)
    chosen = random.Random(18)

    def make(place: str | Path, where: SourceOptions | None, out: Path, name: str) -> None:
        if name == "finish":
            finish_checkpoint(out)
        else:
            quantize_checkpoint(place, out, options, replace(run, part=name or None), where=where)

    for place, where in (
        (source, None),
        ("org/name", SourceOptions(stream=True, cache_dir=folder / "cache")),
    ):
        single = folder / f"single {where is None}"
        os.waitpid(begun(partial(make, place, where, single, "")), 0)
        for count in (1, 2, 3, 7):
            out = folder / f"{count} {where is None}"
            names = [
                *(f"{number}/{count}" for number in range(1, count + 1)),
                f"{count}/{count}",
                "finish",
            ]
            killed, refused = kill_at_random(
                partial(make, place, where, out), names, 3 + count, chosen
            )
            found, expected = contents(out), contents(single)
            differing = sorted(
                name for name in found.keys() | expected if found.get(name) != expected.get(name)
            )
            result = {
                "parts": count,
                "streamed": where is not None,
                "killed": killed,
                "finish too early": refused,
            }
            print(json.dumps(result | {"differing": differing}), flush=True)
    server.kill()


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name == "--at-once":
        kill_parts_at_once(folder)
        return
    made = scenario(name, folder)
    total = count_calls(made, folder / "whole")
    expected = contents(folder / "whole")
    points = [
        (kill_at, is_before) for kill_at in range(1, total + 1) for is_before in (True, False)
    ]
    chosen = random.Random(total)
    if len(sys.argv) > 3:
        points = sorted(chosen.sample(points, min(int(sys.argv[3]), len(points))))
    out = folder / "out"
    for number, (kill_at, is_before) in enumerate(points):
        shutil.rmtree(out, ignore_errors=True)
        made.prepare(out)
        before = finished(out, made.mark)
        attempt(made, out, kill_at, is_before=is_before)
        found = finished(out, made.mark)
        second = chosen.randint(1, total) if number % 3 == 0 else None
        if second is not None:
            attempt(made, out, second, is_before=chosen.random() < 0.5)
        status = attempt(made, out, None, is_before=True)
        after = contents(out)
        result = {
            "killed": [kill_at, is_before, second],
            "of": total,
            "status": status,
            "differing": sorted(
                name for name in after.keys() | expected if after.get(name) != expected.get(name)
            ),
            "looks finished and is not": found is not None and found not in (expected, before),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
