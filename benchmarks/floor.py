"""The floor under nf4conv's commands: moves the same bytes with the same threads and computes
nothing.

Reads every shard or GGUF file of a folder in pieces, passes them over the device (pinned, one
stream a thread), brings KEPT bytes back for each byte read, and writes those to files as large, and
as many at a time, as nf4conv does, because one file takes the writes of one thread at a time.
Prints the seconds from the first read to the last write, without start-up, as JSON.

Usage: python -m benchmarks.floor FOLDER OUT DEVICE THREADS PIECE_BYTES KEPT
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from nf4conv.run.pieces import interleave

SUFFIXES = {".safetensors", ".gguf"}
SHARD_SIZE = 1_000_000_000
"""`--max-shard-size` of nf4conv, unless it is told otherwise."""
FILES_AT_A_TIME = 8
"""As in nf4conv/run/filling.py."""


class Job(NamedTuple):
    """A piece to move: what to read from where, and where in which file to write what is kept of
    it.
    """

    reading: int
    start: int
    length: int
    writing: int
    place: int
    kept: int


def plan(sources: Iterable[Path], out: Path, piece: int, kept_ratio: float) -> list[Job]:
    """All pieces of some files, those of several output files in turn."""
    files: list[list[Job]] = []
    written = first = 0
    for path in sources:
        size, reading = path.stat().st_size, os.open(path, os.O_RDONLY)
        for start in range(0, size, piece):
            if written >= SHARD_SIZE * len(files):
                files.append([])
                first, writing = (
                    written,
                    os.open(out / f"{len(files)}.safetensors", os.O_RDWR | os.O_CREAT),
                )
            length = min(piece, size - start)
            files[-1].append(
                Job(reading, start, length, writing, written - first, int(length * kept_ratio))
            )
            written += files[-1][-1].kept
    for jobs in files:
        os.ftruncate(jobs[-1].writing, jobs[-1].place + jobs[-1].kept)
    return list(interleave(files, FILES_AT_A_TIME))


def move(
    jobs: list[Job], device: torch.device, threads: int, piece: int, returned: int
) -> tuple[float, float]:
    """Carry out the jobs; when the first began and the last ended, by time.perf_counter."""
    todo, lock, ready = iter(jobs), threading.Lock(), threading.Barrier(threads + 1)
    cuda = device.type == "cuda"

    def work() -> None:
        host = torch.empty(piece, dtype=torch.uint8, pin_memory=cuda)
        back = torch.empty(max(piece, returned), dtype=torch.uint8, pin_memory=cuda)
        stream = torch.cuda.Stream(device) if cuda else None
        held = torch.empty(max(piece, returned), dtype=torch.uint8, device=device) if cuda else host
        ready.wait()
        while True:
            with lock:
                job = next(todo, None)
            if job is None:
                return
            os.preadv(job.reading, [host.numpy()[: job.length].data], job.start)
            if stream is not None:
                with torch.cuda.stream(stream):
                    held[: job.length].copy_(host[: job.length], non_blocking=True)
                    back[: job.kept].copy_(held[: job.kept], non_blocking=True)
                stream.synchronize()
            os.pwrite(job.writing, back.numpy()[: job.kept].data, job.place)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    started = time.perf_counter()
    for worker in workers:
        worker.join()
    return started, time.perf_counter()


def main() -> None:
    source, out, device = Path(sys.argv[1]), Path(sys.argv[2]), torch.device(sys.argv[3])
    threads, piece, kept_ratio = int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6])
    # what becomes larger is taken in pieces that become a piece
    piece, returned = int(piece / max(kept_ratio, 1)), int(piece * min(kept_ratio, 1))
    out.mkdir(parents=True)
    sources = sorted(path for path in source.iterdir() if path.suffix in SUFFIXES)
    jobs = plan(sources, out, piece, kept_ratio)
    started, ended = move(jobs, device, threads, piece, returned)
    print(json.dumps({"seconds": ended - started, "bytes": sum(job.length for job in jobs)}))


if __name__ == "__main__":
    main()
