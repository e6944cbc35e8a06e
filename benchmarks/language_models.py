"""The second model and the texts of `python -m benchmarks.quality_calibrated`.

    python -m benchmarks.language_models FOLDER [--size 10M] [--steps 2000] [--seed 0]

trains a small GPT-NeoX: LayerNorm, biases, parallel residual and one fused projection for q, k and
v, where the model that comes with the repository's data is a Llama. Its text is English: the
docstrings of the Python packages that are installed, as bytes. "10M" takes a minute of an H200,
"3M" ten minutes of one core of a CPU with AMX, and has learnt little by then. The same seed, steps,
packages and machine give the same weights.
"""

import argparse
import ast
import json
import math
import platform
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

CONFIG = {
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rotary_pct": 0.25,
    "use_parallel_residual": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@dataclass(frozen=True)
class Size:
    """A model, and how it is trained."""

    layers: int
    hidden: int
    heads: int
    # bytes
    window: int
    # windows of a step
    batch: int
    # the largest learning rate
    rate: float
    steps: int


SIZES = {
    "3M": Size(layers=4, hidden=256, heads=4, window=256, batch=16, rate=3e-3, steps=1000),
    "10M": Size(layers=6, hidden=384, heads=6, window=512, batch=128, rate=2e-3, steps=2000),
}
WARM_UP = 50  # steps

PACKAGES = ("torch", "transformers", "numpy", "huggingface_hub", "accelerate", "sympy", "networkx")
"""Packages whose docstrings the second model learns, of those that are installed."""


def docstrings(files: list[Path]) -> Iterator[str]:
    """Yields the docstrings of modules, classes and functions that are long enough to be prose."""
    for file in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                found = ast.get_docstring(node)
                if found and len(found) > 300:
                    yield found


def english() -> bytes:
    """Returns the docstrings of the installed PACKAGES, each once."""
    folder = Path(sysconfig.get_paths()["purelib"])
    files = [file for name in PACKAGES for file in sorted((folder / name).rglob("*.py"))]
    return "\n\n".join(dict.fromkeys(docstrings(files))).encode()


def english_held_out() -> bytes:
    """Returns the docstrings of the standard library, which the second model has not learnt."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(folder.rglob("*.py")) if "site-packages" not in file.parts]
    return "\n\n".join(dict.fromkeys(docstrings(files))).encode()


def python() -> bytes:
    """Returns sources of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return b"\n\n".join(file.read_bytes() for file in sorted(folder.glob("*.py")))


def c_headers() -> bytes:
    """Returns the headers of Python."""
    folder = Path(sysconfig.get_paths()["include"])
    return b"\n\n".join(file.read_bytes() for file in sorted(folder.rglob("*.h")))


def windows(text: bytes, count: int, seed: int, window: int = 512) -> torch.Tensor:
    """Returns windows of a text at random places, as token ids: [count, window] int64."""
    values = np.frombuffer(text, dtype=np.uint8)
    places = np.random.default_rng(seed).integers(0, len(values) - window, count)
    return torch.from_numpy(np.stack([values[i : i + window] for i in places]).astype(np.int64))


def train(folder: Path, size: Size, steps: int, seed: int) -> dict[str, float | int]:
    """Trains the second model and saves it.

    Returns:
        What was done, which also stands in FOLDER/training.json.
    """
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    config = transformers.GPTNeoXConfig(
        **CONFIG,
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        attn_implementation="sdpa",
    )
    model = transformers.GPTNeoXForCausalLM(config).to(device)
    folder.mkdir(parents=True, exist_ok=True)
    # to gather them takes a minute
    text = kept(folder / "english.txt", english)
    others = kept(folder / "held_out.txt", english_held_out)
    seconds = learn(model, text, size, steps, seed)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    held_out = windows(others, 32, seed, size.window).to(device)
    with torch.no_grad():
        logits = model.float()(held_out).logits
    done = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "text_bytes": len(text),
        "steps": steps,
        "seed": seed,
        "window": size.window,
        "windows_a_step": size.batch,
        "seconds": round(seconds),
        "loss_held_out": loss_of(logits, held_out).item(),
    }
    (folder / "training.json").write_text(json.dumps(done, indent=1) + "\n")
    return done


def kept(file: Path, gather: Callable[[], bytes]) -> bytes:
    """Returns a text that is gathered once."""
    if not file.exists():
        file.write_bytes(gather())
    return file.read_bytes()


def learn(model: torch.nn.Module, text: bytes, size: Size, steps: int, seed: int) -> float:
    """Trains a model; returns the seconds that it took."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(
        model.parameters(), size.rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    start = time.perf_counter()
    for step in range(steps):
        share = min(1, (step + 1) / WARM_UP)
        decay = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = size.rate * share * decay
        ids = windows(text, size.batch, seed * steps + step, size.window).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(ids, use_cache=False).logits
        loss = loss_of(logits, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(f"{step:>6} {loss.item():.4f} {time.perf_counter() - start:.0f} s", flush=True)
    return time.perf_counter() - start


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss of a byte."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    print(train(arguments.folder, size, arguments.steps or size.steps, arguments.seed))


if __name__ == "__main__":
    main()
