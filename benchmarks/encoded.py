"""Measures what decoding costs: packs one model to NF4 from every encoding that is accepted, and
from bfloat16.

Measures what casts cost, too: packing and decoding with `--dtype float16` and without. Every run is
a fresh process on files in memory or a warm page cache. It takes turns with the run that it is
compared with. Random bytes serve as weights: they are finite, and nothing else here depends on the
values. All layers hold the same bytes.

Usage: python -m benchmarks.encoded [--shape 8b] [--folder DIR] [--runs 3] [--out FILE.json] [ROW
...]
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.end_to_end import keep, median, run
from benchmarks.gguf_file import write_gguf
from benchmarks.integers import INTEGERS
from benchmarks.synthetic import SHAPES, Llama
from nf4conv import quantize_4bit

Tensors = dict[str, torch.Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT8 = torch.float8_e4m3fn
EXPERTS = 4


def random_bytes(*shape: int, high: int = 120) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8, device=DEVICE)


def bfloat16(name: str, rows: int, columns: int) -> Tensors:
    return {name: torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE)}


def fp8_blocks(name: str, rows: int, columns: int) -> Tensors:
    scale = torch.rand(-(-rows // 128), -(-columns // 128))
    return {name: random_bytes(rows, columns).view(FLOAT8), f"{name}_scale_inv": scale}


def fp8_tensor(name: str, rows: int, columns: int) -> Tensors:
    return {name: random_bytes(rows, columns).view(FLOAT8), f"{name}_scale": torch.rand(1)}


def mxfp8(name: str, rows: int, columns: int) -> Tensors:
    scale = random_bytes(rows, columns // 32, high=8) + 118
    return {name: random_bytes(rows, columns).view(FLOAT8), f"{name}_scale": scale}


def int8(name: str, rows: int, columns: int) -> Tensors:
    values = random_bytes(rows, columns, high=256).view(torch.int8)
    return {name: values, f"{name}_scale": torch.rand(rows, 1)}


def fp8_channels(name: str, rows: int, columns: int) -> Tensors:
    return {name: random_bytes(rows, columns).view(FLOAT8), f"{name}_scale": torch.rand(rows, 1)}


def mxfp4(name: str, rows: int, columns: int) -> Tensors:
    scale = random_bytes(rows, columns // 32, high=8) + 124
    return {f"{name}_packed": random_bytes(rows, columns // 2, high=256), f"{name}_scale": scale}


def gpt_oss(name: str, rows: int, columns: int) -> Tensors:
    """Four experts for a matrix of a feed-forward network, which stay in 16 bits; attention is in
    bfloat16.
    """
    if ".mlp." not in name:
        return bfloat16(name, rows, columns)
    stem, shape = name.removesuffix(".weight"), (EXPERTS, rows // EXPERTS, columns // 32)
    blocks = random_bytes(*shape, 16, high=256)
    return {f"{stem}_blocks": blocks, f"{stem}_scales": random_bytes(*shape, high=8) + 118}


def bfloat16_experts(name: str, rows: int, columns: int) -> Tensors:
    """Returns the tensors that those of `gpt_oss` decode to."""
    if ".mlp." not in name:
        return bfloat16(name, rows, columns)
    stacked = torch.randn(EXPERTS, columns, rows // EXPERTS, dtype=torch.bfloat16, device=DEVICE)
    return {name.removesuffix(".weight"): stacked}


def nvfp4(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}_packed": random_bytes(rows, columns // 2, high=256),
        f"{name}_scale": random_bytes(rows, columns // 16).view(FLOAT8),
        f"{name}_global_scale": torch.tensor([17.0]),
    }


def bitsandbytes_8bit(name: str, rows: int, columns: int) -> Tensors:
    values = random_bytes(rows, columns, high=256).view(torch.int8)
    return {name: values, f"{name.removesuffix('weight')}SCB": torch.rand(rows)}


def bitsandbytes_4bit(name: str, rows: int, columns: int) -> Tensors:
    packed, state = quantize_4bit(torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE))
    tensors = {name: packed}
    for suffix, component in state.components().items():
        tensors[f"{name}.{suffix}"] = component
    return tensors


ENCODINGS: dict[str, tuple[Callable[[str, int, int], Tensors], dict[str, Any] | None]] = {
    "bfloat16": (bfloat16, None),
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8 channels": (
        fp8_channels,
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
    ),
    "fp8 tensor": (fp8_tensor, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "mxfp8": (mxfp8, {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}),
    "int8": (int8, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "gpt-oss mxfp4": (gpt_oss, {"quant_method": "mxfp4"}),
    "bfloat16 experts": (bfloat16_experts, None),
    "mxfp4": (mxfp4, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}),
    "nvfp4": (nvfp4, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
    "bitsandbytes 8-bit": (
        bitsandbytes_8bit,
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ),
    "bitsandbytes 4-bit": (
        bitsandbytes_4bit,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
}

ENCODINGS |= INTEGERS

GGUF = ("Q4_K", "Q6_K", "Q8_0", "Q4_0")

Run = tuple[str, list[str]]  # the encoding of a source, and a command with its options

PLAIN: Run = ("bfloat16", ["quantize"])

# what is measured, by name, and what it is compared with
ROWS: dict[str, tuple[Run, Run]] = {}
for _encoding in ENCODINGS:
    if "bfloat16" not in _encoding:
        ROWS[_encoding] = ((_encoding, ["quantize"]), PLAIN)
for _block_type in GGUF:
    ROWS[f"gguf {_block_type}"] = ((f"gguf {_block_type}", ["quantize"]), PLAIN)
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


def write_checkpoint(shape: Llama, encoding: str, folder: Path) -> None:
    """Writes a file for each layer. All are copies of the first, with other names."""
    encode, description = ENCODINGS[encoding]
    folder.mkdir(parents=True)
    layer_0: Tensors = {}
    rest: Tensors = {}
    for name, dimensions in shape.tensors():
        if ".layers." not in name:
            rest[name] = torch.ones(dimensions, dtype=torch.bfloat16)
        elif ".layers.0." in name and len(dimensions) == 2:
            layer_0 |= encode(name, *dimensions)
        elif ".layers.0." in name:
            layer_0[name] = torch.ones(dimensions, dtype=torch.bfloat16)
    save(layer_0, folder / "model-0.safetensors")
    save(rest, folder / "model-rest.safetensors")
    first = (folder / "model-0.safetensors").read_bytes()
    size = int.from_bytes(first[:8], "little")

    def repeat(layer: int) -> None:
        header = first[8 : 8 + size].replace(b".layers.0.", f".layers.{layer}.".encode())
        header += b" " * (-len(header) % 8)
        data = memoryview(first)[8 + size :]
        with (folder / f"model-{layer}.safetensors").open("wb") as file:
            file.writelines([len(header).to_bytes(8, "little"), header, data])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(repeat, range(1, shape.layers)))
    weight_map = dict.fromkeys(rest, "model-rest.safetensors")
    for layer in range(shape.layers):
        for name in layer_0:
            name_here = name.replace(".layers.0.", f".layers.{layer}.")
            weight_map[name_here] = f"model-{layer}.safetensors"
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = shape.config()
    if description is not None:
        config["quantization_config"] = description
    (folder / "config.json").write_text(json.dumps(config))


def save(tensors: Tensors, file: Path) -> None:
    on_host = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    save_file(on_host, file, metadata={"format": "pt"})


def write_source(shape: Llama, encoding: str, folder: Path) -> None:
    """Writes a checkpoint, or a GGUF file."""
    if encoding.startswith("gguf "):
        write_gguf(shape, encoding.removeprefix("gguf "), folder)
    else:
        write_checkpoint(shape, encoding, folder)


def convert(of: Run, scratch: Path) -> dict[str, Any]:
    encoding, (command, *options) = of
    out = scratch / "out"
    shutil.rmtree(out, ignore_errors=True)
    source = scratch / encoding
    if encoding.startswith("gguf "):
        source /= "model.gguf"
    given = [command, str(source), str(out), "--json", "--quiet", *options]
    return run([sys.executable, "-m", "nf4conv", *given])


def summarize(
    name: str, results: list[dict[str, Any]], beside: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns medians of the runs of a row, and ratios to the runs that took turns with them."""
    wall = median(results, "wall_seconds")
    pipeline = median(results, "pipeline_seconds")
    host_peak = median(results, "host_peak_bytes")
    host_baseline = median(results, "host_baseline_bytes")
    beside_wall = median(beside, "wall_seconds")
    moved = results[0]["bytes_before"] + results[0]["bytes_after"]
    ratios = [
        one["wall_seconds"] / two["wall_seconds"] for one, two in zip(results, beside, strict=True)
    ]
    return {
        "row": name,
        "source_bytes": results[0]["bytes_before"],
        "bytes_after": results[0]["bytes_after"],
        "wall_seconds": wall,
        "pipeline_seconds": pipeline,
        "host_peak_bytes": host_peak,
        "host_baseline_bytes": host_baseline,
        "device_peak_bytes": median(results, "device_peak_bytes"),
        "host_growth_bytes": host_peak - host_baseline,
        "moved_gb_per_second": moved / pipeline / 1e9,
        "beside_wall_seconds": beside_wall,
        "beside_pipeline_seconds": median(beside, "pipeline_seconds"),
        "over_beside": wall / beside_wall,
        "over_beside_by_turn": ratios,
        "seconds_by_activity": results[-1]["seconds_by_activity"],
    }


