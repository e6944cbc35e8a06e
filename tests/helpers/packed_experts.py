"""Tiny mixtures of experts, packed by bitsandbytes in every layout that tools write.

Nothing here is nf4conv's: what it decodes, stacks and loads is compared with these.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
import transformers
from checkpoints import components, save_model, tensors_of
from safetensors.torch import save_file

HIDDEN, INNER, EXPERTS = 64, 96, 4
"""An expert has fewer blocks than share a nested scale. Rows of down_proj do not fill blocks."""

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
    # its down_proj is square: nothing but the model says that it is transposed
    "gpt_oss": ("GptOssForCausalLM", {"intermediate_size": HIDDEN}),
    "granitemoe": ("GraniteMoeForCausalLM", {}),
    "mistral4": ("Mistral4ForCausalLM", {**LATENT, "head_dim": 32}),
}
"""By family: its class, and what its config has besides SIZES."""

Tensors = dict[str, torch.Tensor]


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


def encode(into: Tensors, name: str, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    """Packs a weight with bitsandbytes under a name; returns what it decodes to."""
    settings = {"quant_type": "nf4", "blocksize": 64, "compress_statistics": True, **options}
    packed, state = bnb.quantize_4bit(weight.contiguous(), **settings)
    into[name] = packed
    for suffix, part in state.as_dict(packed=True).items():
        into[f"{name}.{suffix}"] = part.contiguous()
    # decoded from what the file has
    stored = bnb.QuantState.from_dict(components(into, name), device=torch.device("cpu"))
    # bitsandbytes' kernel for CPUs decodes rows that are no multiple of a block wrongly
    stored.shape = torch.Size((weight.numel() // stored.blocksize, stored.blocksize))
    return bnb.dequantize_4bit(packed, stored).view(weight.shape)


def split(
    family: str, name: str, stack: torch.Tensor
) -> tuple[str, dict[str, list[torch.Tensor]]] | None:
    """Returns the path of single experts, and [out, in] of each by projection; None of others."""
    path, _, leaf = name.rpartition(".")
    if family == "granitemoe":
        path, _, module = path.rpartition(".")
        leaf = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}.get(module, "")
        path = f"{path}.experts"
    if leaf not in ("gate_up_proj", "down_proj") or stack.dim() != 3:
        return None
    is_like_gpt_oss = family == "gpt_oss"
    matrices = [matrix.t() if is_like_gpt_oss else matrix for matrix in stack]
    if leaf == "down_proj":
        return path, {"down_proj": matrices}
    gates, ups = [], []
    for matrix in matrices:
        gate, up = (matrix[0::2], matrix[1::2]) if is_like_gpt_oss else matrix.chunk(2)
        gates.append(gate)
        ups.append(up)
    return path, {"gate_proj": gates, "up_proj": ups}


def joined(family: str, decoded: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    """Returns what `split` takes apart, from decoded experts."""
    if family != "gpt_oss":
        return torch.stack([torch.cat(parts) for parts in zip(*decoded.values(), strict=True)])
    by_turns = [
        torch.stack(parts, 1).flatten(0, 1) for parts in zip(*decoded.values(), strict=True)
    ]
    return torch.stack([matrix.t() for matrix in by_turns])


def pack_one_by_one(
    family: str,
    source: Path,
    folder: Path,
    tensors: Tensors | None = None,
    *,
    only: str = "",
    **options: Any,
) -> Tensors:
    """Writes a checkpoint with packed single experts.

    Args:
        family: one of CLASSES; "mistral4" for all stacks of gate beside up, [out, in].
        source: a checkpoint.
        folder: what is written.
        tensors: all of the model; None are those of SOURCE.
        only: is in the names of the experts that are packed.
        options: of bitsandbytes.

    Returns:
        What it decodes to, by the same names as `tensors`.
    """
    written: Tensors = {}
    expected = {}
    for name, tensor in (tensors or tensors_of(source)).items():
        parts = split(family, name, tensor) if only in name else None
        if parts is not None:
            path, matrices = parts
            decoded: dict[str, list[torch.Tensor]] = {}
            for projection, of_experts in matrices.items():
                decoded[projection] = [
                    encode(written, f"{path}.{number}.{projection}.weight", matrix, **options)
                    for number, matrix in enumerate(of_experts)
                ]
            expected[name] = joined(family, decoded)
        elif ".experts." in name and name.endswith(".weight") and only in name:
            expected[name] = encode(written, name, tensor, **options)
        else:
            written[name] = expected[name] = tensor
    save(source, folder, written, **options)
    return expected


def pack_stacked(
    source: Path, folder: Path, tensors: Tensors | None = None, **options: Any
) -> Tensors:
    """Writes a checkpoint with 3-D packed stacks under their own names, as Unsloth does."""
    written: Tensors = {}
    expected = {}
    for name, tensor in (tensors or tensors_of(source)).items():
        if tensor.dim() == 3:
            expected[name] = encode(written, name, tensor, **options)
        else:
            written[name] = expected[name] = tensor
    save(source, folder, written, **options)
    return expected


def pack_as_unsloth_does_gpt_oss(source: Path, folder: Path) -> Tensors:
    """Writes gate_up_projs.N, down_projs.N and router.linear."""
    written: Tensors = {}
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
        content = {name: tensors[name].contiguous() for name in half}
        save_file(content, folder / file, {"format": "pt"})
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


def skip_linear_layers(folder: Path, model: torch.nn.Module) -> None:
    """Says in a config.json that only experts are in 4 bits, as a loader wants to be told."""
    config = json.loads((folder / "config.json").read_text())
    linear = [name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    config["quantization_config"]["llm_int8_skip_modules"] = linear
    (folder / "config.json").write_text(json.dumps(config))


def load(folder: Path, loader: Any = transformers.AutoModelForCausalLM) -> Any:
    return loader.from_pretrained(folder).eval()


def loaded_and_decoded(source: Path, folder: Path, pack: Callable[..., Tensors]) -> tuple[Any, Any]:
    """Returns a packed mixture as transformers loads it, and the same with decoded experts.

    Args:
        source: a mixture.
        folder: where the others are written.
        pack: packs SOURCE into a folder, and returns what that decodes to.
    """
    expected = pack(source, folder / "packed")
    save_model(folder / "decoded", expected, json.loads((source / "config.json").read_text()))
    decoded = load(folder / "decoded")
    skip_linear_layers(folder / "packed", decoded)
    return load(folder / "packed"), decoded


def stacks_of(model: Any) -> list[str]:
    """Returns the names of the stacks of experts of a model that transformers has loaded."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and ".experts." in name
    ]
