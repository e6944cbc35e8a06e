"""Checkpoints of realistic shape and random content, in every encoding that nf4conv reads.

Random bytes serve as weights: they are finite, and nothing that is measured depends on the values.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from gguf_files import write_gguf
from safetensors.torch import save_file

from benchmarks.running import DEVICE
from nf4conv import quantize_4bit

Tensors = dict[str, torch.Tensor]

EXPERTS: Final = 4
GROUP: Final = 128
MERGES: Final = 280_147
"""How many pairs the tokenizer of Llama 3 joins."""

LAYER: Final = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.down_proj": "ffn_down", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "self_attn.k_proj": "attn_k", "self_attn.o_proj": "attn_output",
    "self_attn.q_proj": "attn_q", "self_attn.v_proj": "attn_v",
}  # fmt: skip
"""The modules of a layer, and their names in GGUF."""


@dataclass(frozen=True)
class Llama:
    """The shape of a Llama-like model.

    The default is that of Llama 3.1 8B: 8.03 B parameters, 16.06 GB.
    """

    hidden: int = 4096
    layers: int = 32
    intermediate: int = 14336
    key_value: int = 1024
    vocabulary: int = 128256

    def layer(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the weights of a layer, by module."""
        rows = {"self_attn.k_proj": self.key_value, "self_attn.v_proj": self.key_value}
        rows |= {"mlp.gate_proj": self.intermediate, "mlp.up_proj": self.intermediate}
        found: dict[str, tuple[int, ...]] = {}
        for module in LAYER:
            if "norm" in module:
                found[module] = (self.hidden,)
            elif module == "mlp.down_proj":
                found[module] = (self.hidden, self.intermediate)
            else:
                found[module] = (rows.get(module, self.hidden), self.hidden)
        return found

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 128,
            "num_key_value_heads": self.key_value // 128,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 8192,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }


SHAPES: Final = {
    "8b": Llama(),
    "1b": Llama(hidden=2048, layers=16, intermediate=8192, key_value=512),
    "tiny": Llama(hidden=512, layers=2, intermediate=1024, key_value=128, vocabulary=4096),
}
DEFAULT_SHAPE: Final = "8b" if DEVICE == "cuda" else "1b"


def random_bytes(*shape: int, high: int = 256) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8, device=DEVICE)


def float8(*shape: int) -> torch.Tensor:
    return random_bytes(*shape, high=120).view(torch.float8_e4m3fn)


def int8(*shape: int) -> torch.Tensor:
    return random_bytes(*shape).view(torch.int8)


def exponents(*shape: int) -> torch.Tensor:
    return random_bytes(*shape, high=8) + 118


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, device=DEVICE).to(torch.int32)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape, device=DEVICE) * 0.01 + 1e-3).to(dtype)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) * 0.02


def in_4_bits(rows: int, columns: int) -> Tensors:
    packed, state = quantize_4bit(normal(rows, columns))
    parts = {f".weight.{suffix}": part for suffix, part in state.components().items()}
    return {".weight": packed} | parts


