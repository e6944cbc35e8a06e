"""Tiny mixtures of experts with random weights, and checkpoints of them with 4-bit experts.

The checkpoints are written with bitsandbytes alone, tensor by tensor, so that what loads them is
compared with bitsandbytes and not with ourselves.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 2, "eos_token_id": 1, "num_experts_per_tok": 2,
}  # fmt: skip


def as_in_mixtral(path: str) -> str:
    """Returns the name that Mixtral's repositories give a layer's experts."""
    return path.replace(".mlp.", ".block_sparse_moe.")


@dataclass(frozen=True)
class Mixture:
    """A family, and how its single experts are named on disk.

    Attributes:
        config: beside SMALL.
        names: of gate, up and down.
        folder: from the path of experts in the model to that on disk.
        is_like_gpt_oss: its stacks are transposed, gate and up by turns.
    """

    config: dict[str, Any]
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    folder: Callable[[str], str] = field(default=str)
    is_like_gpt_oss: bool = False


MIXTURES = {
    # the last experts' columns are no multiple of a block's 64
    "qwen3_moe": Mixture({"moe_intermediate_size": 32, "num_experts": 4, "intermediate_size": 96}),
    "mixtral": Mixture(
        {"intermediate_size": 96, "num_local_experts": 4}, ("w1", "w3", "w2"), as_in_mixtral
    ),
    "deepseek_v3": Mixture(
        {
            "moe_intermediate_size": 32,
            "intermediate_size": 96,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        }
    ),
    # its down_proj is square: nothing but the model says that it is transposed
    "gpt_oss": Mixture(
        {
            "intermediate_size": 64,
            "num_local_experts": 4,
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        is_like_gpt_oss=True,
    ),
    "granitemoe": Mixture({"intermediate_size": 32, "num_local_experts": 4}),
}


def build(kind: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """Builds a model with random weights; the same each time."""
    settings = {**SMALL, **MIXTURES[kind].config, **config}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.eval()


def stacks_of(model: Any) -> list[str]:
    """Returns the names of the stacks of experts."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and ".experts." in name
    ]


@dataclass
class Packing:
    """How experts are packed.

    Attributes:
        layout: "packed", "stacked", or "unsloth", which is gpt-oss as Unsloth names it.
        is_nested: double quantization.
        layers: which ones, all by default.
    """

    layout: str = "packed"
    is_nested: bool = True
    layers: tuple[int, ...] = (0, 1)


def pack(weight: torch.Tensor, is_nested: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Packs with bitsandbytes; returns the codes ("") and components, and the decoded weight."""
    codes, state = bnb.quantize_4bit(
        weight.contiguous(), blocksize=64, quant_type="nf4", compress_statistics=is_nested
    )
    tensors = {"": codes, **state.as_dict(packed=True)}
    # the CPU kernel of bitsandbytes decodes rows that are no multiple of a block wrongly
    state.shape = torch.Size((weight.numel() // 64, 64))
    decoded = bnb.dequantize_4bit(codes, state).view(weight.shape)
    return tensors, decoded.to(weight.dtype)


def save(model: Any, kind: str, folder: Path, packing: Packing) -> dict[str, torch.Tensor]:
    """Writes a checkpoint with 4-bit experts; returns the state dict that it decodes to."""
    written: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    stacks = stacks_of(model)
    for name, tensor in model.state_dict().items():
        is_packed = any(f"layers.{layer}." in name for layer in packing.layers)
        if name not in stacks or not is_packed:
            written[name] = decoded[name] = tensor.clone()
            continue
        matrices = []
        for key, weight in weights_on_disk(name, tensor, MIXTURES[kind], packing.layout):
            tensors, values = pack(weight, packing.is_nested)
            for suffix, each in tensors.items():
                written[f"{key}.{suffix}" if suffix else key] = each
            matrices.append(values)
        decoded[name] = stack_of(matrices, tensor, MIXTURES[kind], packing.layout)
    if packing.layout == "unsloth":
        written = dict(as_unsloth_names(written))
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in written.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(model, folder, packing.is_nested)
    return decoded


def weights_on_disk(
    name: str, stack: torch.Tensor, mixture: Mixture, layout: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and values of what is packed of a stack."""
    path, _, leaf = name.rpartition(".")
    if layout == "stacked":
        yield name, stack
        return
    for expert, shown in enumerate(stack):
        matrix = shown.t() if mixture.is_like_gpt_oss else shown
        if layout == "unsloth":
            yield f"{path}.{leaf}s.{expert}.weight", matrix
        elif leaf == "down_proj":
            yield f"{mixture.folder(path)}.{expert}.{mixture.names[2]}.weight", matrix
        else:
            half = matrix.shape[0] // 2
            gate, up = matrix[:half], matrix[half:]
            if mixture.is_like_gpt_oss:
                gate, up = matrix[0::2], matrix[1::2]
            yield f"{mixture.folder(path)}.{expert}.{mixture.names[0]}.weight", gate
            yield f"{mixture.folder(path)}.{expert}.{mixture.names[1]}.weight", up


def stack_of(
    matrices: list[torch.Tensor], like: torch.Tensor, mixture: Mixture, layout: str
) -> torch.Tensor:
    """Returns the stack that decoded matrices belong to: the way back."""
    if layout == "stacked":
        return matrices[0]
    each = len(matrices) // like.shape[0]
    experts = []
    for start in range(0, len(matrices), each):
        own = matrices[start : start + each]
        matrix = torch.cat(own)
        if each == 2 and mixture.is_like_gpt_oss:
            matrix = torch.stack(own, 1).flatten(0, 1)
        experts.append(matrix.t() if mixture.is_like_gpt_oss else matrix)
    return torch.stack(experts).contiguous()


def as_unsloth_names(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors of gpt-oss by the names that Unsloth gives them."""
    for name, tensor in tensors.items():
        if name.endswith("_proj_bias"):
            path = name.removesuffix("_bias")
            for expert, bias in enumerate(tensor):
                yield f"{path}s.{expert}.bias", bias.clone()
        else:
            yield name.replace(".router.", ".router.linear."), tensor


def write_config(model: Any, folder: Path, is_nested: bool) -> None:
    """Writes a config.json by which only experts are in 4 bits."""
    config = model.config.to_dict()
    linear = [name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": is_nested,
        "bnb_4bit_compute_dtype": "float32",
        "llm_int8_skip_modules": linear,
    }
    (folder / "config.json").write_text(json.dumps(config))
