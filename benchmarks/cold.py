"""Files that are not in the page cache: `nf4conv quantize` beside what the disk gives to whoever
only reads.

Floors read every byte of a checkpoint, by O_DIRECT and through the page cache, with 1 to 32
threads. Before every run the page cache lets go of the files: of everything by root, and of these
files by anybody. The contestants take turns in random order; medians are reported. Warm, for
comparison, runs the command once more on what is in memory then.

Usage: python -m benchmarks.cold --folder DIR_ON_DISK [--memory DIR] [--layers 12] [--runs 2]
[--before TREE]
                                 [--out FILE.json]
"""

import argparse
import json
import mmap
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.end_to_end import keep, median, program_of, run
from benchmarks.synthetic import SHAPES, Llama, write_checkpoint

MIB = 2**20
# threads, MiB, direct or not
FLOORS = (
    (1, 8, True),
    (32, 8, True),
    (8, 8, False),
    (32, 8, False),
    (32, 1, False),
)


def forget(folder: Path) -> None:
    """Let the page cache hold nothing of a folder's files."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        print("not root: files are let go of one by one", file=sys.stderr)
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(folder: Path, threads: int, block: int, *, is_direct: bool) -> dict[str, Any]:
    """Read every byte of the shards, in blocks."""
    files = [
        os.open(file, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
        for file in folder.glob("*.safetensors")
    ]
    blocks = iter(
        [(file, start) for file in files for start in range(0, os.fstat(file).st_size, block)]
    )
    lock, total = threading.Lock(), [0] * threads

    def work(number: int) -> None:
        buffer = mmap.mmap(-1, block)  # aligned to a page, as O_DIRECT wants it
        while True:
            with lock:
                place = next(blocks, None)
            if place is None:
                return
            total[number] += os.preadv(place[0], [buffer], place[1])

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    for file in files:
        os.close(file)
    return {"wall_seconds": seconds, "bytes": sum(total)}


def quantize(source: Path, out: Path, tree: Path) -> dict[str, Any]:
    shutil.rmtree(out, ignore_errors=True)
    found = run([*program_of(tree), "quantize", str(source), str(out), "--json", "--quiet"])
    shutil.rmtree(out, ignore_errors=True)
    return found


def measure(
    source: Path, memory: Path, runs: int, before: Path | None
) -> dict[str, list[dict[str, Any]]]:
    contestants: dict[str, Callable[[], dict[str, Any]]] = {}
    for threads, block, is_direct in FLOORS:
        name = f"{'O_DIRECT' if is_direct else 'buffered'}, {threads} threads, {block} MiB"
        contestants[name] = partial(read_all, source, threads, block * MIB, is_direct=is_direct)
    trees = {"": Path.cwd()} | ({} if before is None else {", before": before})
    for name, tree in trees.items():
        contestants[f"quantize{name}"] = warm = partial(quantize, source, memory / "out", tree)
        contestants[f"quantize{name}, OUT on the disk"] = partial(
            quantize, source, source.with_name("out"), tree
        )
        warm()  # compiles kernels
    results = defaultdict(list)
    for turn in range(runs):
        names = list(contestants)
        for name in random.Random(turn).sample(names, len(names)):
            forget(source)
            results[name].append(contestants[name]())
            print(
                f"{turn}: {name}: {results[name][-1]['wall_seconds']:.2f} s",
                file=sys.stderr,
                flush=True,
            )
    for _ in range(runs):
        for name, tree in trees.items():
            results[f"quantize{name}, warm"].append(quantize(source, memory / "out", tree))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk that is measured")
    parser.add_argument(
        "--memory", type=Path, default=Path("/dev/shm"), help="for the result that goes to memory"
    )
    parser.add_argument(
        "--layers", type=int, default=12, help="of 0.44 GB each, and 2.1 GB beside them"
    )
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument(
        "--before", type=Path, help="another tree of nf4conv, which takes turns with this one"
    )
    parser.add_argument("--out", type=Path, help="file for the result")
    chosen = parser.parse_args()
    shape = SHAPES["8b"]
    assert isinstance(shape, Llama)
    with (
        tempfile.TemporaryDirectory(dir=chosen.folder) as folder,
        tempfile.TemporaryDirectory(dir=chosen.memory) as memory,
    ):
        size = write_checkpoint(replace(shape, layers=chosen.layers), Path(folder) / "source")
        results = measure(Path(folder) / "source", Path(memory), chosen.runs, chosen.before)
    walls = {name: median(runs, "wall_seconds") for name, runs in results.items()}
    floors = {name: seconds for name, seconds in walls.items() if "threads" in name}
    best = min(floors, key=floors.__getitem__)
    over_best_floor = {}
    pipeline_over_best_floor = {}
    for name, runs in results.items():
        if name not in floors:
            over_best_floor[name] = walls[name] / walls[best]
            pipeline_over_best_floor[name] = median(runs, "pipeline_seconds") / walls[best]
    summary = {
        "source_bytes": size,
        "wall_seconds": walls,
        "gb_per_second": {name: size / seconds / 1e9 for name, seconds in walls.items()},
        "best_floor": best,
        "over_best_floor": over_best_floor,
        "pipeline_over_best_floor": pipeline_over_best_floor,
    }
    print(json.dumps(summary, indent=2))
    keep(chosen.out, {"summary": summary, "runs": results}, "torch", "triton")


if __name__ == "__main__":
    main()
