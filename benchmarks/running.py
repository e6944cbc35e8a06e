"""What every benchmark shares: options, versions beside figures, and processes that take turns."""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

LIBRARIES: Final = (
    "torch", "triton", "transformers", "bitsandbytes", "compressed-tensors", "peft"
)  # fmt: skip
DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
PYTHON: Final = [sys.executable, "-m"]
TOLD: Final = ["--quiet", "--json"]
KEPT: Final = (
    "wall_seconds", "cpu_seconds", "seconds", "pipeline_seconds", "seconds_by_activity",
    "host_peak_bytes", "host_baseline_bytes", "device_peak_bytes", "bytes_before", "bytes_after",
)  # fmt: skip
"""Figures of a command that are written to a result."""

Result = dict[str, Any]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the options that every benchmark has."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--json", type=Path, help="where to write what is found")
    found.add_argument("--commit", help="recorded; by default what git says")
    return found


def save(chosen: argparse.Namespace, **found: object) -> None:
    """Writes figures with the versions, if a file is asked for: after each part, since a lent GPU
    may be taken back.
    """
    if chosen.json:
        record = {"versions": versions(chosen.commit), **found}
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")


def versions(commit: str | None) -> dict[str, object]:
    """Returns where, when and with what this runs. A commit of None asks git."""
    found: dict[str, object] = {}
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        found |= {"gpu": torch.cuda.get_device_name(), "driver": told.split()[0]}
    found |= {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return found | {"commit": commit or git.stdout.strip(), "date": time.strftime("%Y-%m-%d")}


def run(command: Sequence[object]) -> Result:
    """Runs a process. Returns the JSON that it prints last, with its times."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{command}: exit {done.returncode}\n{done.stderr[-2000:]}")
    report = json.loads(done.stdout[done.stdout.index("{") :])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return report | report.get("totals", {}) | {"wall_seconds": wall, "cpu_seconds": cpu}


def take_turns(
    contestants: Mapping[str, Sequence[object]], runs: int, out: Path, *, warm_up: bool = True
) -> dict[str, list[Result]]:
    """Runs each contestant in each turn, in the reverse order in every other turn.

    A contestant that fails is told of, and the others go on.

    Args:
        contestants: the words of their commands by name.
        runs: turns that count.
        out: the folder that all write, which is removed before each run.
        warm_up: True to begin with a turn that does not count: it warms caches and compiles.
    """
    results: dict[str, list[Result]] = defaultdict(list)
    left = dict(contestants)
    for turn in range(not warm_up, runs + 1):
        for name in list(left)[:: 1 if turn % 2 else -1]:
            shutil.rmtree(out, ignore_errors=True)
            try:
                found = run(left[name])
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                del left[name]
                continue
            print(f"{turn}: {name}: {found['wall_seconds']:.2f} s", file=sys.stderr, flush=True)
            if turn:
                results[name].append(found)
    shutil.rmtree(out, ignore_errors=True)
    return results


def medians(results: Sequence[Result]) -> dict[str, float]:
    """Returns the medians over turns of the figures that are numbers."""
    keys = [key for key, one in results[0].items() if isinstance(one, int | float)]
    return {key: statistics.median(one[key] for one in results) for key in keys}


def ratios(results: Sequence[Result], others: Sequence[Result]) -> dict[str, float]:
    """Returns the medians over turns of one's figures over the other's, where both have them."""
    pairs = list(zip(results, others, strict=False))
    keys = [key for key in medians(results) if pairs and pairs[0][1].get(key)]
    return {key: statistics.median(one[key] / other[key] for one, other in pairs) for key in keys}
