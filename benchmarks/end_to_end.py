"""Whole commands, side by side: `nf4conv quantize`, the same with transformers + bitsandbytes, and
a raw byte mover.

Every run is a fresh process on the same files with a warm page cache; the contestants take turns;
medians are reported. The floor (benchmarks/floor.py) moves the same bytes with the same number of
threads.

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


def run(command: list[str]) -> dict[str, Any]:
    """Run one process; its JSON output plus wall seconds and peak resident bytes by the kernel's
    accounting.
    """
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = process.communicate()
    wall = time.perf_counter() - started
    if process.returncode:
        raise RuntimeError(f"{command}: exit {process.returncode}\n{errors[-2000:]}")
    lines = output[output.index("{") :]
    return {"wall_seconds": wall, **json.loads(lines)}


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
    workers, piece = pipeline.workers, pipeline.piece
    python = sys.executable
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    ours = [python, "-m", "nf4conv", "quantize", str(source), "--json", "--quiet"]
    contestants = {
        "nf4conv": lambda out: [*ours, out],
        SEARCH: lambda out: [*ours, out, "--scales", "search"],
        "floor": lambda out: [
            *(python, "-m", "benchmarks.floor", str(source), out, device, str(workers), str(piece)),
            str(results["nf4conv"][-1]["bytes_after"] / results["nf4conv"][-1]["bytes_before"]),
        ],
        PEER: lambda out: [python, "-m", "benchmarks.peer", str(source), out, device],
    }
    contestants = {
        name: command
        for name, command in contestants.items()
        if name in {"nf4conv", "floor"} | peers
    }
    # the first turn warms caches and compiles kernels, and is not counted
    for turn in range(runs + 1):
        for name, command in contestants.items():
            if turn == 0 and name == PEER:
                continue
            out = scratch / "out"
            shutil.rmtree(out, ignore_errors=True)
            result = run(command(str(out)))
            results[name].append(result)
            print(
                f"{'warm-up' if turn == 0 else f'run {turn}'}: {name}: "
                f"{result['wall_seconds']:.2f} s",
                file=sys.stderr,
            )
    return {name: entries[-runs:] for name, entries in results.items()}


def median(results: list[dict[str, Any]], key: str) -> float:
    return statistics.median(result[key] for result in results)


def machine(
    libraries: tuple[str, ...] = ("torch", "triton", "transformers", "bitsandbytes"),
) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    driver = None
    if gpu:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split(
            "\n"
        )[0]
    return {
        "gpu": gpu,
        "driver": driver,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in libraries},
    }


def keep(out: Path | None, content: dict[str, Any], *libraries: str, **about: Any) -> None:
    """Write what was measured to a file, if there is to be one, with the machine and what else is
    said about it.
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
        peers = set() if chosen.no_peer else {PEER}
        results = measure(
            source, Path(scratch), chosen.runs, peers | {SEARCH} if chosen.search else peers
        )
    ours = results["nf4conv"]
    summary = {
        "shape": chosen.shape,
        "source_bytes": size,
        "wall_seconds": {
            name: median(entries, "wall_seconds") for name, entries in results.items()
        },
        "pipeline_seconds": median(ours, "pipeline_seconds"),
        "floor_seconds": median(results["floor"], "seconds"),
        "pipeline_over_floor": median(ours, "pipeline_seconds")
        / median(results["floor"], "seconds"),
        "start_up_and_finish_seconds": statistics.median(
            r["wall_seconds"] - r["pipeline_seconds"] for r in ours
        ),
        "host_peak_bytes": median(ours, "host_peak_bytes"),
        "host_baseline_bytes": median(ours, "host_baseline_bytes"),
        "device_peak_bytes": median(ours, "device_peak_bytes"),
    }
    if chosen.search:
        summary["search_over_absmax"] = median(results[SEARCH], "wall_seconds") / median(
            ours, "wall_seconds"
        )
    peer = results.get(PEER)
    if peer:
        summary["speedup"] = median(peer, "wall_seconds") / median(ours, "wall_seconds")
        summary["peer_host_peak_bytes"] = median(peer, "host_peak_bytes")
        summary["peer_device_peak_bytes"] = median(peer, "device_peak_bytes")
    print(json.dumps(summary, indent=2))
    keep(chosen.out, {"summary": summary, "runs": results})


if __name__ == "__main__":
    main()
