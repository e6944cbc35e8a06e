"""Checkpoints of realistic shape and random content, for measuring."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


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


@dataclass(frozen=True)
class Experts:
    """Very many small matrices, as a mixture of experts stores them."""

    layers: int = 50
    experts: int = 333
    rows: int = 64
    columns: int = 512

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (1024, self.columns)
        for layer in range(self.layers):
            for expert in range(self.experts):
                prefix = f"model.layers.{layer}.mlp.experts.{expert}"
                yield f"{prefix}.down_proj.weight", (self.columns, self.rows)
                yield f"{prefix}.gate_proj.weight", (self.rows, self.columns)
                yield f"{prefix}.up_proj.weight", (self.rows, self.columns)
        yield "lm_head.weight", (1024, self.columns)

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": self.columns,
            "moe_intermediate_size": self.rows,
            "num_hidden_layers": self.layers,
            "num_experts": self.experts,
            "vocab_size": 1024,
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True)
class Giant:
    """One weight of more than 2^31 elements."""

    rows: int = 65536
    columns: int = 32832

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.layers.0.mlp.up_proj.weight", (self.rows, self.columns)

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
        }


def write_checkpoint(
    shape: Llama | Experts | Giant, folder: Path, shard_size: int = 4_500_000_000
) -> int:
    """Write a sharded bfloat16 checkpoint of normally distributed weights; returns its bytes."""
    folder.mkdir(parents=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    size = total = 0
    files: list[dict[str, torch.Tensor]] = [{}]
    weight_map: dict[str, int] = {}
    for name, dimensions in shape.tensors():
        tensor = (
            torch.empty(dimensions, dtype=torch.bfloat16, device=device)
            .normal_(0, 0.02, generator=generator)
            .cpu()
        )
        if size + tensor.nbytes > shard_size:
            _save(files[-1], folder, len(files))
            files.append({})
            size = 0
        files[-1][name] = tensor
        weight_map[name] = len(files)
        size += tensor.nbytes
        total += tensor.nbytes
    _save(files[-1], folder, len(files))
    _rename(folder, len(files), weight_map, total)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2))
    return total


def _save(tensors: dict[str, torch.Tensor], folder: Path, number: int) -> None:
    save_file(tensors, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
    tensors.clear()


def _rename(folder: Path, count: int, weight_map: dict[str, int], total: int) -> None:
    names = {
        number: f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    }
    for number, name in names.items():
        (folder / f"part-{number}.safetensors").rename(folder / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {key: names[number] for key, number in weight_map.items()},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


SHAPES = {
    "8b": Llama(),
    "16b": Llama(layers=68),
    "1b": Llama(hidden=2048, layers=16, intermediate=8192, key_value=512),
    "tiny": Llama(hidden=512, layers=2, intermediate=1024, key_value=128, vocabulary=4096),
    "experts": Experts(),
    "giant": Giant(),
}

if __name__ == "__main__":
    print(write_checkpoint(SHAPES[sys.argv[1]], Path(sys.argv[2])))
