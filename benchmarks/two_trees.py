"""Times whole commands of this tree beside those of another tree of nf4conv, in turns.

Every run is a fresh process on files in memory or a warm page cache. Reports medians, and for each
command the ratio of this tree's figures to those of the other.

    python -m benchmarks.two_trees OTHER_TREE [--shape 8b] [--folder DIR] [--turns 9]
        [--only COMMAND...] [--json FILE]
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.encodings import write_source
from benchmarks.processes import TOLD, Contestants, Result, medians, program_of, run, take_turns
from benchmarks.records import parser, save
from benchmarks.synthetic import DEFAULT_SHAPE, SHAPES

TREES = ("this", "other")
SOURCES = {"source": "bfloat16", "fp8 blocks": "fp8 blocks", "mxfp4": "mxfp4"}


def commands_of(scratch: Path) -> dict[str, list[object]]:
    """Returns the arguments of each command by its name."""
    source, packed, out = scratch / "source", scratch / "packed", scratch / "out"
    return {
        "quantize": ["quantize", source, out],
        "quantize --scales search": ["quantize", source, out, "--scales", "search"],
        "quantize --verify": ["quantize", source, out, "--verify"],
        "dequantize": ["dequantize", packed, out],
        "dequantize --dtype float16": ["dequantize", packed, out, "--dtype", "float16"],
        "verify --source --exact": ["verify", packed, "--source", source, "--exact"],
        "quantize from fp8 blocks": ["quantize", scratch / "fp8 blocks", out],
        "quantize from mxfp4": ["quantize", scratch / "mxfp4", out],
        "quantize from 4 bits, blocksize 128": ["quantize", packed, out, "--blocksize", "128"],
    }


def summarize(results: dict[str, list[Result]]) -> dict[str, Any]:
    """Returns medians of both trees, and the ratio of this tree's to the other's."""
    found = medians(results)
    summary: dict[str, Any] = {}
    for name in found:
        command, _, tree = name.rpartition(", ")
        if tree == "this" and f"{command}, other" in found:
            this, other = found[name], found[f"{command}, other"]
            ratios = {key: this[key] / other[key] for key in this if other.get(key)}
            summary[command] = {"this": this, "other": other, "ratio": ratios}
    return summary


def main() -> None:
    options = parser(__doc__)
    options.add_argument("other", type=Path, help="folder that holds the other tree's package")
    options.add_argument("--shape", default=DEFAULT_SHAPE, choices=SHAPES)
    options.add_argument("--folder", type=Path, help="where to put the checkpoints")
    options.add_argument("--turns", type=int, default=9)
    options.add_argument("--only", nargs="*", help="names of commands; by default all")
    chosen = options.parse_args()
    programs = {"this": program_of(Path.cwd()), "other": program_of(chosen.other.resolve())}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        scratch = Path(folder)
        commands = commands_of(scratch)
        names = chosen.only or list(commands)
        read = {str(word) for name in names for word in commands[name]}
        for place, encoding in SOURCES.items():
            if place == "source" or str(scratch / place) in read:
                write_source(SHAPES[chosen.shape], encoding, scratch / place)
        if str(scratch / "packed") in read:
            run([*programs["this"], "quantize", scratch / "source", scratch / "packed", *TOLD])
        contestants: Contestants = {
            f"{name}, {tree}": lambda name=name, tree=tree: [
                *programs[tree], *commands[name], *TOLD
            ]
            for name in names
            for tree in TREES
        }  # fmt: skip
        results = take_turns(contestants, chosen.turns, scratch / "out")
    summary = summarize(results)
    print(json.dumps(summary, indent=2))
    save(chosen, shape=chosen.shape, summary=summary, runs=results)


if __name__ == "__main__":
    main()
