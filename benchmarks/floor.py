"""The floor under nf4conv's commands: moves the same bytes with the same threads and computes nothing.

Reads every shard of a checkpoint in pieces, passes them over the device (pinned, one stream a thread), brings KEPT
bytes back for each byte read, and writes those to as many files, several at a time as nf4conv does. Prints the seconds
from the first read to the last write, without start-up, as JSON.

Usage: python -m benchmarks.floor SOURCE OUT DEVICE THREADS PIECE_BYTES KEPT
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

from nf4conv.pipeline import interleave


def main() -> None:
    source, out, device = Path(sys.argv[1]), Path(sys.argv[2]), torch.device(sys.argv[3])
    threads, piece, kept_ratio = int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6])
    # what becomes larger is taken in pieces that become a piece
    piece, returned = int(piece / max(kept_ratio, 1)), int(piece * min(kept_ratio, 1))
    out.mkdir(parents=True)
    files = []
    for path in sorted(source.glob("*.safetensors")):
        size = path.stat().st_size
        reading = os.open(path, os.O_RDONLY)
        writing = os.open(out / path.name, os.O_RDWR | os.O_CREAT)
        os.ftruncate(writing, int(size * kept_ratio))
        files.append([(reading, writing, start, min(piece, size - start)) for start in range(0, size, piece)])
    jobs = list(interleave(files, 4))
    todo = iter(jobs)
    lock = threading.Lock()
    cuda = device.type == "cuda"
    ready = threading.Barrier(threads + 1)

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
            reading, writing, start, length = job
            os.preadv(reading, [host.numpy()[:length].data], start)
            kept = int(length * kept_ratio)
            if stream is not None:
                with torch.cuda.stream(stream):
                    held[:length].copy_(host[:length], non_blocking=True)
                    back[:kept].copy_(held[:kept], non_blocking=True)
                stream.synchronize()
            os.pwrite(writing, back.numpy()[:kept].data, int(start * kept_ratio))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    started = time.perf_counter()
    for worker in workers:
        worker.join()
    print(json.dumps({"seconds": time.perf_counter() - started, "bytes": sum(job[3] for job in jobs)}))


if __name__ == "__main__":
    main()
