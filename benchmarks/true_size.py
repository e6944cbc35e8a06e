"""Simulates decoding Kimi K2.6 at its true size, 0.6 TB to 2 TB, on a disk of a given speed.

Sparse files have the release's names, dtypes, shapes and headers (tests/helpers/kimi.py). The whole
command runs in this process, with its plan, threads, buffers and files, but long reads and writes
move no bytes: each takes the disk for as long as its bytes would. The disk has the room that the
plan says it needs, and no more. Nothing is computed either. With
`--stream`, a stand-in for the Hub delivers shards over a link as fast as the disk.

    PYTHONPATH=tests/helpers python -m benchmarks.true_size [--layers 61] [--speed 20] [--stream]
        [--folder DIR] [--json FILE]

Checks that the time is bytes / speed, that the room which the plan prints is what the files take,
and that no more than two shards of a streamed source are there at a time. Prints memory beside it.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from kimi import Kimi

import nf4conv
from benchmarks.records import parser, save
from nf4conv.commands.dequantize import dry_run
from nf4conv.options import DequantizeOptions
from nf4conv.run.device.on_torch import reading
from nf4conv.sources.remote import hub
from nf4conv.sources.remote.repository import RemoteFile
from nf4conv.system.files import _SharedDescriptor
from nf4conv.system.machine import peak_resident

SMALL = 100_000_000  # bytes of room for headers, index and other files
LONG = 1 << 16  # bytes; shorter reads and writes are real, such as those of records
HEADER = 1 << 20  # bytes at the beginning of a file whose reads and writes are real


class Disk:
    """Takes as long for bytes as a disk of some speed, one request at a time.

    Attributes:
        speed: bytes a second.
        moved: bytes that were read and written.
    """

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.moved = 0
        self._free = 0.0
        self._lock = threading.Lock()

    def move(self, size: int) -> None:
        with self._lock:
            self.moved += size
            self._free = max(self._free, time.perf_counter()) + size / self.speed
            until = self._free
        time.sleep(max(0.0, until - time.perf_counter()))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets nf4conv read and write through this disk, and compute nothing."""
        read, write = _SharedDescriptor.read, _SharedDescriptor.write

        def paced_read(file: Any, buffer: memoryview, position: int) -> int:
            self.move(len(buffer))
            if len(buffer) < LONG or position < HEADER:
                return read(file, buffer, position)
            return len(buffer)

        def paced_write(file: Any, data: memoryview, position: int) -> int:
            self.move(len(data))
            if len(data) < LONG or position < HEADER:
                return write(file, data, position)
            return len(data)

        def nothing(tensor: Any, *_: object) -> torch.Tensor:
            return torch.empty(tensor.shape, dtype=reading.TORCH_DTYPES[tensor.dtype])

        with (
            mock.patch.object(_SharedDescriptor, "read", paced_read),
            mock.patch.object(_SharedDescriptor, "write", paced_write),
            mock.patch.object(reading, "_decode", nothing),
        ):
            yield


class Deliverer:
    """Stands in for a repository of the Hub: its files are those of a folder."""

    folder: Path
    disk: Disk

    def __init__(self, repo: str, _: object) -> None:
        self.repo, self.commit, self.is_offline = repo, "0" * 40, False
        self.files = {
            path.name: RemoteFile(path.name, path.stat().st_size, None, None)
            for path in self.folder.iterdir()
        }

    def fetch(self, names: list[str], **_: object) -> Path:
        cache = self.folder.with_name("cache")
        cache.mkdir(exist_ok=True)
        for name in names:
            shutil.copy(self.folder / name, cache)
        return cache

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        with (self.folder / file.name).open("rb") as opened:
            return os.pread(opened.fileno(), stop - start, start)

    def download(self, file: RemoteFile, *_: object, local_dir: Path, **_options: object) -> Path:
        self.disk.move(file.size)
        local_dir.mkdir(parents=True, exist_ok=True)
        os.link(self.folder / file.name, local_dir / file.name)
        return local_dir / file.name


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """Yields how many shards of a streamed source were in a folder, again and again."""
    found = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            found.append(len(list(folder.glob("*.safetensors"))))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=61)
    options.add_argument("--speed", type=float, default=20, help="of the disk, in GB a second")
    options.add_argument("--stream", action="store_true")
    options.add_argument("--folder", type=Path)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        source, out = Path(scratch) / "source", Path(scratch) / "out"
        source.mkdir()
        sizes = Kimi(layers=chosen.layers, files=chosen.layers + 1)
        tensors = sizes.write(source, has_data=False)
        disk = Disk(chosen.speed * 1e9)
        Deliverer.folder, Deliverer.disk = source, disk
        given: dict[str, Any] = {"device": "cpu", "stream": chosen.stream}
        place = "moonshotai/Kimi-K2.6" if chosen.stream else source
        with mock.patch.object(hub, "Repository", Deliverer), disk.in_place():
            plan = dry_run(place, DequantizeOptions(**given))
            room = plan.totals.bytes_after + SMALL
            if chosen.stream:
                room += sum(sorted(path.stat().st_size for path in source.iterdir())[-2:])
            before, used = time.perf_counter(), time.process_time()
            with (
                mock.patch("shutil.disk_usage", return_value=SimpleNamespace(free=room)),
                watched(out / ".nf4conv" / "source") as shards,
            ):
                nf4conv.dequantize(place, out, **given)
            seconds = time.perf_counter() - before
        written = sum(path.stat().st_size for path in out.glob("*.safetensors"))
        found = {
            "tensors": tensors,
            "bytes_before": plan.totals.bytes_before,
            "bytes_after": plan.totals.bytes_after,
            "bytes_written": written,
            "seconds": seconds,
            "reading_seconds_planned": plan.reading_seconds,
            "bytes_over_speed": disk.moved / disk.speed,
            "cpu_seconds": time.process_time() - used,
            "most_source_shards": max(shards),
            "host_peak_bytes": peak_resident(),
            "notes": [note for note in plan.notes if "stream" in note],
        }
    print(json.dumps(found, indent=1))
    save(chosen, speed=chosen.speed, stream=chosen.stream, **found)
    problems = []
    if written != plan.totals.bytes_after:
        problems.append("the room is not what was planned")
    if disk.moved < 0.99 * (plan.totals.bytes_before + written):
        problems.append("not all bytes went through the disk")
    if max(shards) > (2 if chosen.stream else 0):
        problems.append("more than two shards of the source were on disk")
    sys.exit("; ".join(problems) or None)


if __name__ == "__main__":
    main()
