"""Mixtures of experts in 4 bits, packed by bitsandbytes, in every layout that tools write.

Nothing here is nf4conv's: what it decodes and stacks is compared with these.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
import transformers
from checkpoints import tensors_of
from safetensors.torch import save_file

HIDDEN, INNER, EXPERTS = 64, 128, 4
"""Rows fill blocks, since bitsandbytes decodes others wrongly on a CPU. An expert has fewer blocks
than share a nested scale.
"""

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
    "gpt_oss": ("GptOssForCausalLM", {"num_hidden_layers": 2}),
    "granitemoe": ("GraniteMoeForCausalLM", {}),
    "mistral4": ("Mistral4ForCausalLM", {**LATENT, "head_dim": 32}),
}
"""By family: its class, and what its config has besides SIZES."""

ROWS = {"gate_proj": 0, "up_proj": 1}

Encode = Callable[[dict[str, torch.Tensor], str, torch.Tensor], torch.Tensor]


def make_mixture(family: str, folder: Path, seed: int = 0) -> Path:
    """Saves a random bfloat16 model as transformers 5 does."""
    name, more = CLASSES[family]
    model_class = getattr(transformers, name)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = model_class(model_class.config_class(**{**SIZES, **more}))
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.05)
    model.save_pretrained(folder)
    return folder


def encode(
    into: dict[str, torch.Tensor], name: str, weight: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Packs a weight with bitsandbytes under a name; returns what it decodes to."""
    settings = {"quant_type": "nf4", "blocksize": 64, "compress_statistics": True, **options}
    packed, state = bnb.quantize_4bit(weight.contiguous(), **settings)
    into[name] = packed
    for suffix, part in state.as_dict(packed=True).items():
        into[f"{name}.{suffix}"] = part.contiguous()
    # decoded from what the file has
    components = {
        key.removeprefix(f"{name}."): part
        for key, part in into.items()
        if key.startswith(f"{name}.")
    }
    stored = bnb.QuantState.from_dict(components, device=torch.device("cpu"))
    return bnb.dequantize_4bit(packed, stored).view(weight.shape)


def split(
    family: str, name: str, stack: torch.Tensor
) -> tuple[str, dict[str, list[torch.Tensor]]] | None:
    """Returns the path of single experts, and [out, in] of each by projection; None of others."""
    path, _, leaf = name.rpartition(".")
    match family, leaf, path.rpartition(".")[2]:
        case "gpt_oss", "gate_up_proj", _:
            return path, {
                "gate_proj": [matrix[:, 0::2].t() for matrix in stack],
                "up_proj": [matrix[:, 1::2].t() for matrix in stack],
            }
        case "gpt_oss", "down_proj", _:
            return path, {"down_proj": [matrix.t() for matrix in stack]}
        case "granitemoe", "weight", "input_linear":
            experts = path.removesuffix("input_linear") + "experts"
            return experts, {
                "gate_proj": [matrix[:INNER] for matrix in stack],
                "up_proj": [matrix[INNER:] for matrix in stack],
            }
        case "granitemoe", "weight", "output_linear":
            experts = path.removesuffix("output_linear") + "experts"
            return experts, {"down_proj": list(stack)}
        case "mistral4", "gate_up_proj", "experts":
            return path, {
                "gate_proj": [matrix[:INNER] for matrix in stack],
                "up_proj": [matrix[INNER:] for matrix in stack],
            }
        case "mistral4", "down_proj", "experts":
            return path, {"down_proj": list(stack)}
        case _:
            return None


def joined(family: str, decoded: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    """Returns what `split` takes apart, from decoded experts."""
    if family == "gpt_oss" and "gate_proj" in decoded:
        stack = torch.empty(EXPERTS, HIDDEN, 2 * INNER, dtype=torch.bfloat16)
        for expert in range(EXPERTS):
            stack[expert, :, 0::2] = decoded["gate_proj"][expert].t()
            stack[expert, :, 1::2] = decoded["up_proj"][expert].t()
        return stack
    if family == "gpt_oss":
        return torch.stack([matrix.t() for matrix in decoded["down_proj"]])
    if "gate_proj" in decoded:
        pairs = zip(decoded["gate_proj"], decoded["up_proj"], strict=True)
        return torch.stack([torch.cat(pair) for pair in pairs])
    return torch.stack(decoded["down_proj"])


def pack_one_by_one(
    family: str, source: Path, folder: Path, **options: Any
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint with packed single experts; returns what it decodes to, as in SOURCE."""
    written: dict[str, torch.Tensor] = {}
    expected = {}
    for name, tensor in tensors_of(source).items():
        parts = split(family, name, tensor)
        if parts is not None:
            path, matrices = parts
            decoded: dict[str, list[torch.Tensor]] = {}
            for projection, of_experts in matrices.items():
                decoded[projection] = [
                    encode(written, f"{path}.{number}.{projection}.weight", matrix, **options)
                    for number, matrix in enumerate(of_experts)
                ]
            expected[name] = joined(family, decoded)
        elif ".experts." in name and name.endswith(".weight"):
            expected[name] = encode(written, name, tensor, **options)
        else:
            written[name] = expected[name] = tensor
    save(source, folder, written, **options)
    return expected


def pack_stacked(source: Path, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Writes a checkpoint with 3-D packed stacks under their own names, as Unsloth does."""
    written: dict[str, torch.Tensor] = {}
    expected = {}
    for name, tensor in tensors_of(source).items():
        if tensor.dim() == 3:
            expected[name] = encode(written, name, tensor, **options)
        else:
            written[name] = expected[name] = tensor
    save(source, folder, written, **options)
    return expected


def pack_as_unsloth_does_gpt_oss(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Writes gate_up_projs.N, down_projs.N and router.linear."""
    written: dict[str, torch.Tensor] = {}
    expected = {}
    for name, tensor in tensors_of(source).items():
        path, _, leaf = name.rpartition(".")
        if leaf in ("gate_up_proj", "down_proj"):
            decoded = [
                encode(written, f"{path}.{leaf}s.{number}.weight", matrix.t()).t()
                for number, matrix in enumerate(tensor)
            ]
            expected[name] = torch.stack(decoded)
        elif leaf in ("gate_up_proj_bias", "down_proj_bias"):
            projection = leaf.removesuffix("_bias")
            for number, bias in enumerate(tensor):
                written[f"{path}.{projection}s.{number}.bias"] = bias.clone()
            expected[name] = tensor
        else:
            written[name.replace(".router.", ".router.linear.")] = expected[name] = tensor
    save(source, folder, written)
    return expected


def save(
    source: Path,
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    quant_type: str = "nf4",
    compress_statistics: bool = True,
    **_: Any,
) -> None:
    """Writes a 4-bit checkpoint in two files, whose skip list is that of transformers 4."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    weight_map = {}
    for number, half in enumerate(halves, start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(half, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": quant_type,
        "bnb_4bit_use_double_quant": compress_statistics,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
