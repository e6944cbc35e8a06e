"""Calibrates a whole model of random weights, and measures each step: time and memory.

    python -m benchmarks.calibration --shape 8B --folder /dev/shm/calibration [--layers N]
        [--outputs qkv|all] [--turns 2]

The source is a folder of safetensors files, one for each layer, all of the same values; the text is
random token ids. Steps are timed with a synchronised device, which costs some of the time that the
whole takes; --plain leaves that out. With more than one turn, all must end in the same bytes.
"""

import argparse
import contextlib
import hashlib
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nf4conv
from nf4conv.calibrate import block, calibrating, gradients, kept, moments
from nf4conv.calibrate.model import weights
from nf4conv.calibrate.rounding import SecondMoments, calibrated
from nf4conv.options import OUTPUTS, QuantizeOptions, RunOptions
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.sources.header import build_header
from nf4conv.system.memory import peak_resident

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 128, "inner": 256, "layers": 2, "heads": 4, "kv": 2, "vocab": 512},
    "8B": {"hidden": 4096, "inner": 14336, "layers": 32, "heads": 32, "kv": 8, "vocab": 128256},
    "70B": {"hidden": 8192, "inner": 28672, "layers": 2, "heads": 64, "kv": 8, "vocab": 128256},
}

_SECONDS: defaultdict[str, float] = defaultdict(float)
_PEAKS: defaultdict[str, int] = defaultdict(int)
_RESERVED = [0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--outputs", choices=OUTPUTS)
    parser.add_argument("--turns", type=int, default=1)
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
    options = QuantizeOptions(
        calibrate=str(text),
        calibration_tokens=arguments.tokens,
        calibrate_output=arguments.outputs,
    )
    turns = []
    digests = []
    for number in range(arguments.turns):
        out = arguments.folder / f"out-{number}"
        turns.append({"shape": arguments.shape, **shape, **measure(source, out, options)})
        if arguments.turns > 1:
            digests.append(digest_of_weights(out))
        shutil.rmtree(out)
        print(json.dumps(turns[-1], indent=1), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(turns, indent=1) + "\n")
    if len(set(digests)) > 1:
        raise SystemExit("two turns end in different bytes")
    if digests:
        print(f"{len(digests)} turns end in the same bytes", flush=True)
    shutil.rmtree(arguments.folder)


def digest_of_weights(out: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(out.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


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


def measure(source: Path, out: Path, options: QuantizeOptions) -> dict[str, Any]:
    """Quantizes with calibration."""
    _SECONDS.clear()
    _PEAKS.clear()
    _RESERVED[0] = 0
    forget_peaks()
    started = time.perf_counter()
    plan = nf4conv.plan_quantization(source, options)
    planned = time.perf_counter() - started
    assert isinstance(plan, QuantizationPlan)
    assert plan.calibration is not None
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
        "tokens": plan.calibration.tokens,
        "outputs": plan.calibration.outputs,
        "estimated": asdict(plan.calibration.needs),
        "seconds": round(seconds, 1),
        "planning": round(planned, 1),
        "steps": {name: round(count, 2) for name, count in _SECONDS.items()},
        "host_peak_GB": round(peak_resident() / 1e9, 2),
        "host_baseline_GB": round(report.host_baseline_bytes / 1e9, 2),
        "gain": round(sum(gains) / len(gains), 4),
        "kept": sum(1 for gain in gains if gain == 1),
    }
    if torch.cuda.is_available():
        note_peak("after")
        found["device_allocated_GiB"] = round(max(_PEAKS.values()) / 2**30, 2)
        found["device_reserved_GiB"] = round(_RESERVED[0] / 2**30, 2)
        found["of_step_GiB"] = {step: round(count / 2**30, 2) for step, count in _PEAKS.items()}
    return found


def forget_peaks() -> None:
    """Lets peaks of memory begin anew: what made the source does not count."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def time_steps() -> None:
    """Times the steps of a calibration, those inside others too."""
    timed(calibrating, "compile_kernels", "compiling kernels")
    timed(weights.Contents, "__init__", "reading")
    timed(moments, "inputs_of", "forward of stages")
    timed(SecondMoments, "add", "H")
    timed(block, "find_stages", "finding stages")
    timed(block, "factor", "factor")
    timed(block, "round_calibrated", "rounding and sweeps")
    timed(block, "round_two_sided", "two-sided rounding")
    timed(calibrated, "first_draft", "rounding")
    timed(calibrated, "sweep", "sweeps")
    timed(calibrated, "packed", "packing")
    timed(block, "search", "search for the judge")
    timed(block, "layer_cost", "judging")
    timed(block, "two_sided_cost", "judging")
    timed(moments.BlockAtWork, "run", "forward of blocks")
    timed(gradients.OutputMoments, "find", "gradients at outputs")
    timed(kept.KeptFiles, "write", "writing blocks")
    timed(kept.KeptFiles, "read", "looking for finished blocks")
    timed(calibrating, "with_calibrated_weights", "overlay")
    timed(calibrating.Session, "embed", "embedding")


def timed(place: Any, name: str, step: str) -> None:
    """Lets a function's time be added to a step."""
    function: Callable[..., Any] = getattr(place, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        synchronize()
        note_peak("between")
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            synchronize()
            _SECONDS[step] += time.perf_counter() - started
            note_peak(step)

    setattr(place, name, run)


def note_peak(step: str) -> None:
    """Counts the memory since the last call to a step."""
    if torch.cuda.is_available():
        _PEAKS[step] = max(_PEAKS[step], torch.cuda.max_memory_allocated())
        _RESERVED[0] = max(_RESERVED[0], torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
