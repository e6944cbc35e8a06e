"""Calibrates a whole model of random weights, and measures each step: time and memory.

    python -m benchmarks.calibration --shape 8B --folder /dev/shm/calibration [--layers N]

The source is a folder of safetensors files, one for each layer, all of the same values; the text is
random token ids. Steps are timed with a synchronised device, which costs some of the time that the
whole takes; so the whole is timed once more without that, with --plain.
"""

import argparse
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nf4conv
from nf4conv.calibrate import block, calibrating, finished, moments
from nf4conv.calibrate.model import weights
from nf4conv.codec.rounding import SecondMoments, calibrated
from nf4conv.options import QuantizeOptions, RunOptions
from nf4conv.sources.header import build_header
from nf4conv.system.memory import peak_resident

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 128, "inner": 256, "layers": 2, "heads": 4, "kv": 2, "vocab": 512},
    "8B": {"hidden": 4096, "inner": 14336, "layers": 32, "heads": 32, "kv": 8, "vocab": 128256},
    "70B": {"hidden": 8192, "inner": 28672, "layers": 2, "heads": 64, "kv": 8, "vocab": 128256},
}

_SECONDS: defaultdict[str, float] = defaultdict(float)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shape = dict(SHAPES[arguments.shape])
    shape["layers"] = arguments.layers or shape["layers"]
    started = time.perf_counter()
    source = write_source(arguments.folder / "source", shape)
    text = arguments.folder / "ids.npy"
    generator = np.random.default_rng(0)
    np.save(text, generator.integers(0, shape["vocab"], 2 * arguments.tokens, dtype=np.int32))
    print(f"source made in {time.perf_counter() - started:.1f} s", flush=True)
    if not arguments.plain:
        time_steps()
    found = measure(source, text, arguments.folder / "out", arguments.tokens)
    found = {"shape": arguments.shape, **shape, **found}
    print(json.dumps(found, indent=1), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    shutil.rmtree(arguments.folder)


def write_source(folder: Path, shape: dict[str, int]) -> Path:
    """Writes a checkpoint in the shape of a Llama."""
    folder.mkdir(parents=True)
    hidden, inner = shape["hidden"], shape["inner"]
    head = hidden // shape["heads"]
    matrices = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (shape["kv"] * head, hidden),
        "self_attn.v_proj": (shape["kv"] * head, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {f"{name}.weight": random(*size) for name, size in matrices.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    weight_map = {}
    for layer in range(shape["layers"]):
        named = {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()}
        weight_map |= write_file(folder / f"layer-{layer:03d}.safetensors", named)
    others = {
        "model.embed_tokens.weight": random(shape["vocab"], hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    weight_map |= write_file(folder / "others.safetensors", others)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv"],
        "vocab_size": shape["vocab"],
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random(rows: int, columns: int) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(rows + columns)
    values = torch.randn((rows, columns), generator=generator, device=device)
    values *= 0.02 * torch.rand(columns, generator=generator, device=device)
    return values.bfloat16().cpu()


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Writes tensors of bfloat16; returns the file's name by tensor."""
    entries = []
    position = 0
    for name, tensor in tensors.items():
        stop = position + tensor.nbytes
        entries.append((name, "BF16", tuple(tensor.shape), position, stop))
        position = stop
    with path.open("wb") as file:
        file.write(build_header(entries))
        for tensor in tensors.values():
            file.write(tensor.view(torch.uint8).numpy().data)
    return dict.fromkeys(tensors, path.name)


def measure(source: Path, text: Path, out: Path, tokens: int) -> dict[str, Any]:
    """Quantizes with calibration."""
    options = QuantizeOptions(calibrate=(str(text),), calibration_tokens=tokens)
    started = time.perf_counter()
    plan = nf4conv.plan_quantization(source, options)
    planned = time.perf_counter() - started
    last = [started, 0.0]

    def progress(count: int) -> None:
        now = time.perf_counter()
        last[1] += count
        if now - last[0] > 5:
            last[0] = now
            print(f"{now - started:.1f} s: {last[1] / 1e9:.2f} GB", flush=True)

    report = nf4conv.execute_quantization(plan, out, RunOptions(), progress)
    seconds = time.perf_counter() - started
    record = json.loads((out / "nf4conv.json").read_text())
    gains = [gain for of in record["calibrated"]["blocks"] for gain in of["gains"].values()]
    found: dict[str, Any] = {
        "device": record["calibrated"]["made_by"]["device"],
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "planning": round(planned, 1),
        "steps": {name: round(count, 2) for name, count in _SECONDS.items()},
        "host_peak_GB": round(peak_resident() / 1e9, 2),
        "host_baseline_GB": round(report.host_baseline_bytes / 1e9, 2),
        "gain": round(sum(gains) / len(gains), 4),
        "kept": sum(1 for gain in gains if gain == 1),
    }
    if torch.cuda.is_available():
        found["device_allocated_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        found["device_reserved_GiB"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    return found


def time_steps() -> None:
    """Times the steps of a calibration, those inside others too."""
    timed(weights.Contents, "__init__", "reading")
    timed(moments, "inputs_of", "forward of stages")
    timed(SecondMoments, "add", "H")
    timed(block, "find_stages", "finding stages")
    timed(block, "factor", "factor")
    timed(block, "round_calibrated", "rounding and sweeps")
    timed(calibrated, "first_draft", "rounding")
    timed(calibrated, "sweep", "sweeps")
    timed(calibrated, "finished", "packing and cost")
    timed(block, "search", "search for the judge")
    timed(block, "layer_cost", "judging")
    timed(moments.BlockAtWork, "run", "forward of blocks")
    timed(finished.FinishedBlocks, "write", "writing blocks")
    timed(finished.FinishedBlocks, "record", "reading records")
    timed(calibrating, "with_calibrated_weights", "overlay")


def timed(place: Any, name: str, step: str) -> None:
    """Lets a function's time be added to a step."""
    function: Callable[..., Any] = getattr(place, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        synchronize()
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            synchronize()
            _SECONDS[step] += time.perf_counter() - started

    setattr(place, name, run)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
