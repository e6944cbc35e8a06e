"""One GPU against all GPUs of a host, and against a floor: as many processes that move the same
bytes.

A 70B-shaped checkpoint, whole or a part of its layers, lies in memory. In turns, each in fresh
processes: `nf4conv quantize --device cuda:0`, `--device cuda:all`, and the floor, whose processes
(one a GPU, beside it as nf4conv's are) read shards into pinned memory, pass them over their GPU,
and write as many bytes as nf4conv does to files as large. The outputs of one GPU and of all are
compared byte for byte. Medians; the first turn warms up and is not counted.

Three ratios, from the strictest: the whole run once planned against the floor's moving alone, which
leaves out its start; reading, computing and writing against that; and wall clock against wall
clock, where the floor imports torch.

Usage: python -m benchmarks.several_gpus [--layers 40] [--runs 3] [--device cuda:all] [--folder
/dev/shm] [--out FILE]
"""

import argparse
import filecmp
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import floor
from benchmarks.end_to_end import keep, run
from benchmarks.synthetic import Llama
from nf4conv.commands.spread.places import Place, find_places
from nf4conv.run.device.on_driver.driver import bus_id, device_count
from nf4conv.run.loop import piece_size

SHARD_SIZE = 2_000_000_000
THREADS = 8
"""As nf4conv has them for a GPU."""


def write_source(shape: Llama, folder: Path) -> int:
    """A sharded bfloat16 checkpoint, by several threads, of one gigabyte of normal values again and
    again; its bytes.

    Drawing all values would take minutes. No two tensors begin at the same place of the gigabyte.
    """
    folder.mkdir(parents=True)
    values = torch.empty(
        2**29, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "cpu"
    )
    content = values.normal_(0, 0.02).cpu().view(torch.uint8).numpy().data
    shards: list[dict[str, dict[str, Any]]] = [{}]
    size = total = 0
    for name, dimensions in shape.tensors():
        nbytes = 2 * torch.Size(dimensions).numel()
        if size and size + nbytes > SHARD_SIZE:
            shards.append({})
            size = 0
        shards[-1][name] = {
            "dtype": "BF16",
            "shape": dimensions,
            "data_offsets": [size, size + nbytes],
        }
        size, total = size + nbytes, total + nbytes
    names = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]

    def write(number: int) -> None:
        header = json.dumps(shards[number]).encode()
        with (folder / names[number]).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            left = max(entry["data_offsets"][1] for entry in shards[number].values())
            start = 2 * 7919 * number
            while left:
                part = content[start : min(len(content), start + left)]
                file.write(part)
                left, start = left - len(part), 0

    with ThreadPoolExecutor(
        THREADS // 2
    ) as pool:  # memory that a virtual machine grows by comes no faster
        list(pool.map(write, range(len(shards))))
    weight_map = {
        name: file for file, entries in zip(names, shards, strict=True) for name in entries
    }
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(shape.config()))
    return total


def move(files: list[Path], out: Path, place: Place, kept: float, ready: Any, times: Any) -> None:
    """Moves some files over one GPU, as one process of the floor."""
    device = place.device
    os.sched_setaffinity(0, place.cores)
    piece = piece_size(64 * 10**6, THREADS)
    out.mkdir(parents=True)
    jobs = floor.plan(files, out, piece, kept)
    torch.empty(1, device=device)  # which takes its start out of what is measured
    ready.wait()
    times.put(floor.move(jobs, torch.device(device), THREADS, piece, int(piece * kept)))


def run_floor(source: Path, out: Path, places: list[Place], kept: float) -> dict[str, Any]:
    """Moves the files in one process for each place.

    Returns the seconds from the first read to the last write of all, and those of the whole run.
    """
    begun = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(len(places))
    times = context.SimpleQueue()
    files = sorted(source.glob("*.safetensors"))
    processes = []
    for rank, place in enumerate(places):
        share = files[rank :: len(places)]
        given = (share, out / str(rank), place, kept, ready, times)
        processes.append(context.Process(target=move, args=given))
    for process in processes:
        process.start()
    spans = [times.get() for _ in processes]
    for process in processes:
        process.join()
    seconds = max(end for _, end in spans) - min(start for start, _ in spans)
    return {"seconds": seconds, "wall_seconds": time.perf_counter() - begun}


