"""Times whole commands of this tree beside those of another tree of nf4conv, in turns.

Every run is a fresh process on files in memory or a warm page cache. In each turn both trees run
every command, the second tree first in every other turn. Reports medians, and for each command the
ratio of this tree's median to that of the other.

Usage: python -m benchmarks.two_trees OTHER_TREE [--shape 8b] [--folder DIR] [--turns 9]
       [--only COMMAND...] [--out FILE.json]
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.encoded import write_checkpoint as write_encoded
from benchmarks.end_to_end import keep, program_of, run
from benchmarks.synthetic import SHAPES, write_checkpoint

TREES = ("other", "this")
QUIET = ["--quiet", "--json"]
KEPT = ("wall_seconds", "pipeline_seconds", "host_peak_bytes", "device_peak_bytes")
"""Figures of a run that are written to the result."""


def commands_of(scratch: Path) -> dict[str, list[str]]:
    """Returns the arguments of each command by its name; they run in this order."""
    source, packed = scratch / "source", scratch / "packed"
    out, again = scratch / "out", scratch / "again"
    commands: dict[str, list[Path | str]] = {
        "quantize": ["quantize", source, out],
        "quantize --scales search": ["quantize", source, out, "--scales", "search"],
        "quantize --verify": ["quantize", source, out, "--verify"],
        "dequantize": ["dequantize", packed, again],
        "dequantize --dtype float16": ["dequantize", packed, again, "--dtype", "float16"],
        "verify --source --exact": ["verify", packed, "--source", source, "--exact"],
        "quantize from fp8 blocks": ["quantize", scratch / "fp8 blocks", out],
        "quantize from mxfp4": ["quantize", scratch / "mxfp4", out],
        "quantize from 4 bits, blocksize 128": ["quantize", packed, out, "--blocksize", "128"],
    }
    return {name: [str(word) for word in words] for name, words in commands.items()}


def prepare(scratch: Path, shape: str) -> None:
    """Writes the sources that the commands read."""
    write_checkpoint(SHAPES[shape], scratch / "source")
    for encoding in ("fp8 blocks", "mxfp4"):
        write_encoded(SHAPES[shape], encoding, scratch / encoding)
    words = ["quantize", str(scratch / "source"), str(scratch / "packed")]
    run([*program_of(Path.cwd()), *words, *QUIET])


def measure(
    commands: dict[str, list[str]], scratch: Path, trees: dict[str, Path], turns: int
) -> dict[str, dict[str, list[Any]]]:
    """Returns the figures of each run by command and tree."""
    results: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    # the first turn warms caches and compiles kernels, and is not counted
    for turn in range(turns + 1):
        order = TREES if turn % 2 == 0 else TREES[::-1]
        for name, words in commands.items():
            for tree in order:
                for folder in ("out", "again"):
                    shutil.rmtree(scratch / folder, ignore_errors=True)
                found = run([*program_of(trees[tree]), *words, *QUIET])
                print(f"{turn}: {name}, {tree}: {found['wall_seconds']:.2f} s", file=sys.stderr)
                if turn:
                    figures = {key: found[key] for key in KEPT if key in found}
                    results[name][tree].append(figures)
    return results


def summarize(results: dict[str, dict[str, list[Any]]]) -> dict[str, Any]:
    """Returns medians of both trees, and the ratio of this tree's to the other's."""
    summary: dict[str, Any] = {}
    for name, of_trees in results.items():
        row: dict[str, Any] = {}
        for key in KEPT:
            if key not in of_trees["this"][0]:
                continue
            this = statistics.median(found[key] for found in of_trees["this"])
            other = statistics.median(found[key] for found in of_trees["other"])
            row[key] = {"this": this, "other": other, "ratio": this / other if other else None}
        summary[name] = row
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="folder that holds the other tree's package")
    parser.add_argument(
        "--shape", default="8b" if torch.cuda.is_available() else "1b", choices=SHAPES
    )
    parser.add_argument("--folder", type=Path, help="where to put the checkpoints")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--only", nargs="*", help="names of commands; by default all")
    parser.add_argument("--out", type=Path, help="file for the result")
    chosen = parser.parse_args()
    trees = {"this": Path.cwd(), "other": chosen.other.resolve()}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        prepare(Path(folder), chosen.shape)
        commands = commands_of(Path(folder))
        chosen_commands = {name: commands[name] for name in chosen.only or commands}
        results = measure(chosen_commands, Path(folder), trees, chosen.turns)
    summary = summarize(results)
    print(json.dumps(summary, indent=2))
    keep(
        chosen.out, {"shape": chosen.shape, "summary": summary, "runs": results}, "torch", "triton"
    )


if __name__ == "__main__":
    main()
