"""Measures whole commands side by side, on checkpoints of realistic shape.

    python -m benchmarks.commands peers|proofs|encodings|decoding|trees [--only CONTEST ...]
        [--shape 8b] [--folder DIR] [--runs 3] [--device D] [--other TREE] [--json FILE]

peers      `nf4conv quantize`, transformers with bitsandbytes, and a program that only moves bytes
proofs     searched scales, `quantize --verify` and `verify`, each beside `quantize`
encodings  NF4 from every encoding that is accepted, beside NF4 from bfloat16; and casts
decoding   `nf4conv dequantize` beside compressed-tensors and transformers, and the moved bytes
trees      commands of this tree beside those of another tree of nf4conv

Every run is a fresh process on the same files with a warm page cache. The contestants of a contest
take turns, and medians are reported, with the ratios of the first to each other one: time on the
wall and of processors, start-up included, the time from the first read to the last write, and the
largest resident memory, mapped files included. The floor (benchmarks/floor.py) moves the bytes of
the first contestant with as many threads; its seconds compare with pipeline_seconds.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.running import (
    DEVICE,
    KEPT,
    PYTHON,
    TOLD,
    medians,
    parser,
    ratios,
    run,
    save,
    take_turns,
)  # fmt: skip
from benchmarks.sources import DEFAULT_SHAPE, ENCODINGS, SHAPES, write_source

Words = list[object]
Contestants = dict[str, Words]

FLOOR: Final = "floor"
KEPT_SOURCES: Final = ("bfloat16", "packed")
"""Those that many contests read."""
DECODING: Final = ("fp8 blocks", "fp8 channels", "int4 g32", "mxfp4", "nvfp4", "gguf Q4_K")
PACKED_FROM: Final = (*ENCODINGS, "gguf Q4_K", "gguf Q6_K", "gguf Q8_0", "gguf Q4_0")


class Contests:
    """The contests of each kind, by name, with what makes their commands when their turn comes."""

    def __init__(self, chosen: argparse.Namespace, scratch: Path) -> None:
        self.chosen = chosen
        self.scratch = scratch
        self.out = scratch / "out"
        self.sources: dict[str, Path] = {}

    def source(self, name: str) -> Path:
        """Returns the path of a checkpoint in an encoding, which it writes if it is not there.

        "packed" is what this tree's `quantize` makes of "bfloat16".
        """
        if name not in self.sources:
            place = self.scratch / name
            if name == "packed":
                run([*PYTHON, "nf4conv", "quantize", self.source("bfloat16"), place, *TOLD])
                self.sources[name] = place
            else:
                self.sources[name] = write_source(SHAPES[self.chosen.shape], name, place)
        return self.sources[name]

    def forget(self) -> None:
        """Removes the sources that other contests do not read."""
        for name in set(self.sources) - set(KEPT_SOURCES):
            shutil.rmtree(self.scratch / name)
            del self.sources[name]

    def words(self, command: str, source: str, *options: object) -> Words:
        """Returns a command of nf4conv behind what runs nf4conv."""
        device = ["--device", self.chosen.device]
        if command == "verify":
            return [command, self.source("packed"), *options, *device, *TOLD]
        return [command, self.source(source), self.out, *options, *device, *TOLD]

    def ours(self, command: str, source: str, *options: object) -> Words:
        return [*PYTHON, "nf4conv", *self.words(command, source, *options)]

    def other(self, how: str, source: str) -> Words:
        place = self.source(source)
        return [*PYTHON, "benchmarks.others", how, place, self.out, self.chosen.device]

    def beside(self, first: Words, *other: object) -> Contestants:
        return {"nf4conv": first, " ".join(map(str, other)): self.ours(*other)}

    def peers(self) -> dict[str, Callable[[], Contestants]]:
        return {
            "quantize": lambda: {
                "nf4conv": self.ours("quantize", "bfloat16"),
                FLOOR: [self.source("bfloat16")],
                "transformers + bitsandbytes": self.other("quantize", "bfloat16"),
            }
        }

    def tree_commands(self) -> dict[str, Callable[[], Words]]:
        """Returns the commands that proofs and trees measure."""
        bits_16 = partial(self.words, "quantize", "bfloat16")
        return {
            "quantize": bits_16,
            "quantize --scales search": partial(bits_16, "--scales", "search"),
            "quantize --verify": partial(bits_16, "--verify"),
            "verify --source --exact": lambda: self.words(
                "verify", "packed", "--source", self.source("bfloat16"), "--exact"
            ),
            "dequantize": partial(self.words, "dequantize", "packed"),
            "dequantize --dtype float16": partial(
                self.words, "dequantize", "packed", "--dtype", "float16"
            ),
            "quantize from fp8 blocks": partial(self.words, "quantize", "fp8 blocks"),
            "dequantize from fp8 blocks": partial(self.words, "dequantize", "fp8 blocks"),
            "quantize from mxfp4": partial(self.words, "quantize", "mxfp4"),
            "quantize from 4 bits, blocksize 128": partial(
                self.words, "quantize", "packed", "--blocksize", 128
            ),
        }

    def proofs(self) -> dict[str, Callable[[], Contestants]]:
        names = ("quantize --scales search", "quantize --verify", "verify --source --exact")
        commands = self.tree_commands()
        return {
            name: lambda name=name: self.beside(
                [*PYTHON, "nf4conv", *commands[name]()], "quantize", "bfloat16"
            )
            for name in names
        }

    def encodings(self) -> dict[str, Callable[[], Contestants]]:
        bits_16 = ("quantize", "bfloat16")
        rows: dict[str, tuple[tuple[object, ...], tuple[object, ...]]] = {
            name: (("quantize", name), bits_16) for name in PACKED_FROM if "bfloat16" not in name
        }
        rows |= {
            "gpt-oss mxfp4": (("quantize", "gpt-oss mxfp4"), ("quantize", "bfloat16 experts")),
            "bitsandbytes 4-bit": (("quantize", "packed", "--blocksize", 128), bits_16),
            "dequantize gptq": (("dequantize", "gptq"), ("dequantize", "gguf BF16")),
            "dequantize gguf Q4_K": (("dequantize", "gguf Q4_K"), ("dequantize", "gguf BF16")),
            "quantize --dtype float16": ((*bits_16, "--dtype", "float16"), bits_16),
            "dequantize --dtype float16": (
                ("dequantize", "packed", "--dtype", "float16"), ("dequantize", "packed")
            ),
        }  # fmt: skip
        return {
            name: lambda row=row, other=other: self.beside(self.ours(*row), *other)
            for name, (row, other) in rows.items()
        }

    def decoding(self) -> dict[str, Callable[[], Contestants]]:
        def contest(layout: str) -> Contestants:
            place = self.source(layout)
            folder = place if place.is_dir() else place.parent
            found = {"nf4conv": self.ours("dequantize", layout), FLOOR: [folder]}
            if not layout.startswith("gguf"):
                found["compressed-tensors"] = self.other("convert", layout)
            return found | {"transformers": self.other("dequantize", layout)}

        return {layout: partial(contest, layout) for layout in DECODING}

    def trees(self) -> dict[str, Callable[[], Contestants]]:
        if self.chosen.other is None:
            sys.exit("trees needs --other TREE")

        def contest(words: Callable[[], Words]) -> Contestants:
            made = words()
            return {
                "this": [*program_of(Path.cwd()), *made],
                "other": [*program_of(self.chosen.other.resolve()), *made],
            }

        return {name: partial(contest, words) for name, words in self.tree_commands().items()}


def program_of(tree: Path) -> list[str]:
    """Returns the words that begin a command of the nf4conv in a folder."""
    code = f"import sys; sys.path[0] = {str(tree)!r}; from nf4conv.__main__ import run; run()"
    return [sys.executable, "-c", code]


def measure(contestants: Contestants, out: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Returns runs, medians and ratios of a contest."""
    first = next(iter(contestants))
    if FLOOR in contestants:
        made = run(contestants[first])
        kept = made["bytes_after"] / made["bytes_before"]
        floor = [*PYTHON, "benchmarks.floor", *contestants[FLOOR], out, chosen.device, kept]
        contestants = contestants | {FLOOR: floor}
    results = take_turns(contestants, chosen.runs, out)
    runs = {
        name: [{key: one[key] for key in KEPT if key in one} for one in found]
        for name, found in results.items()
    }
    over = {name: ratios(runs[first], found) for name, found in runs.items() if name != first}
    if FLOOR in runs:
        moved = [{"pipeline_seconds": one["seconds"]} for one in runs[FLOOR]]
        over[FLOOR] |= ratios(runs[first], moved)
    return {
        "medians": {name: medians(found) for name, found in runs.items()},
        "over": over,
        "runs": runs,
    }


def main() -> None:
    options = parser(__doc__)
    kinds = ("peers", "proofs", "encodings", "decoding", "trees")
    options.add_argument("kind", choices=kinds)
    options.add_argument("--only", nargs="*", metavar="CONTEST", help="by default all of the kind")
    options.add_argument("--shape", default=DEFAULT_SHAPE, choices=SHAPES)
    options.add_argument("--folder", type=Path, help="where to put the checkpoints")
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--device", default=DEVICE)
    options.add_argument("--other", type=Path, help="folder that holds the other tree's package")
    chosen = options.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        contests = Contests(chosen, Path(scratch))
        for name, contestants in getattr(contests, chosen.kind)().items():
            if chosen.only and name not in chosen.only:
                continue
            found[name] = measure(contestants(), contests.out, chosen)
            contests.forget()
            shown = {key: found[name][key] for key in ("medians", "over")}
            print(name, json.dumps(shown, indent=1), flush=True)
            save(chosen, shape=chosen.shape, device=chosen.device, contests=found)


if __name__ == "__main__":
    main()
