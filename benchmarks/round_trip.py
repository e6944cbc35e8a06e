"""The way back, side by side: `nf4conv dequantize` against what users do today and a raw byte
mover.

Every run is a fresh process on the same files with a warm page cache; the contestants take turns;
medians are reported.

Usage: python -m benchmarks.round_trip [--shape 8b] [--folder DIR] [--runs 3] [--out FILE.json]
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.end_to_end import keep, median, run
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
    python, results = sys.executable, defaultdict(list)
    contestants = {
        "nf4conv": lambda out: [
            python,
            "-m",
            "nf4conv",
            "dequantize",
            str(packed),
            out,
            "--json",
            "--quiet",
        ],
        "floor": lambda out: [
            *(
                python,
                "-m",
                "benchmarks.floor",
                str(packed),
                out,
                device,
                str(pipeline.workers),
                str(pipeline.piece),
            ),
            str(results["nf4conv"][-1]["bytes_after"] / results["nf4conv"][-1]["bytes_before"]),
        ],
        **{
            peer: lambda out, peer=peer: [
                python,
                "-m",
                "benchmarks.peer_dequantize",
                peer,
                str(packed),
                out,
                device,
            ]
            for peer in peers
        },
    }
    # the first turn warms caches and compiles kernels, and is not counted
    for turn in range(runs + 1):
        for name, command in contestants.items():
            if turn == 0 and name in peers:
                continue
            out = scratch / "out"
            shutil.rmtree(out, ignore_errors=True)
            results[name].append(run(command(str(out))))
            print(
                f"{turn}: dequantize: {name}: {results[name][-1]['wall_seconds']:.2f} s",
                file=sys.stderr,
            )
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
        run(
            [
                sys.executable,
                "-m",
                "nf4conv",
                "quantize",
                str(scratch / "source"),
                str(scratch / "packed"),
                "--json",
            ]
        )
        shutil.rmtree(scratch / "source")
        results = measure_dequantize(scratch / "packed", scratch, chosen.runs, tuple(chosen.peers))
    ours = results["nf4conv"]
    summary = {
        "shape": chosen.shape,
        "plain_bytes": size,
        "packed_bytes": ours[0]["bytes_before"],
        "wall_seconds": {
            name: median(entries, "wall_seconds") for name, entries in results.items()
        },
        "pipeline_over_floor": median(ours, "pipeline_seconds")
        / median(results["floor"], "seconds"),
        "start_up_and_finish_seconds": statistics.median(
            r["wall_seconds"] - r["pipeline_seconds"] for r in ours
        ),
        "host_peak_bytes": median(ours, "host_peak_bytes"),
        "host_growth_bytes": median(ours, "host_peak_bytes") - median(ours, "host_baseline_bytes"),
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
