"""Runs whole commands as fresh processes on the same files with a warm page cache, in turns."""

import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PYTHON = [sys.executable, "-m"]
TOLD = ["--quiet", "--json"]
KEPT = (
    "wall_seconds", "cpu_seconds", "seconds", "pipeline_seconds", "seconds_by_activity",
    "host_peak_bytes", "host_baseline_bytes", "device_peak_bytes", "bytes_before", "bytes_after",
)  # fmt: skip
"""Figures of a run that are written to a result."""

Result = dict[str, Any]
Contestants = Mapping[str, Callable[[], Sequence[object]]]  # name → words of its next command


def run(command: Sequence[object]) -> Result:
    """Runs a process. Returns the figures of the JSON that it prints, with its times."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{command}: exit {done.returncode}\n{done.stderr[-2000:]}")
    report = json.loads(done.stdout[done.stdout.index("{") :])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = report | report.get("totals", {}) | {"wall_seconds": wall, "cpu_seconds": cpu}
    return {key: found[key] for key in KEPT if key in found}


def program_of(tree: Path) -> list[str]:
    """Returns the words that begin a command of the nf4conv in a folder."""
    code = f"import sys; sys.path[0] = {str(tree)!r}; from nf4conv.__main__ import run; run()"
    return [sys.executable, "-c", code]


def take_turns(
    contestants: Contestants, runs: int, out: Path, keeping: Sequence[str] = ()
) -> dict[str, list[Result]]:
    """Runs each contestant in each turn, in the reverse order in every other turn.

    The first turn warms caches and compiles kernels, and is not counted. A contestant that fails
    is told of, and the others go on.

    Args:
        contestants: by name; each is asked for its command when its turn has come.
        runs: turns that count.
        out: the folder that all write, which is removed before each run.
        keeping: names of contestants that read what the one before them wrote there.
    """
    results: dict[str, list[Result]] = defaultdict(list)
    left = dict(contestants)
    for turn in range(runs + 1):
        names = list(left) if turn % 2 == 0 or keeping else list(left)[::-1]
        for name in names:
            if name not in keeping:
                shutil.rmtree(out, ignore_errors=True)
            try:
                found = run(left[name]())
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                del left[name]
                continue
            print(f"{turn}: {name}: {found['wall_seconds']:.2f} s", file=sys.stderr, flush=True)
            if turn:
                results[name].append(found)
    shutil.rmtree(out, ignore_errors=True)
    return results


def median(results: Sequence[Result], key: str) -> float:
    return statistics.median(result[key] for result in results)


def ratio(results: Sequence[Result], others: Sequence[Result], key: str = "wall_seconds") -> float:
    """Returns the median over turns of one's figure over the other's."""
    return statistics.median(
        one[key] / other[key] for one, other in zip(results, others, strict=True)
    )


def medians(results: Mapping[str, Sequence[Result]]) -> dict[str, dict[str, float]]:
    """Returns the medians of each contestant's figures that are numbers."""
    return {
        name: {
            key: median(found, key) for key in KEPT if isinstance(found[0].get(key), int | float)
        }
        for name, found in results.items()
    }
