"""Tiny checkpoints in the shape of real ones, made without transformers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_source(folder: Path, layers: int = 6) -> Path:
    """A sharded checkpoint whose larger weights take several pieces of 64 KiB."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    weight_map = {}
    for number in range(2):
        tensors = {}
        for layer in range(number * layers // 2, (number + 1) * layers // 2):
            for name, shape in (("mlp.up_proj", (512, 128)), ("self_attn.q_proj", (64, 64))):
                tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(
                    shape, generator=generator
                ).bfloat16()
            tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(64).bfloat16()
        if number == 0:
            tensors["model.embed_tokens.weight"] = torch.randn(
                256, 64, generator=generator
            ).bfloat16()
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 256,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
