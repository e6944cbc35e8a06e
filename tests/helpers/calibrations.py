"""Tiny models that can be calibrated, texts for them, and how far results are from them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from checkpoints import components, tensors_of

import nf4conv

VOCABULARY = 96
LENGTH = 32
CPU = {"device": "cpu"}


class Killed(BaseException):
    """Stands for a kill."""


def kill(*_: object) -> None:
    raise Killed


def make_model(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """Saves a random model with two blocks."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **changes})
    return save(transformers.AutoModelForCausalLM.from_config(config), folder)


def save(model: Any, folder: Path) -> Path:
    """Saves a random model whose inputs are of very unequal size, as real models have them."""
    model = model.to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(1 + 3 * torch.rand(parameter.shape[1]) ** 4)
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def make_text(path: Path, tokens: int = 3000, seed: int = 0) -> Path:
    """Writes token ids."""
    generator = np.random.default_rng(seed)
    np.save(path, (generator.random(tokens) ** 2 * VOCABULARY).astype(np.int32))
    return path


def options_for(text: Path, **changes: Any) -> dict[str, Any]:
    return {"calibrate": str(text), "calibration_tokens": 1024, **changes}


def record_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "nf4conv.json").read_text())
    return found


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the 4-bit weights of a checkpoint, decoded by nf4conv."""
    tensors = tensors_of(folder)
    found = {}
    for name, tensor in tensors.items():
        parts = components(tensors, name)
        if parts:
            state = nf4conv.QuantState.from_components(parts)
            found[name] = nf4conv.dequantize_4bit(tensor, state)
    return found


def gains_of(folder: Path) -> list[float]:
    """Returns what nf4conv.json says of all calibrated weights."""
    blocks = record_of(folder)["calibrated"]["blocks"]
    return [gain for block in blocks for gain in block["gains"].values()]


def divergence(model: Path, out: Path, ids: torch.Tensor) -> float:
    """Returns the mean divergence of a checkpoint's predictions, its weights decoded by us."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    original = load(model, dtype=torch.float32)
    with torch.no_grad():
        before = original(ids).logits.log_softmax(-1)
        original.load_state_dict(weights_in(out), strict=False)
        after = original(ids).logits.log_softmax(-1)
    return float((before.exp() * (before - after)).sum(-1).mean())


def assert_same_weights(folder: Path, other: Path) -> None:
    """Compares the shards of two results byte by byte."""
    files = sorted(folder.glob("*.safetensors"))
    assert files
    for file in files:
        assert (other / file.name).read_bytes() == file.read_bytes()
