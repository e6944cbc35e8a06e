"""Measures whole commands side by side: `nf4conv quantize`, transformers with bitsandbytes, and a
program that only moves bytes.

Every run is a fresh process on the same files with a warm page cache. The contestants take turns,
and medians are reported. The floor (benchmarks/floor.py) moves the same bytes with the same number
of threads.

Usage: python -m benchmarks.end_to_end [--shape 8b] [--folder DIR] [--runs 3] [--search] [--out
FILE.json]
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.synthetic import SHAPES, write_checkpoint
from nf4conv.options import RunOptions
from nf4conv.run.device.on_torch.backend import TorchBackend
from nf4conv.run.loop import make_pipeline

SEARCH = "nf4conv --scales search"
PEER = "transformers + bitsandbytes"

Contestants = dict[str, Callable[[str], list[str]]]  # name → output folder → words of a command
Results = dict[str, list[dict[str, Any]]]  # name → the results of its runs


def run(command: list[str]) -> dict[str, Any]:
    """Runs a process. Returns the JSON that it prints, with its wall_seconds."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = process.communicate()
    wall = time.perf_counter() - started
    if process.returncode:
        raise RuntimeError(f"{command}: exit {process.returncode}\n{errors[-2000:]}")
    lines = output[output.index("{") :]
    report = json.loads(lines)
    return {"wall_seconds": wall, **report, **report.get("run", {})}


def program_of(tree: Path) -> list[str]:
    """Returns the words that begin a command of the nf4conv in a folder."""
    return [
        sys.executable,
        "-c",
        f"import sys; sys.path[0] = {str(tree)!r}; from nf4conv.__main__ import run; run()",
    ]


def measure(
    source: Path, scratch: Path, runs: int, peers: set[str]
) -> dict[str, list[dict[str, Any]]]:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    defaults = RunOptions(device=device)
    pipeline = make_pipeline([TorchBackend(device)], defaults, lambda _: None)
    results: Results = defaultdict(list)
    python = [sys.executable, "-m"]
    ours = [*python, "nf4conv", "quantize", str(source), "--json", "--quiet"]

    def floor(out: str) -> list[str]:
        moved = [str(source), out, device, str(pipeline.workers), str(pipeline.piece)]
        last = results["nf4conv"][-1]
        kept = last["bytes_after"] / last["bytes_before"]
        return [*python, "benchmarks.floor", *moved, str(kept)]

    contestants: Contestants = {"nf4conv": lambda out: [*ours, out]}
    if SEARCH in peers:
        contestants[SEARCH] = lambda out: [*ours, out, "--scales", "search"]
    contestants["floor"] = floor
    if PEER in peers:
        contestants[PEER] = lambda out: [*python, "benchmarks.peer", str(source), out, device]
    take_turns(contestants, results, scratch / "out", runs, cold={PEER})
    return {name: entries[-runs:] for name, entries in results.items()}


def take_turns(
    contestants: Contestants, results: Results, out: Path, runs: int, cold: set[str]
) -> None:
    """Runs each contestant in each turn, and adds what it printed to the results.

    The first turn warms caches and compiles kernels, and is not to be counted. The contestants
    named in `cold` sit it out.
    """
    for turn in range(runs + 1):
        label = f"run {turn}" if turn else "warm-up"
        for name, command in contestants.items():
            if turn == 0 and name in cold:
                continue
            shutil.rmtree(out, ignore_errors=True)
            result = run(command(str(out)))
            results[name].append(result)
            print(f"{label}: {name}: {result['wall_seconds']:.2f} s", file=sys.stderr)


def median(results: list[dict[str, Any]], key: str) -> float:
    return statistics.median(result[key] for result in results)


def machine(
    libraries: tuple[str, ...] = ("torch", "triton", "transformers", "bitsandbytes"),
) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    driver = None
    if gpu:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        driver = answer.partition("\n")[0]
    return {
        "gpu": gpu,
        "driver": driver,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in libraries},
    }


def keep(out: Path | None, content: dict[str, Any], *libraries: str, **about: Any) -> None:
    """Writes what was measured to a file, if one was asked for, with a description of the machine.

    `about` is added to the description.
    """
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        on = machine(libraries) if libraries else machine()
        out.write_text(json.dumps({"machine": on | about, **content}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shape", default="8b" if torch.cuda.is_available() else "1b", choices=SHAPES
    )
    parser.add_argument(
        "--folder", type=Path, help="where to put the checkpoint; default: a temporary folder"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--no-peer", action="store_true", help="leave out transformers + bitsandbytes"
    )
    parser.add_argument("--search", action="store_true", help="also with --scales search")
    parser.add_argument("--out", type=Path, help="file for the result")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        source = Path(scratch) / "source"
        size = write_checkpoint(SHAPES[chosen.shape], source)
        peers = set()
        if not chosen.no_peer:
            peers.add(PEER)
        if chosen.search:
            peers.add(SEARCH)
        results = measure(source, Path(scratch), chosen.runs, peers)
    ours = results["nf4conv"]
    floor_seconds = median(results["floor"], "seconds")
    around = [entry["wall_seconds"] - entry["pipeline_seconds"] for entry in ours]
    summary = {
        "shape": chosen.shape,
        "source_bytes": size,
        "wall_seconds": {
            name: median(entries, "wall_seconds") for name, entries in results.items()
        },
        "pipeline_seconds": median(ours, "pipeline_seconds"),
        "floor_seconds": floor_seconds,
        "pipeline_over_floor": median(ours, "pipeline_seconds") / floor_seconds,
        "start_up_and_finish_seconds": statistics.median(around),
        "host_peak_bytes": median(ours, "host_peak_bytes"),
        "host_baseline_bytes": median(ours, "host_baseline_bytes"),
        "device_peak_bytes": median(ours, "device_peak_bytes"),
    }
    wall = median(ours, "wall_seconds")
    if chosen.search:
        summary["search_over_absmax"] = median(results[SEARCH], "wall_seconds") / wall
    peer = results.get(PEER)
    if peer:
        summary["speedup"] = median(peer, "wall_seconds") / wall
        summary["peer_host_peak_bytes"] = median(peer, "host_peak_bytes")
        summary["peer_device_peak_bytes"] = median(peer, "device_peak_bytes")
    print(json.dumps(summary, indent=2))
    keep(chosen.out, {"summary": summary, "runs": results})


if __name__ == "__main__":
    main()