def measure(source: Path, scratch: Path, device: str, runs: int) -> dict[str, list[dict[str, Any]]]:
    ours = [sys.executable, "-m", "nf4conv", "quantize", str(source), "--json", "--quiet"]
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    places = find_places(device)
    for turn in range(runs + 1):
        for name, on in (("one", places[0].device), ("all", device)):
            shutil.rmtree(scratch / name, ignore_errors=True)
            results[name].append(run([*ours, str(scratch / name), "--device", on]))
        last = results["one"][-1]
        kept = last["bytes_after"] / last["bytes_before"]
        results["floor"].append(run_floor(source, scratch / "floor", places, kept))
        shutil.rmtree(scratch / "floor")
        seconds = {name: round(entries[-1]["wall_seconds"], 2) for name, entries in results.items()}
        label = f"run {turn}" if turn else "warm-up"
        print(f"{label}: {seconds}", file=sys.stderr, flush=True)
    return {name: entries[1:] for name, entries in results.items()}


def differing(one: Path, other: Path) -> list[str]:
    """Returns the names of files that are not the same in both folders."""
    names = sorted({path.name for folder in (one, other) for path in folder.iterdir()})
    with ThreadPoolExecutor(THREADS) as pool:
        same = pool.map(lambda name: filecmp.cmp(one / name, other / name, shallow=False), names)
        return [name for name, equal in zip(names, same, strict=True) if not equal]


def topology() -> dict[str, str]:
    """Returns which cores are beside which GPU, as far as the system tells."""
    found = {}
    for gpu in map(bus_id, range(device_count())):
        folder = Path("/sys/bus/pci/devices") / gpu
        files = (folder / "numa_node", folder / "local_cpulist")
        found[gpu] = " ".join(file.read_text().strip() for file in files if file.exists())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--layers", type=int, default=40, help="of the 80 of a 70B: 72 GB, and 80 are 141 GB"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--hidden", type=int, default=8192, help="of a 70B; less for a trial")
    parser.add_argument("--device", default="cuda:all")
    parser.add_argument("--out", type=Path, help="file for the result")
    chosen = parser.parse_args()
    hidden = chosen.hidden
    shape = Llama(
        hidden=hidden, layers=chosen.layers, intermediate=hidden * 7 // 2, key_value=hidden // 8
    )
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        scratch = Path(folder)
        begun = time.perf_counter()
        size = write_source(shape, scratch / "source")
        seconds = time.perf_counter() - begun
        print(f"{size:,} bytes written in {seconds:.1f} s", file=sys.stderr, flush=True)
        results = measure(scratch / "source", scratch, chosen.device, chosen.runs)
        unequal = differing(scratch / "one", scratch / "all")
    median = {
        (name, key): statistics.median(entry[key] for entry in entries)
        for name, entries in results.items()
        for key in ("wall_seconds", "seconds", "pipeline_seconds")
        if key in entries[0]
    }
    summary = {
        "layers": chosen.layers,
        "source_bytes": size,
        "devices": results["all"][0]["device"],
        **{f"{name}_{key}": value for (name, key), value in median.items()},
        "gb_per_second": {name: size / 1e9 / median[name, "seconds"] for name in results},
        "speedup_wall": median["one", "wall_seconds"] / median["all", "wall_seconds"],
        "speedup": median["one", "seconds"] / median["all", "seconds"],
        "run_over_floor": median["all", "seconds"] / median["floor", "seconds"],
        "pipeline_over_floor": median["all", "pipeline_seconds"] / median["floor", "seconds"],
        "wall_over_floor_wall": median["all", "wall_seconds"] / median["floor", "wall_seconds"],
        "differing_files": unequal,
    }
    print(json.dumps(summary, indent=2))
    keep(
        chosen.out,
        {"summary": summary, "runs": results},
        "torch",
        "triton",
        gpus_beside_cores=topology(),
    )
    if unequal:
        sys.exit(f"differing files: {unequal}")


if __name__ == "__main__":
    main()
