"""Measures the way back: `nf4conv dequantize`, what users do today, and a program that only moves
bytes.

Every run is a fresh process on the same files with a warm page cache. The contestants take turns,
and medians are reported.

Usage: python -m benchmarks.round_trip [--shape 8b] [--folder DIR] [--runs 3] [--out FILE.json]
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.end_to_end import Contestants, Results, keep, median, run, take_turns
from benchmarks.synthetic import SHAPES, write_checkpoint
from nf4conv.options import RunOptions
from nf4conv.run.device.on_torch.backend import TorchBackend
from nf4conv.run.loop import make_pipeline

PEERS = ("transformers", "bitsandbytes")


def measure_dequantize(
    packed: Path, scratch: Path, runs: int, peers: tuple[str, ...]
) -> dict[str, list[Any]]:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    pipeline = make_pipeline([TorchBackend(device)], RunOptions(device=device), lambda _: None)
    results: Results = defaultdict(list)
    python = [sys.executable, "-m"]
    ours = [*python, "nf4conv", "dequantize", str(packed)]

    def floor(out: str) -> list[str]:
        moved = [str(packed), out, device, str(pipeline.workers), str(pipeline.piece)]
        last = results["nf4conv"][-1]
        kept = last["bytes_after"] / last["bytes_before"]
        return [*python, "benchmarks.floor", *moved, str(kept)]

    def by_peer(peer: str, out: str) -> list[str]:
        return [*python, "benchmarks.peer_dequantize", peer, str(packed), out, device]

    contestants: Contestants = {
        "nf4conv": lambda out: [*ours, out, "--json", "--quiet"],
        "floor": floor,
    }
    for peer in peers:
        contestants[peer] = partial(by_peer, peer)
    take_turns(contestants, results, scratch / "out", runs, cold={*peers})
    shutil.rmtree(scratch / "out", ignore_errors=True)
    return {name: entries[-runs:] for name, entries in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shape", default="8b" if torch.cuda.is_available() else "1b", choices=SHAPES
    )
    parser.add_argument(
        "--folder", type=Path, help="where to put the checkpoints; default: a temporary folder"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument("--out", type=Path, help="file for the result")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        scratch = Path(folder)
        size = write_checkpoint(SHAPES[chosen.shape], scratch / "source")
        folders = [str(scratch / "source"), str(scratch / "packed")]
        run([sys.executable, "-m", "nf4conv", "quantize", *folders, "--json"])
        shutil.rmtree(scratch / "source")
        results = measure_dequantize(scratch / "packed", scratch, chosen.runs, tuple(chosen.peers))
    ours = results["nf4conv"]
    around = [entry["wall_seconds"] - entry["pipeline_seconds"] for entry in ours]
    host_peak = median(ours, "host_peak_bytes")
    summary = {
        "shape": chosen.shape,
        "plain_bytes": size,
        "packed_bytes": ours[0]["bytes_before"],
        "wall_seconds": {
            name: median(entries, "wall_seconds") for name, entries in results.items()
        },
        "pipeline_over_floor": median(ours, "pipeline_seconds")
        / median(results["floor"], "seconds"),
        "start_up_and_finish_seconds": statistics.median(around),
        "host_peak_bytes": host_peak,
        "host_growth_bytes": host_peak - median(ours, "host_baseline_bytes"),
        "device_peak_bytes": median(ours, "device_peak_bytes"),
    }
    if chosen.peers:
        summary["speedup"] = {
            peer: median(results[peer], "wall_seconds") / median(ours, "wall_seconds")
            for peer in chosen.peers
        }
        for key in ("host_peak_bytes", "device_peak_bytes"):
            summary[f"peer_{key}"] = {peer: median(results[peer], key) for peer in chosen.peers}
    print(json.dumps(summary, indent=2))
    keep(chosen.out, {"summary": summary, "dequantize": results})


if __name__ == "__main__":
    main()
