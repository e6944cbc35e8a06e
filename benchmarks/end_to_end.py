"""Measures whole commands side by side: `nf4conv quantize`, transformers with bitsandbytes, and a
program that only moves bytes.

Every run is a fresh process on the same files with a warm page cache. The contestants take turns,
and medians are reported. The floor (benchmarks/floor.py) moves the same bytes with the same number
of threads. `--only` takes others too: searched scales, and what proofs cost.

    python -m benchmarks.end_to_end [--shape 8b] [--folder DIR] [--runs 3] [--json FILE]
        [--only NAME ...]
"""

import json
import tempfile
from pathlib import Path

import torch

from benchmarks.encodings import write_source
from benchmarks.processes import PYTHON, TOLD, Contestants, medians, ratio, run, take_turns
from benchmarks.records import parser, save
from benchmarks.synthetic import DEFAULT_SHAPE, SHAPES
from nf4conv.options import RunOptions
from nf4conv.run.device.on_torch.device import TorchBackend
from nf4conv.run.loop import make_pipeline

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
OURS = "quantize"
FLOOR = "floor"
PEER = "transformers + bitsandbytes"
OTHERS = ("quantize --scales search", "quantize --verify", "verify --source --exact")


def floor_words(source: Path, out: Path, kept: float, device: str = DEVICE) -> list[object]:
    """Returns the command that moves the bytes of a source, and KEPT for each, as nf4conv does."""
    pipeline = make_pipeline(TorchBackend(device), RunOptions(device=device), lambda _: None)
    moved = [source, out, device, pipeline.workers, pipeline.piece, kept]
    return [*PYTHON, "benchmarks.floor", *moved]


def contestants_of(source: Path, packed: Path, out: Path) -> Contestants:
    """Returns all contestants by name. Writes what those read that do not quantize."""
    ours = [*PYTHON, "nf4conv", "quantize", source]
    made = run([*ours, packed, *TOLD])
    floor = floor_words(source, out, made["bytes_after"] / made["bytes_before"])
    verify = [*PYTHON, "nf4conv", "verify", packed, "--source", source, "--exact", *TOLD]
    return {
        OURS: lambda: [*ours, out, *TOLD],
        FLOOR: lambda: floor,
        PEER: lambda: [*PYTHON, "benchmarks.peer", source, out, DEVICE],
        OTHERS[0]: lambda: [*ours, out, "--scales", "search", *TOLD],
        OTHERS[1]: lambda: [*ours, out, "--verify", *TOLD],
        OTHERS[2]: lambda: verify,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", default=DEFAULT_SHAPE, choices=SHAPES)
    options.add_argument("--folder", type=Path, help="where to put the checkpoint")
    options.add_argument("--runs", type=int, default=3)
    options.add_argument(
        "--only", nargs="*", default=[FLOOR, PEER], choices=[FLOOR, PEER, *OTHERS],
        help=f"what runs beside {OURS}",
    )  # fmt: skip
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        scratch = Path(folder)
        source = write_source(SHAPES[chosen.shape], "bfloat16", scratch / "source")
        contestants = contestants_of(source, scratch / "packed", scratch / "out")
        of_them = {name: contestants[name] for name in (OURS, *chosen.only)}
        results = take_turns(of_them, chosen.runs, scratch / "out")
    summary = {
        "shape": chosen.shape,
        "medians": medians(results),
        "wall_over_quantize": {name: ratio(one, results[OURS]) for name, one in results.items()},
    }
    if FLOOR in results:
        seconds = medians(results)[FLOOR]["seconds"]
        summary["pipeline_over_floor"] = medians(results)[OURS]["pipeline_seconds"] / seconds
    print(json.dumps(summary, indent=2))
    save(chosen, summary=summary, runs=results)


if __name__ == "__main__":
    main()
