"""Checkpoints of realistic shape and random content, for measuring."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


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

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            yield f"{prefix}.mlp.down_proj.weight", (self.hidden, self.intermediate)
            yield f"{prefix}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{prefix}.self_attn.k_proj.weight", (self.key_value, self.hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, self.hidden)
            yield f"{prefix}.self_attn.q_proj.weight", (self.hidden, self.hidden)
            yield f"{prefix}.self_attn.v_proj.weight", (self.key_value, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)

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


SHAPES = {
    "8b": Llama(),
    "1b": Llama(hidden=2048, layers=16, intermediate=8192, key_value=512),
    "tiny": Llama(hidden=512, layers=2, intermediate=1024, key_value=128, vocabulary=4096),
}
DEFAULT_SHAPE = "8b" if torch.cuda.is_available() else "1b"


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
