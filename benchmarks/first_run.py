"""Measures the first run on a GPU: `nf4conv quantize` with empty caches of kernels, and once more.

The checkpoint has 0.9 GB. Versions of nf4conv take turns; every run is a fresh process on files in
memory.

Usage: python -m benchmarks.first_run [--folder DIR] [--runs 3] [--before TREE] [--out FILE.json]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.cold import quantize
from benchmarks.end_to_end import keep
from benchmarks.synthetic import Llama, write_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--before", type=Path, help="another tree of nf4conv, which takes turns with this one"
    )
    parser.add_argument("--out", type=Path, help="file for the result")
    chosen = parser.parse_args()
    trees = {"now": Path.cwd()} | ({} if chosen.before is None else {"before": chosen.before})
    found: dict[str, list[list[float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        scratch = Path(folder)
        write_checkpoint(
            Llama(hidden=2048, layers=4, intermediate=8192, key_value=512), scratch / "source"
        )
        for turn in range(chosen.runs):
            for name, tree in trees.items():
                caches = {"XDG_CACHE_HOME": "kernels", "TRITON_CACHE_DIR": "triton"}
                os.environ |= {
                    key: str(scratch / f"{kind} {turn} {name}") for key, kind in caches.items()
                }
                runs = (
                    quantize(scratch / "source", scratch / "out", tree) for _ in ("first", "second")
                )
                found[name].append([run["wall_seconds"] for run in runs])
                print(f"{turn}: {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    more = {
        name: statistics.median(first - second for first, second in runs)
        for name, runs in found.items()
    }
    print(json.dumps(more, indent=2))
    keep(chosen.out, {"more_seconds": more, "first_and_second": found}, "torch", "triton")


if __name__ == "__main__":
    main()
