"""Decodes one model to bfloat16 by nf4conv, on a GPU or a CPU, and by other programs, side by side.

Every run is a fresh process on files in memory. The contestants take turns, and medians are
reported: time on the wall and of processors, start-up included, and the largest resident memory,
mapped files included. `floor` reads and writes the same bytes and computes nothing
(benchmarks/floor.py); it is compared with nf4conv's pipeline. Random bytes serve as weights.

Usage: python -m benchmarks.decoding_peers [--shape 1b] [--runs 3] [--alone] [LAYOUT ...]
"""

import argparse
import json
import resource
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.encoded import write_source
from benchmarks.end_to_end import keep, run
from benchmarks.synthetic import SHAPES, Llama
from nf4conv.options import RunOptions
from nf4conv.run.device.on_torch.backend import TorchBackend
from nf4conv.run.loop import make_pipeline

FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "model.embed_tokens"],
    }


# what benchmarks.encoded calls a layout, and the quantization_config that others need
LAYOUTS: dict[str, dict[str, Any] | None] = {
    "fp8 blocks": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "fp8 channels": compressed("float-quantized", FP8),
    "int4 g32": compressed("pack-quantized", INT4),
    "mxfp4": compressed("mxfp4-pack-quantized", MXFP4),
    "nvfp4": compressed("nvfp4-pack-quantized", NVFP4),
    "gguf Q4_K": None,
}  # fmt: skip

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
    source, quantization_config=config, dtype=torch.bfloat16
)
model.hf_quantizer = model._weight_conversions = None  # saved as it is now, not quantized again
model.save_pretrained(out)
"""


LOAD_GGUF = """
import sys, torch, transformers
source, out = sys.argv[1:]
config = transformers.GgufConfig(gguf_file="model.gguf", dequantize=True)
model = transformers.AutoModelForCausalLM.from_pretrained(
    source, gguf_file="model.gguf", quantization_config=config, dtype=torch.bfloat16
)
model.save_pretrained(out)
"""


def commands(layout: str, source: Path, out: Path, device: str) -> dict[str, list[str]]:
    """Returns the words of each contestant's command."""
    python = [sys.executable, "-c"]
    description = LAYOUTS[layout]
    path = source if description else source / "model.gguf"
    words = ["dequantize", str(path), str(out), "--device", device, "--json", "--quiet"]
    ours = [sys.executable, "-m", "nf4conv", *words]
    places = [str(source), str(out)]
    if description is None:
        return {"nf4conv": ours, "transformers": [*python, LOAD_GGUF + PEAK, *places]}
    is_fp8 = description["quant_method"] == "fp8"
    config = "FineGrainedFP8Config" if is_fp8 else "CompressedTensorsConfig"
    load = LOAD.format(config=config, description=description)
    return {
        "nf4conv": ours,
        "compressed-tensors": [*python, CONVERT.format(is_fp8=is_fp8) + PEAK, *places],
        "transformers": [*python, load + PEAK, *places],
    }


def timed(command: list[str]) -> dict[str, Any]:
    """Returns what a command prints, its wall_seconds and its cpu_seconds, which load spares."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = run(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found | {"cpu_seconds": cpu}


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix != ".json")


def measure(layout: str, scratch: Path, runs: int, alone: bool, device: str) -> dict[str, Any]:
    source, out = scratch / layout, scratch / "out"
    contestants = commands(layout, source, out, device)
    if alone:
        contestants = {"nf4conv": contestants["nf4conv"]}
    defaults = make_pipeline([TorchBackend(device)], RunOptions(device=device), lambda _: None)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in [*contestants, "floor"]}
    wrong: dict[str, str] = {}
    for _ in range(runs):
        for name, command in contestants.items():
            if name in wrong:
                continue
            shutil.rmtree(out, ignore_errors=True)
            try:
                results[name].append(timed(command))
            except RuntimeError as error:
                wrong[name] = str(error)[-300:]
                print(name, error, file=sys.stderr)
                continue
            if name == "nf4conv":
                ratio = bytes_in(out) / bytes_in(source)
            print(layout, name, results[name][-1]["wall_seconds"], file=sys.stderr, flush=True)
        shutil.rmtree(out, ignore_errors=True)
        moved = [str(source), str(out), device, str(defaults.workers), str(defaults.piece)]
        floor = [sys.executable, "-m", "benchmarks.floor", *moved, str(ratio)]
        results["floor"].append(timed(floor))
    shutil.rmtree(out, ignore_errors=True)

    def median(name: str, key: str) -> float:
        return statistics.median(result[key] for result in results[name])

    found: dict[str, Any] = {"layout": layout, "source_bytes": bytes_in(source), "failed": wrong}
    for name in contestants:
        if name not in wrong:
            keys = ("wall_seconds", "cpu_seconds", "host_peak_bytes")
            found[name] = {key: median(name, key) for key in keys}
            found[name]["wall_over_nf4conv"] = statistics.median(
                theirs["wall_seconds"] / ours["wall_seconds"]
                for theirs, ours in zip(results[name], results["nf4conv"], strict=True)
            )
    found["device"] = device
    found["pipeline_seconds"] = median("nf4conv", "pipeline_seconds")
    found["floor_seconds"] = median("floor", "seconds")
    found["floor_cpu_seconds"] = median("floor", "cpu_seconds")
    found["wall_over_floor"] = statistics.median(
        ours["wall_seconds"] / floor["seconds"]
        for ours, floor in zip(results["nf4conv"], results["floor"], strict=True)
    )
    found["pipeline_over_floor"] = statistics.median(
        ours["pipeline_seconds"] / floor["seconds"]
        for ours, floor in zip(results["nf4conv"], results["floor"], strict=True)
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layouts", nargs="*", default=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--shape", default="1b", choices=("8b", "1b", "tiny"))
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--alone", action="store_true", help="only nf4conv and the floor")
    parser.add_argument("--out", type=Path, help="file for the result")
    chosen = parser.parse_args()
    shape = SHAPES[chosen.shape]
    assert isinstance(shape, Llama)
    rows = []
    for layout in chosen.layouts:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            source = Path(folder) / layout
            write_source(shape, layout, source)
            if LAYOUTS[layout]:
                config = json.loads((source / "config.json").read_text())
                config["quantization_config"] = LAYOUTS[layout]
                (source / "config.json").write_text(json.dumps(config))
            rows.append(measure(layout, Path(folder), chosen.runs, chosen.alone, chosen.device))
        print(json.dumps(rows[-1], indent=1), flush=True)
        keep(chosen.out, {"rows": rows}, "torch", "transformers", "compressed-tensors")


if __name__ == "__main__":
    main()