def measure(name: str, scratch: Path, runs: int) -> dict[str, Any]:
    """Measures a row and what it is compared with in turns. Their checkpoints are there already."""
    row, other = ROWS[name]
    results = []
    beside = []
    for turn in range(runs + 1):
        one = convert(row, scratch)
        two = convert(other, scratch)
        if turn:  # the first one warms caches and compiles kernels
            results.append(one)
            beside.append(two)
    return summarize(name, results, beside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument(
        "--shape", default="8b" if torch.cuda.is_available() else "1b", choices=("8b", "1b")
    )
    parser.add_argument(
        "--folder", type=Path, help="where to put the checkpoints; default: a temporary folder"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the result")
    chosen = parser.parse_args()
    shape = SHAPES[chosen.shape]
    assert isinstance(shape, Llama)
    rows = []
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        scratch = Path(folder)
        for name in chosen.rows:
            needed = {encoding for encoding, _ in ROWS[name]}
            for encoding in needed:
                if not (scratch / encoding).exists():
                    write_source(shape, encoding, scratch / encoding)
            rows.append(measure(name, scratch, chosen.runs))
            print(json.dumps(rows[-1]), flush=True)
            keep(chosen.out, {"rows": rows}, "torch", "triton")
            for other in scratch.iterdir():
                if other.name not in {*needed, "bfloat16"}:
                    shutil.rmtree(other, ignore_errors=True)


if __name__ == "__main__":
    main()
