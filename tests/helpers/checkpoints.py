"""Makes tiny checkpoints in the shape of real ones, without transformers."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EXPERTS = 2  # of a mixture


def write_source(folder: Path, layers: int = 6) -> Path:
    """Writes a checkpoint of two shards, whose larger weights take several pieces of 64 KiB."""
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), generator=generator).bfloat16()

    folder.mkdir()
    weight_map = {}
    for number in range(2):
        tensors = {}
        for layer in range(number * layers // 2, (number + 1) * layers // 2):
            prefix = f"model.layers.{layer}"
            tensors[f"{prefix}.mlp.up_proj.weight"] = random(512, 128)
            tensors[f"{prefix}.self_attn.q_proj.weight"] = random(64, 64)
            tensors[f"{prefix}.input_layernorm.weight"] = torch.ones(64).bfloat16()
        if number == 0:
            tensors["model.embed_tokens.weight"] = random(256, 64)
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 256,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_mixture(folder: Path) -> Path:
    """Writes a mixture of one layer, whose experts are stored one by one."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    tensors = {"model.embed_tokens.weight": random(96, 64)}
    tensors["model.layers.0.mlp.gate.weight"] = random(EXPERTS, 64)
    for expert in range(EXPERTS):
        place = f"model.layers.0.mlp.experts.{expert}"
        for name, shape in {
            "gate_proj": (32, 64),
            "up_proj": (32, 64),
            "down_proj": (64, 32),
        }.items():
            tensors[f"{place}.{name}.weight"] = random(*shape)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "vocab_size": 96,
        "dtype": "bfloat16",
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a checkpoint, of which no two files have the same."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        loaded = load_file(file)
        assert not tensors.keys() & loaded.keys()
        tensors |= loaded
    return tensors


def assert_same_tensors(
    found: Path | Mapping[str, torch.Tensor], expected: Path | Mapping[str, torch.Tensor]
) -> None:
    """Compares names, dtypes, shapes and bytes of tensors, or of those of checkpoints."""
    one, other = (
        tensors_of(each) if isinstance(each, Path) else each for each in (found, expected)
    )
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        parts = [each.contiguous().view(-1).view(torch.uint8) for each in (tensor, other[name])]
        assert torch.equal(*parts), name


def components(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Returns what stands beside a packed weight, by its suffix."""
    start = f"{name}."
    return {key.removeprefix(start): tensors[key] for key in tensors if key.startswith(start)}


def contents(folder: Path, names: str = "*") -> dict[str, bytes]:
    """Returns the content of every file below a folder, by its path."""
    found = {}
    for path in folder.rglob(names):
        if path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def pushed(out: Path, repo: str) -> dict[str, bytes]:
    """Returns what a push makes of a folder: there the code of the card names the repository."""
    found = contents(out)
    code, _, rest = found["README.md"].partition(b"# runs in the folder of this model")
    found["README.md"] = code.replace(b'(".", ', f'("{repo}", '.encode()) + rest.partition(b"\n")[2]
    return found


def save_model(folder: Path, tensors: Mapping[str, torch.Tensor], config: object) -> Path:
    """Writes a checkpoint of one file, and its config."""
    folder.mkdir(parents=True, exist_ok=True)
    apart = torch.contiguous_format
    stored = {name: tensor.clone(memory_format=apart) for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_adapter(folder: Path, factors: Mapping[str, torch.Tensor], config: object) -> Path:
    """Writes an adapter in the layout of PEFT."""
    folder.mkdir()
    save_file(dict(factors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
