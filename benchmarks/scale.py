"""Does the cost grow with the bytes and nothing else? Checkpoints of 2.5 to 32 GB, 50 000 small weights, one giant.

Every run is a fresh process on files in memory or a warm page cache. Prints a table and writes the figures as JSON.

Usage: python -m benchmarks.scale [--folder DIR] [--runs 3] [--out FILE.json] [SHAPE ...]
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.end_to_end import keep, run
from benchmarks.synthetic import SHAPES, write_checkpoint


def measure(name: str, source: Path, out: Path, runs: int, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "nf4conv", "quantize", str(source), str(out), "--json", "--quiet", *options]
    if name == "experts":
        command += ["--moe", "per-expert"]
    results = []
    for _ in range(runs + 1):
        shutil.rmtree(out, ignore_errors=True)
        results.append(run(command))
    results = results[1:]  # the first one warms caches and compiles kernels

    def median(key: str) -> float:
        return statistics.median(result[key] for result in results)

    pipeline, size = median("pipeline_seconds"), results[0]["bytes_before"]
    return {
        "shape": name,
        "options": options,
        "source_bytes": size,
        "packed": results[0]["packed"],
        "wall_seconds": median("wall_seconds"),
        "pipeline_seconds": pipeline,
        "pipeline_seconds_per_gb": pipeline / size * 1e9,
        "pipeline_milliseconds_per_weight": pipeline * 1e3 / results[0]["packed"],
        "start_up_and_finish_seconds": statistics.median(r["wall_seconds"] - r["pipeline_seconds"] for r in results),
        "host_growth_bytes": median("host_peak_bytes") - median("host_baseline_bytes"),
        "device_peak_bytes": median("device_peak_bytes"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["1b", "8b", "16b", "experts", "giant"])
    parser.add_argument("--folder", type=Path, help="where to put the checkpoints; default: a temporary folder")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the result")
    chosen = parser.parse_args()
    rows = []
    for name in chosen.shapes:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
            source, out = Path(scratch) / "source", Path(scratch) / "out"
            write_checkpoint(SHAPES[name], source)
            variants: list[tuple[str, ...]] = [()]
            if name == "8b":
                variants += [("--workers", str(workers)) for workers in (1, 2, 4, 12, 16)]
                variants += [("--buffer-size", size) for size in ("16MB", "64MB", "512MB")]
            for options in variants:
                rows.append(measure(name, source, out, chosen.runs, *options))
                print(json.dumps(rows[-1]), flush=True)
    keep(chosen.out, {"rows": rows})


if __name__ == "__main__":
    main()
