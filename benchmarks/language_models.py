"""The second model and the texts of `python -m benchmarks.quality_calibrated`.

    python -m benchmarks.language_models FOLDER [--steps 2000] [--seed 0]

trains a small GPT-NeoX: LayerNorm, biases, parallel residual and one fused projection for q, k and
v, where the model that comes with the repository's data is a Llama. Its text is English: the
docstrings of the Python packages that are installed, as bytes. It takes a minute of an H200. The
same seed, steps, packages and machine give the same weights.
"""

import argparse
import ast
import json
import math
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.records import versions

CONFIG = {
    "vocab_size": 256, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6,
    "num_attention_heads": 6, "max_position_embeddings": 512, "rotary_pct": 0.25,
    "use_parallel_residual": True, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
WINDOW = 512  # bytes
BATCH = 128  # windows of a step
RATE = 2e-3  # the largest learning rate
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


def windows(text: bytes, count: int, seed: int) -> torch.Tensor:
    """Returns windows of a text at random places, as token ids: [count, WINDOW] int64."""
    values = np.frombuffer(text, dtype=np.uint8)
    places = np.random.default_rng(seed).integers(0, len(values) - WINDOW, count)
    return torch.from_numpy(np.stack([values[i : i + WINDOW] for i in places]).astype(np.int64))


def train(folder: Path, steps: int, seed: int) -> dict[str, object]:
    """Trains the second model and saves it.

    Returns:
        What was done, which also stands in FOLDER/training.json.
    """
    import transformers

    torch.manual_seed(seed)
    config = transformers.GPTNeoXConfig(**CONFIG, attn_implementation="sdpa")
    model = transformers.GPTNeoXForCausalLM(config)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    text = english()
    seconds = learn(model, text, steps, seed)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    held_out = windows(english_held_out(), 32, seed).to(model.device)
    with torch.no_grad():
        logits = model.float()(held_out).logits
    done = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "text_bytes": len(text),
        "steps": steps,
        "seed": seed,
        "seconds": round(seconds),
        "loss_held_out": loss_of(logits, held_out).item(),
        "versions": versions(None),
    }
    (folder / "training.json").write_text(json.dumps(done, indent=1) + "\n")
    return done


def learn(model: torch.nn.Module, text: bytes, steps: int, seed: int) -> float:
    """Trains a model; returns the seconds that it took."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    start = time.perf_counter()
    for step in range(steps):
        share = min(1, (step + 1) / WARM_UP)
        decay = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = RATE * share * decay
        ids = windows(text, BATCH, seed * steps + step).to(device)
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
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    print(train(chosen.folder, chosen.steps, chosen.seed))


if __name__ == "__main__":
    main()
