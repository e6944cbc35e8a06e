"""Decodes one model to bfloat16 by nf4conv, on a GPU or a CPU, and by other programs, side by side.

Every run is a fresh process on files in memory. The contestants take turns, and medians are
reported: time on the wall and of processors, start-up included, and the largest resident memory,
mapped files included. `floor` reads and writes the same bytes and computes nothing
(benchmarks/floor.py); it is compared with nf4conv's pipeline. Random bytes serve as weights.

    python -m benchmarks.decoding_peers [--shape 1b] [--runs 3] [--alone] [LAYOUT ...]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.encodings import ENCODINGS, write_source
from benchmarks.end_to_end import DEVICE, floor_words
from benchmarks.processes import PYTHON, TOLD, medians, ratio, run, take_turns
from benchmarks.records import parser, save
from benchmarks.synthetic import SHAPES

LAYOUTS = ("fp8 blocks", "fp8 channels", "int4 g32", "mxfp4", "nvfp4", "gguf Q4_K")
RATIOS = ("wall_seconds", "pipeline_seconds")

PEAK = """
import json, re
peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
print("\\n" + json.dumps({"host_peak_bytes": peak}))
"""

CONVERT = """
import sys
from compressed_tensors.entrypoints import convert
source, out = sys.argv[1:]
if {is_fp8}:
    converter = convert.FP8BlockDequantizer.from_pretrained(source)
else:
    converter = convert.CompressedTensorsDequantizer(source)
convert.convert_checkpoint(source, out, converter)
"""

LOAD = """
import sys, torch, transformers
source, out = sys.argv[1:]
config = transformers.{config}(**{description} | dict(dequantize=True))
model = transformers.AutoModelForCausalLM.from_pretrained(
    source, quantization_config=config, dtype=torch.bfloat16, **{options}
)
model.hf_quantizer = model._weight_conversions = None  # saved as it is now, not quantized again
model.save_pretrained(out)
"""


def peers(layout: str, source: Path, out: Path) -> dict[str, list[object]]:
    """Returns the words of the others' commands."""
    python = [sys.executable, "-c"]
    if layout.startswith("gguf "):
        gguf = {"gguf_file": "model.gguf"}
        load = LOAD.format(config="GgufConfig", description=gguf, options=gguf)
        return {"transformers": [*python, load + PEAK, source.parent, out]}
    description = ENCODINGS[layout][1]
    assert description is not None
    is_fp8 = description["quant_method"] == "fp8"
    config = "FineGrainedFP8Config" if is_fp8 else "CompressedTensorsConfig"
    load = LOAD.format(config=config, description=description, options={})
    return {
        "compressed-tensors": [*python, CONVERT.format(is_fp8=is_fp8) + PEAK, source, out],
        "transformers": [*python, load + PEAK, source, out],
    }


def measure(layout: str, source: Path, out: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    ours = [*PYTHON, "nf4conv", "dequantize", source, out, "--device", chosen.device, *TOLD]
    made = run(ours)
    folder = source if source.is_dir() else source.parent
    commands = {"nf4conv": ours}
    if not chosen.alone:
        commands |= peers(layout, source, out)
    kept = made["bytes_after"] / made["bytes_before"]
    commands["floor"] = floor_words(folder, out, kept, chosen.device)
    contestants = {name: lambda name=name: commands[name] for name in commands}
    results = take_turns(contestants, chosen.runs, out)
    floor = [dict.fromkeys(RATIOS, one["seconds"]) for one in results["floor"]]
    return {
        "layout": layout,
        "source_bytes": made["bytes_before"],
        "medians": medians(results),
        "wall_over_nf4conv": {
            name: ratio(found, results["nf4conv"]) for name, found in results.items()
        },
        "over_floor": {key: ratio(results["nf4conv"], floor, key) for key in RATIOS},
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("layouts", nargs="*", default=list(LAYOUTS), metavar="LAYOUT")
    options.add_argument("--shape", default="1b", choices=SHAPES)
    options.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--device", default=DEVICE)
    options.add_argument("--alone", action="store_true", help="only nf4conv and the floor")
    chosen = options.parse_args()
    rows = []
    for layout in chosen.layouts:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            source = write_source(SHAPES[chosen.shape], layout, Path(folder) / layout)
            out = Path(folder) / "out"
            rows.append(measure(layout, source, out, chosen))
        print(json.dumps(rows[-1], indent=1), flush=True)
        save(chosen, shape=chosen.shape, device=chosen.device, rows=rows)


if __name__ == "__main__":
    main()