def pack_quantized(rows: int, columns: int, group: int) -> Tensors:
    return {
        ".weight_packed": words(rows, columns // 8),
        ".weight_scale": scales(rows, columns // group, dtype=torch.bfloat16),
        ".weight_shape": torch.tensor([rows, columns]),
    }


def gptq(rows: int, columns: int, index: torch.Tensor) -> Tensors:
    return {
        ".qweight": words(columns // 8, rows),
        ".qzeros": words(columns // GROUP, rows // 8),
        ".scales": scales(columns // GROUP, rows, dtype=torch.float16),
        ".g_idx": index.to(torch.int32),
    }


def compressed(form: str, bits: int, kind: str, strategy: str, **others: int) -> dict[str, Any]:
    """Returns the quantization_config that compressed-tensors writes."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, **others}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "model.embed_tokens"],
    }


Encode = Callable[[int, int], Tensors]

# what a matrix [n, k] is stored as, by what follows the name of its module; and the
# quantization_config that says so
ENCODINGS: Final[dict[str, tuple[Encode, dict[str, Any] | None]]] = {
    "bfloat16": (lambda n, k: {".weight": normal(n, k)}, None),
    "bfloat16 experts": (lambda n, k: {"": normal(EXPERTS, k, n // EXPERTS)}, None),
    "fp8 blocks": (
        lambda n, k: {".weight": float8(n, k), ".weight_scale_inv": scales(n // 128, k // 128)},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3",
         "activation_scheme": "dynamic"},
    ),
    "fp8 channels": (
        lambda n, k: {".weight": float8(n, k), ".weight_scale": scales(n, 1)},
        compressed("float-quantized", 8, "float", "channel"),
    ),
    "fp8 tensor": (
        lambda n, k: {".weight": float8(n, k), ".weight_scale": scales(1)},
        compressed("float-quantized", 8, "float", "tensor"),
    ),
    "mxfp8": (
        lambda n, k: {".weight": float8(n, k), ".weight_scale": exponents(n, k // 32)},
        compressed("mxfp8-quantized", 8, "float", "group", group_size=32),
    ),
    "int8": (
        lambda n, k: {".weight": int8(n, k), ".weight_scale": scales(n, 1)},
        compressed("int-quantized", 8, "int", "channel"),
    ),
    "gpt-oss mxfp4": (
        lambda n, k: {
            "_blocks": random_bytes(EXPERTS, n // EXPERTS, k // 32, 16),
            "_scales": exponents(EXPERTS, n // EXPERTS, k // 32),
        },
        {"quant_method": "mxfp4"},
    ),
    "mxfp4": (
        lambda n, k: {
            ".weight_packed": random_bytes(n, k // 2), ".weight_scale": exponents(n, k // 32)
        },
        compressed("mxfp4-pack-quantized", 4, "float", "group", group_size=32),
    ),
    "nvfp4": (
        lambda n, k: {
            ".weight_packed": random_bytes(n, k // 2),
            ".weight_scale": float8(n, k // 16),
            ".weight_global_scale": torch.tensor([17.0]),
        },
        compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16),
    ),
    "bitsandbytes 8-bit": (
        lambda n, k: {".weight": int8(n, k), ".SCB": scales(n)},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ),
    "bitsandbytes 4-bit": (
        in_4_bits,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "int4 g32": (
        lambda n, k: pack_quantized(n, k, 32),
        compressed("pack-quantized", 4, "int", "group", group_size=32),
    ),
    "int4 g128": (
        lambda n, k: pack_quantized(n, k, 128),
        compressed("pack-quantized", 4, "int", "group", group_size=128),
    ),
    "gptq": (
        lambda n, k: gptq(n, k, torch.arange(k) // GROUP),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    ),
    "gptq desc_act": (
        lambda n, k: gptq(n, k, torch.randperm(k) // GROUP),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    ),
    "awq": (
        lambda n, k: {
            ".qweight": words(k, n // 8),
            ".qzeros": words(k // GROUP, n // 8),
            ".scales": scales(k // GROUP, n, dtype=torch.float16),
        },
        {"quant_method": "awq", "bits": 4, "group_size": GROUP},
    ),
}  # fmt: skip
EXPERTS_ONLY: Final = ("gpt-oss mxfp4", "bfloat16 experts")
"""Encodings of feed-forward matrices, as experts; their attention is in bfloat16."""


def write_source(shape: Llama, encoding: str, folder: Path) -> Path:
    """Writes a checkpoint whose layers are all alike, or a GGUF file; returns its path."""
    if encoding.startswith("gguf "):
        return write_gguf_source(shape, encoding.removeprefix("gguf "), folder)
    encode, description = ENCODINGS[encoding]
    first: Tensors = {}
    for module, dimensions in shape.layer().items():
        name = f"model.layers.0.{module}"
        if len(dimensions) == 1:
            first[f"{name}.weight"] = torch.ones(dimensions, dtype=torch.bfloat16)
        elif encoding in EXPERTS_ONLY and not module.startswith("mlp."):
            first[f"{name}.weight"] = normal(*dimensions).cpu()
        else:
            encoded = encode(*dimensions).items()
            first |= {name + suffix: part.cpu().clone() for suffix, part in encoded}
    embedding = torch.ones(shape.vocabulary, shape.hidden, dtype=torch.bfloat16)
    rest = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    rest["model.norm.weight"] = torch.ones(shape.hidden, dtype=torch.bfloat16)
    config = shape.config()
    if description is not None:
        config["quantization_config"] = description
    write_layers(folder, first, rest, shape.layers, config)
    return folder


def write_layers(
    folder: Path, first: Tensors, rest: Tensors, layers: int, config: dict[str, object]
) -> None:
    """Writes a checkpoint whose layers are all copies of the first, with a file for each.

    A model whose layers are all alike computes as long as another, and is written in seconds.

    Args:
        folder: to make.
        first: the tensors of layer 0.
        rest: those outside the layers.
        layers: how many.
        config: for config.json.
    """
    folder.mkdir(parents=True)
    save_file(first, folder / "model-0.safetensors", metadata={"format": "pt"})
    save_file(rest, folder / "model-rest.safetensors", metadata={"format": "pt"})
    content = (folder / "model-0.safetensors").read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")

    def repeat(layer: int) -> None:
        header = content[8:size].replace(b".layers.0.", f".layers.{layer}.".encode())
        header += b" " * (-len(header) % 8)
        with (folder / f"model-{layer}.safetensors").open("wb") as file:
            file.writelines([len(header).to_bytes(8, "little"), header, memoryview(content)[size:]])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(repeat, range(1, layers)))
    weight_map = dict.fromkeys(rest, "model-rest.safetensors")
    for layer in range(layers):
        for name in first:
            renamed = name.replace(".layers.0.", f".layers.{layer}.")
            weight_map[renamed] = f"model-{layer}.safetensors"
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


def write_gguf_source(shape: Llama, block_type: str, folder: Path) -> Path:
    """Writes a model whose matrices are of one type, with a vocabulary as large as Llama 3's."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    embedding = (shape.vocabulary, shape.hidden)
    shapes = {"token_embd.weight": embedding, "output_norm.weight": embedding[1:]}
    for layer in range(shape.layers):
        for module, dimensions in shape.layer().items():
            shapes[f"blk.{layer}.{LAYER[module]}.weight"] = dimensions
    shapes["output.weight"] = embedding
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": shape.layers,
        "llama.context_length": 8192,
        "llama.embedding_length": shape.hidden,
        "llama.feed_forward_length": shape.intermediate,
        "llama.attention.head_count": shape.hidden // 128,
        "llama.attention.head_count_kv": shape.key_value // 128,
        "llama.rope.freq_base": 500000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [f"token{number}" for number in range(shape.vocabulary)],
        "tokenizer.ggml.token_type": [1] * shape.vocabulary,
        "tokenizer.ggml.merges": [f"to ken{number}" for number in range(MERGES)],
        "tokenizer.ggml.bos_token_id": 0,
    }
    file = folder / "model.gguf"
    return write_gguf(file, metadata, shapes=shapes, default=block_type, are_alike=True)
