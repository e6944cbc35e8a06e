"""Does the cost grow with the bytes, or the tensors, and nothing else? Checkpoints of 3 to 63 GB,
or 100 000 weights.

Each is quantized, from bfloat16 and from FP8 (blocks of 128×128), and the result compared with it
byte by byte. Every run is a fresh process on files in memory or a warm page cache. All layers hold
the same, in files of their own.

Usage: python -m benchmarks.scale [--folder DIR] [--runs 3] [--out FILE.json] [CASE ...]

A case is that of a model's size in bfloat16, such as "16 GB", or "16 GB fp8", which has about half
the bytes.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.encoded import write_checkpoint
from benchmarks.end_to_end import keep, run
from benchmarks.synthetic import Experts, Llama

SHAPES: dict[str, Llama | Experts] = {
    "3 GB": Llama(hidden=2048, layers=16, intermediate=8192, key_value=512),
    "16 GB": Llama(),
    "63 GB": Llama(layers=140),
    "50 000 weights": Experts(),
    "100 000 weights": Experts(layers=100),
}
CASES = [f"{shape}{encoding}" for encoding in ("", " fp8") for shape in SHAPES]


def measure(case: str, scratch: Path, runs: int) -> list[dict[str, Any]]:
    """Medians of `quantize` and of `verify`."""
    name, source, out = case.removesuffix(" fp8"), scratch / "source", scratch / "out"
    write_checkpoint(SHAPES[name], "fp8 blocks" if case.endswith("fp8") else "bfloat16", source)
    program, common = [sys.executable, "-m", "nf4conv"], ["--quiet", "--json"]
    options = ["--moe", "packed"] if isinstance(SHAPES[name], Experts) else []
    results: dict[str, list[dict[str, Any]]] = {"quantize": [], "verify": []}
    for _ in range(runs):
        made = run([*program, "quantize", str(source), str(out), "--overwrite", *options, *common])
        results["quantize"].append(made)
        results["verify"].append(
            run([*program, "verify", str(out), "--source", str(source), "--exact", *common])
        )
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    return [
        summary(case, command, size, made["packed"], found) for command, found in results.items()
    ]


def summary(
    case: str, command: str, size: int, packed: int, results: list[dict[str, Any]]
) -> dict[str, Any]:
    keys = (
        "wall_seconds",
        "pipeline_seconds",
        "host_peak_bytes",
        "host_baseline_bytes",
        "device_peak_bytes",
    )
    medians = {
        key: statistics.median(result[key] for result in results)
        for key in keys
        if key in results[0]
    }
    per = {"seconds_per_gb": size / 1e9, "milliseconds_per_weight": packed / 1e3}
    return {
        "case": case,
        "command": command,
        "source_bytes": size,
        "packed": packed,
        **medians,
        **{name: medians["wall_seconds"] / count for name, count in per.items()},
    }


def growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the time that each case takes more than the next smaller one, for each GB in models
    and for each weight where the weights are tiny.
    """
    groups = defaultdict(list)
    for row in rows:
        groups[row["command"], row["case"].endswith("fp8"), "weights" in row["case"]].append(row)
    found = []
    for (command, _, are_tiny), group in groups.items():
        for before, after in pairwise(group):
            seconds, size, packed = (
                after[key] - before[key] for key in ("wall_seconds", "source_bytes", "packed")
            )
            per = (
                {"milliseconds_per_weight": seconds / packed * 1e3}
                if are_tiny
                else {"seconds_per_gb": seconds / size * 1e9}
            )
            found.append({"command": command, "from": before["case"], "to": after["case"], **per})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument(
        "--folder", type=Path, help="where to put the checkpoints; default: a temporary folder"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the result")
    chosen = parser.parse_args()
    first = sorted({"3 GB fp8" if case.endswith("fp8") else "3 GB" for case in chosen.cases})
    rows: list[dict[str, Any]] = []
    # the first ones warm caches and compile kernels, and are not counted
    for case in [
        *first,
        *chosen.cases,
    ]:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
            found = measure(case, Path(scratch), chosen.runs)
        rows += found
        print(*map(json.dumps, found), sep="\n", flush=True)
    rows = rows[2 * len(first) :]
    added = growth(rows)
    print(json.dumps(added, indent=1))
    keep(chosen.out, {"rows": rows, "added": added}, "torch", "triton")


if __name__ == "__main__":
    main()
