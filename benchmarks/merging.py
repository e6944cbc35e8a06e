"""Measures what merging an adapter costs: an 8B model with LoRA of rank 64 on all linear layers,
and without.

Both through the engine with torch, which merging needs, in one process, in turns, after a warm-up,
on files in memory.

Usage: python -m benchmarks.merging [--shape 8b] [--folder DIR] [--runs 3] [--out FILE.json]
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.end_to_end import keep
from benchmarks.synthetic import SHAPES, Llama, write_checkpoint
from nf4conv import (
    DequantizeOptions,
    QuantizeOptions,
    RunOptions,
    dequantize_checkpoint,
    quantize_checkpoint,
)
from nf4conv.run.device import choice

Convert = Callable[..., Any]


def write_adapter(shape: Llama, folder: Path, rank: int) -> int:
    """LoRA of every linear layer, as PEFT saves it; returns its bytes."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    made = {"dtype": torch.bfloat16, "device": "cuda" if torch.cuda.is_available() else "cpu"}
    for name, dimensions in shape.tensors():
        if ".layers." in name and len(dimensions) == 2:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = (
                torch.randn(rank, dimensions[1], **made).mul_(0.02).cpu()
            )
            tensors[f"{module}.lora_B.weight"] = (
                torch.randn(dimensions[0], rank, **made).mul_(0.02).cpu()
            )
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "base_model_name_or_path": "source",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


def compare(
    convert: Convert, plain: Any, lora: tuple[str, ...], paths: tuple[Path, Path], runs: int
) -> dict[str, Any]:
    """Medians of the pipeline's seconds, with an adapter and without, and where they go."""
    source, out = paths
    results: dict[str, list[Any]] = {"plain": [], "merged": []}
    for _ in range(runs + 1):
        for name, options in (("plain", plain), ("merged", replace(plain, lora=lora))):
            shutil.rmtree(out, ignore_errors=True)
            results[name].append(convert(source, out, options, RunOptions()))
    row: dict[str, Any] = {"command": convert.__name__}
    for name, reports in results.items():
        seconds = [report.pipeline_seconds for report in reports[1:]]
        row[name] = {
            "pipeline_seconds": statistics.median(seconds),
            "all": seconds,
            "seconds_by_activity": dict(reports[-1].seconds_by_activity),
            "device_peak_bytes": reports[-1].device_peak_bytes,
        }
    return row | {"ratio": row["merged"]["pipeline_seconds"] / row["plain"]["pipeline_seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shape", default="8b" if torch.cuda.is_available() else "1b", choices=("8b", "1b")
    )
    parser.add_argument(
        "--folder", type=Path, help="where to put the checkpoints; default: a temporary folder"
    )
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the result")
    chosen = parser.parse_args()
    shape = SHAPES[chosen.shape]
    assert isinstance(shape, Llama)
    choice.gpu_named = lambda _: None  # there is none without torch, then
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        source, nf4, out, adapter = (
            Path(scratch) / name for name in ("source", "nf4", "out", "adapter")
        )
        write_checkpoint(shape, source)
        lora, rows = (
            (str(adapter),),
            [{"adapter_bytes": write_adapter(shape, adapter, chosen.rank)}],
        )
        rows.append(
            compare(quantize_checkpoint, QuantizeOptions(), lora, (source, out), chosen.runs)
        )
        print(json.dumps(rows[-1]), flush=True)
        quantize_checkpoint(source, nf4)
        rows.append(
            compare(dequantize_checkpoint, DequantizeOptions(), lora, (nf4, out), chosen.runs)
        )
        print(json.dumps(rows[-1]), flush=True)
    keep(chosen.out, {"rows": rows}, "torch", "triton")


if __name__ == "__main__":
    main()
