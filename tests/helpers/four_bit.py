"""4-bit checkpoints as other tools write them, tensor by tensor; `quantize` writes our own."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from nf4conv.codec.backends import backend
from nf4conv.codec.ops import quantize_4bit
from nf4conv.codec.quant_state import Decoding, QuantState, decoding_of

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "dtype": "bfloat16",
}


class ErrorSums(NamedTuple):
    """What a backend's `error_sums` returns, by name."""

    squared_error: float
    squared_weight: float
    max_error: float
    max_relative_error: float
    outside: float


def error_sums(
    weight: torch.Tensor, packed: torch.Tensor, state: QuantState, scales: str = "absmax"
) -> ErrorSums:
    """Measures how far a packed weight is from its source, on the backend of its device."""
    decoding = decoding_of(state)._replace(scales=scales)
    return sums_of(backend(weight.device), weight.view(-1), packed.view(-1), decoding)


def sums_of(
    functions: Any, weight: torch.Tensor, packed: torch.Tensor, decoding: Decoding
) -> ErrorSums:
    sums = functions.error_sums(weight, packed, decoding)
    assert sums.dtype == torch.float64
    return ErrorSums(*sums.tolist())


def pack(name: str, weight: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """The tensors that a weight becomes, by name."""
    packed, state = quantize_4bit(weight, **options)
    return {name: packed} | {
        f"{name}.{suffix}": part.clone() for suffix, part in state.components().items()
    }


def write(
    folder: Path, *shards: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None
) -> Path:
    """A checkpoint of these shards, with an index if there are several."""
    folder.mkdir()
    names = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    if len(shards) == 1:
        names = ["model.safetensors"]
    weight_map = {}
    for name, tensors in zip(names, shards, strict=True):
        save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()},
            folder / name,
            {"format": "pt"},
        )
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    states = [key for tensors in shards for key in tensors if "quant_state" in key]
    described = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "fp4" if any(key.endswith("fp4") for key in states) else "nf4",
        "bnb_4bit_use_double_quant": any("nested" in key for tensors in shards for key in tensors),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": "bfloat16",
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_threshold": 6.0,
    }
    config = CONFIG | {"quantization_config": described | (quantization or {})}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
