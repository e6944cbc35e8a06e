"""A source that answers after 5 ms for each block, as over a network: how much of queue depth ×
block / latency is had.

Threads read pieces as workers do, from files in memory. The first read of a file shows that it is
slow, and is counted.

Usage: python -m benchmarks.slow_source [--folder DIR] [--gigabytes 8] [--runs 3] [--out FILE.json]
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path

from nf4conv.run.loop import LARGEST_PIECE
from nf4conv.sources import reader as reading
from nf4conv.sources.reader import Reader
from nf4conv.system.cores import usable_cores

WORKERS = 8


def read_all(path: Path) -> float:
    """Seconds that reading a file takes, in pieces, by as many threads as there are workers."""
    starts, lock = iter(range(0, path.stat().st_size, LARGEST_PIECE)), threading.Lock()
    # as workers have them before they start
    buffers = [memoryview(bytearray(LARGEST_PIECE)) for _ in range(WORKERS)]

    def work(reader: Reader, buffer: memoryview) -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            reader.read_into(path, start, buffer)

    with Reader() as reader:
        workers = [threading.Thread(target=work, args=(reader, buffer)) for buffer in buffers]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--latency", type=float, default=0.005, help="seconds")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the result")
    chosen = parser.parse_args()
    preadv = os.preadv

    def delayed(descriptor: int, views: list[memoryview], position: int) -> int:
        time.sleep(chosen.latency * -(-len(views[0]) // reading._BLOCK))
        return preadv(descriptor, views, position)

    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        path, pieces = Path(folder) / "file", int(chosen.gigabytes * 1e9) // LARGEST_PIECE
        with path.open("wb") as file:
            for _ in range(pieces):
                file.write(os.urandom(2**20) * (LARGEST_PIECE // 2**20))
        size = path.stat().st_size
        prompt = statistics.median(read_all(path) for _ in range(chosen.runs))
        os.preadv = delayed  # type: ignore[assignment]
        seconds = statistics.median(read_all(path) for _ in range(chosen.runs))
    bound = reading._IN_FLIGHT * reading._BLOCK / chosen.latency
    summary = {
        "cores": len(usable_cores()),
        "python": platform.python_version(),
        "bytes": size,
        "latency_seconds": chosen.latency,
        "in_flight": reading._IN_FLIGHT,
        "block_bytes": reading._BLOCK,
        "bound_gb_per_second": bound / 1e9,
        "without_latency_gb_per_second": size / prompt / 1e9,
        "gb_per_second": size / seconds / 1e9,
        "of_bound": size / seconds / bound,
    }
    print(json.dumps(summary, indent=2))
    if chosen.out:
        chosen.out.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
