"""Measures what proofs cost: `quantize --verify` and `verify --source --exact` beside `quantize`.

Measures it, too, of the source beside a copy of itself and beside other values, where nothing says
how they were made; and reading both.

Every run is a fresh process on the same files with a warm page cache. The contestants take turns,
and medians are reported.

Usage: python -m benchmarks.verifying [--shape 8b] [--folder DIR] [--runs 3] [--out FILE.json]
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.end_to_end import keep, program_of, run
from benchmarks.synthetic import SHAPES, write_checkpoint

PIECE = 2**22  # bytes that the floor reads at a time

KEPT = (
    "wall_seconds",
    "seconds",
    "pipeline_seconds",
    "seconds_by_activity",
    "host_peak_bytes",
    "host_baseline_bytes",
)
"""Of what a command tells."""


def measure(source: Path, scratch: Path, runs: int) -> dict[str, list[dict[str, Any]]]:
    out, rounded, copy = (
        scratch / "out",
        scratch / "rounded",
        shutil.copytree(source, scratch / "copy"),
    )
    shutil.copytree(source, rounded)
    for file in rounded.glob("*.safetensors"):
        save_file({name: values * 1.01 for name, values in load_file(file).items()}, file)
    told = ["--quiet", "--json"]
    alike = ["verify", copy, "--source", source, "--exact"]
    apart = ["verify", rounded, "--source", source, "--tolerance", 1]
    contestants = {
        "quantize": ["quantize", source, out, "--overwrite"],
        "verify": ["verify", out, "--source", source, "--exact"],
        "two in 16 bits": apart,
        "two in 16 bits, identical": alike,
        "quantize --verify": ["quantize", source, out, "--overwrite", "--verify"],
    }
    commands = {
        name: [*program_of(Path.cwd()), *words, *told] for name, words in contestants.items()
    }
    reading = [sys.executable, "-m", "benchmarks.verifying", "--read"]
    commands["reading both"] = [*reading, source, copy]
    results = defaultdict(list)
    # the first turn warms caches and compiles kernels, and is not counted
    for turn in range(runs + 1):
        for name, command in commands.items():
            if "quantize" in name:
                shutil.rmtree(out, ignore_errors=True)
            found = run([*map(str, command)])
            results[name].append({key: found[key] for key in KEPT if key in found})
            print(f"{turn}: {name}: {found['wall_seconds']:.2f} s", file=sys.stderr, flush=True)
    return {name: found[1:] for name, found in results.items()}


def read(folders: list[Path]) -> float:
    """Returns the seconds that this machine's cores take to read all weight files of folders."""
    pieces = []
    for file in chain.from_iterable(folder.glob("*.safetensors") for folder in folders):
        opened = os.open(file, os.O_RDONLY)
        pieces += [(opened, at) for at in range(0, file.stat().st_size, PIECE)]
    room = threading.local()

    def read_piece(piece: tuple[int, int]) -> None:
        if not hasattr(room, "bytes"):
            room.bytes = bytearray(PIECE)
        os.preadv(piece[0], [room.bytes], piece[1])

    started = time.perf_counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(read_piece, pieces):
            pass
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shape", default="8b" if torch.cuda.is_available() else "1b", choices=SHAPES
    )
    parser.add_argument(
        "--folder", type=Path, help="where to put the checkpoints; default: a temporary folder"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the result")
    parser.add_argument("--read", type=Path, nargs="+", help="only read these folders")
    chosen = parser.parse_args()
    if chosen.read:
        print(json.dumps({"seconds": read(chosen.read)}))
        return
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        size = write_checkpoint(SHAPES[chosen.shape], Path(scratch) / "source")
        results = measure(Path(scratch) / "source", Path(scratch), chosen.runs)
    walls = {
        name: statistics.median(one["wall_seconds"] for one in found)
        for name, found in results.items()
    }
    ratios = {name: walls[name] / walls["quantize"] for name in walls}
    summary = {
        "shape": chosen.shape,
        "source_bytes": size,
        "wall_seconds": walls,
        "over_quantize": ratios,
    }
    print(json.dumps(summary, indent=2))
    keep(chosen.out, {"summary": summary, "runs": results}, "torch", "triton")


if __name__ == "__main__":
    main()
