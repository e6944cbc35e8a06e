"""The floor under nf4conv's commands: moves the same bytes with the same threads and computes
nothing.

Reads every shard or GGUF file of a folder in pieces, passes them over the device (pinned, one
stream a thread), brings KEPT bytes back for each byte read, and writes those to files as large, and
as many at a time, as nf4conv does, because one file takes the writes of one thread at a time.
Prints the seconds from the first read to the last write, without start-up, as JSON.

Usage: python -m benchmarks.floor FOLDER OUT DEVICE KEPT
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

from nf4conv.options import RunOptions
from nf4conv.run.device.on_torch.device import TorchBackend
from nf4conv.run.loop import make_pipeline
from nf4conv.run.pieces import interleave

SHARD_SIZE = 1_000_000_000
"""`--max-shard-size` of nf4conv, unless it is told otherwise."""
FILES_AT_A_TIME = 8
"""As in nf4conv/run/filling.py."""


class Job(NamedTuple):
    """A piece to move: what to read from which file, and where to write what is kept of it."""

    reading: int
    start: int
    length: int
    writing: int
    place: int
    kept: int


def plan(sources: Iterable[Path], out: Path, piece: int, kept_ratio: float) -> list[Job]:
    """Returns all pieces of some files, those of several output files in turn."""
    files: list[list[Job]] = []
    writing, written = -1, SHARD_SIZE
    for path in sources:
        size, reading = path.stat().st_size, os.open(path, os.O_RDONLY)
        for start in range(0, size, piece):
            if written >= SHARD_SIZE:
                writing = os.open(out / f"{len(files)}.safetensors", os.O_RDWR | os.O_CREAT)
                files.append([])
                written = 0
            length = min(piece, size - start)
            kept = int(length * kept_ratio)
            files[-1].append(Job(reading, start, length, writing, written, kept))
            written += kept
    for jobs in files:
        os.ftruncate(jobs[-1].writing, jobs[-1].place + jobs[-1].kept)
    return list(interleave(files, FILES_AT_A_TIME))


def move(jobs: list[Job], device: torch.device, threads: int, piece: int, returned: int) -> float:
    """Carries out the jobs. Returns the seconds that they took."""
    todo, lock = iter(jobs), threading.Lock()
    started: list[float] = []
    ready = threading.Barrier(threads, lambda: started.append(time.perf_counter()))
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
    for worker in workers:
        worker.join()
    return time.perf_counter() - started[0]


def main() -> None:
    source, out, device, kept = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    pipeline = make_pipeline(TorchBackend(device), RunOptions(device=device), lambda _: None)
    kept_ratio = float(kept)
    # what becomes larger is taken in pieces that become a piece
    piece = int(pipeline.piece / max(kept_ratio, 1))
    returned = int(pipeline.piece * min(kept_ratio, 1))
    out.mkdir(parents=True)
    sources = sorted(path for path in source.iterdir() if path.suffix in (".safetensors", ".gguf"))
    jobs = plan(sources, out, piece, kept_ratio)
    seconds = move(jobs, torch.device(device), pipeline.workers, piece, returned)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
