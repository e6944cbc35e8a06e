"""Measures what decoding costs: packs one model to NF4 from every encoding that is accepted, and
from bfloat16.

Measures what casts cost, too: packing and decoding with `--dtype float16` and without. Every run is
a fresh process, in turns with the run that it is compared with.

    python -m benchmarks.encoded [--shape 8b] [--folder DIR] [--runs 3] [--json FILE] [ROW ...]
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.encodings import ENCODINGS, write_source
from benchmarks.processes import PYTHON, TOLD, median, ratio, take_turns
from benchmarks.records import parser, save
from benchmarks.synthetic import DEFAULT_SHAPE, SHAPES

Run = tuple[str, list[str]]  # the encoding of a source, and a command with its options

PLAIN: Run = ("bfloat16", ["quantize"])

ROWS: dict[str, tuple[Run, Run]] = {
    name: ((name, ["quantize"]), PLAIN)
    for name in (*ENCODINGS, "gguf Q4_K", "gguf Q6_K", "gguf Q8_0", "gguf Q4_0")
    if "bfloat16" not in name
}
"""What is measured, by name, and what it is compared with."""

ROWS |= {
    "dequantize gptq": (("gptq", ["dequantize"]), ("gguf BF16", ["dequantize"])),
    "dequantize gguf Q4_K": (("gguf Q4_K", ["dequantize"]), ("gguf BF16", ["dequantize"])),
    "gpt-oss mxfp4": (("gpt-oss mxfp4", ["quantize"]), ("bfloat16 experts", ["quantize"])),
    "bitsandbytes 4-bit": (("bitsandbytes 4-bit", ["quantize", "--blocksize", "128"]), PLAIN),
    "quantize --dtype float16": (("bfloat16", ["quantize", "--dtype", "float16"]), PLAIN),
    "dequantize --dtype float16": (
        ("bitsandbytes 4-bit", ["dequantize", "--dtype", "float16"]),
        ("bitsandbytes 4-bit", ["dequantize"]),
    ),
}


def measure(name: str, sources: dict[str, Path], out: Path, runs: int) -> dict[str, Any]:
    """Returns medians of a row, and ratios to the runs that took turns with them."""

    def words(of: Run) -> list[object]:
        encoding, (command, *options) = of
        return [*PYTHON, "nf4conv", command, sources[encoding], out, *TOLD, *options]

    row, other = (words(of) for of in ROWS[name])
    found = take_turns({"row": lambda: row, "beside": lambda: other}, runs, out)
    results, beside = found["row"], found["beside"]
    pipeline = median(results, "pipeline_seconds")
    moved = results[0]["bytes_before"] + results[0]["bytes_after"]
    keys = ("wall_seconds", "host_peak_bytes", "host_baseline_bytes", "device_peak_bytes")
    return {
        "row": name,
        "source_bytes": results[0]["bytes_before"],
        "bytes_after": results[0]["bytes_after"],
        **{key: median(results, key) for key in keys},
        "pipeline_seconds": pipeline,
        "moved_gb_per_second": moved / pipeline / 1e9,
        "beside_wall_seconds": median(beside, "wall_seconds"),
        "beside_pipeline_seconds": median(beside, "pipeline_seconds"),
        "over_beside": ratio(results, beside),
        "seconds_by_activity": results[-1]["seconds_by_activity"],
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("rows", nargs="*", default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    options.add_argument("--shape", default=DEFAULT_SHAPE, choices=SHAPES)
    options.add_argument("--folder", type=Path, help="where to put the checkpoints")
    options.add_argument("--runs", type=int, default=3)
    chosen = options.parse_args()
    rows = []
    sources: dict[str, Path] = {}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        for name in chosen.rows:
            needed = {encoding for encoding, _ in ROWS[name]}
            for encoding in set(sources) - needed - {"bfloat16"}:
                shutil.rmtree(Path(folder) / encoding)
                del sources[encoding]
            for encoding in needed - set(sources):
                place = Path(folder) / encoding
                sources[encoding] = write_source(SHAPES[chosen.shape], encoding, place)
            rows.append(measure(name, sources, Path(folder) / "out", chosen.runs))
            print(json.dumps(rows[-1]), flush=True)
            save(chosen, shape=chosen.shape, rows=rows)


if __name__ == "__main__":
    main()
