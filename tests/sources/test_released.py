"""Releases in 8 and 4 bits decode to the bytes, and to the models, that others' code makes of them.

First every code and the edges of every scale: golden/decoded/ has what the formats' own
libraries and scripts decode. Then whole models, which transformers loads from the release and from
what nf4conv decoded.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from checkpoints import save_model, tensors_of
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
    PreTrainedModel,
)

import nf4conv
from nf4conv.errors import Nf4convError
from nf4conv.options import Fp8Scales

GOLDEN = Path(__file__).parents[1] / "golden/decoded"
CPU = {"device": "cpu"}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Tensors = dict[str, torch.Tensor]


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    return save_model(folder, tensors, config)


def differing(actual: Tensors, expected: Tensors) -> list[str]:
    """Returns the names of tensors whose bytes differ; one NaN is as good as another."""
    assert actual.keys() == expected.keys()
    names = []
    for name, tensor in expected.items():
        found, bits = actual[name], BITS[tensor.element_size()]
        if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
            names.append(name)
            continue
        nan = torch.isnan(found) & torch.isnan(tensor)
        if not bool((nan | (found.view(bits) == tensor.view(bits))).all()):
            names.append(name)
    return names


# --- every code and every edge --------------------------------------------------------------------


RELEASES = sorted(file.stem for file in GOLDEN.glob("*.safetensors"))


def recorded(release: str, folder: Path) -> tuple[Path, Tensors, Tensors]:
    """Writes a recorded checkpoint.

    Returns:
        Its folder; the tensors that it keeps as they are; what its other ones decode to.
    """
    kinds: dict[str, Tensors] = {"kept": {}, "stored": {}, "decoded": {}}
    with safe_open(GOLDEN / f"{release}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["config"])
        for key in sorted(file.keys()):
            kind, _, name = key.partition(" ")
            kinds[kind][name] = file.get_tensor(key)
    kept, stored, decoded = kinds.values()
    return write(folder / "source", config, kept | stored), kept, decoded


def in_dtype(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


@pytest.mark.parametrize("release", RELEASES)
def test_every_code_and_edge(tmp_path: Path, release: str):
    source, kept, decoded = recorded(release, tmp_path)
    config = json.loads((source / "config.json").read_text())
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    expected = kept | in_dtype(decoded, getattr(torch, config["dtype"]))
    assert differing(tensors_of(tmp_path / "out"), expected) == []


@pytest.mark.parametrize("release", RELEASES)
def test_float32_is_the_product_before_it_is_rounded(tmp_path: Path, release: str):
    source, kept, decoded = recorded(release, tmp_path)
    options = {"dtype": "float32"}
    nf4conv.dequantize(source, tmp_path / "out", **options, **CPU)
    found = tensors_of(tmp_path / "out")
    rounded = {name: found[name].to(tensor.dtype) for name, tensor in decoded.items()}
    assert differing(rounded, decoded) == []
    assert differing({name: found[name] for name in kept}, in_dtype(kept, torch.float32)) == []
    if release in ("deepseek_v4_by_script", "deepseek_v41", "gpt_oss", "kimi_k3"):
        return  # bfloat16 holds these products
    in_16_bits = in_dtype(in_dtype(found, torch.bfloat16), torch.float32)
    assert set(differing(in_16_bits, found)) & decoded.keys()


@pytest.mark.parametrize("release", RELEASES)
def test_float16_refuses_what_is_too_large_for_it(tmp_path: Path, release: str):
    source, _, decoded = recorded(release, tmp_path)
    too_large = {
        name
        for name, tensor in decoded.items()
        if bool((tensor.isfinite() & tensor.half().isinf()).any())
    }
    options = {"dtype": "float16"}
    if not too_large:
        nf4conv.dequantize(source, tmp_path / "out", **options, **CPU)
        return
    with pytest.raises(Nf4convError, match="has values too large for float16") as raised:
        nf4conv.dequantize(source, tmp_path / "out", **options, **CPU)
    assert any(f"{name}: " in str(raised.value) for name in too_large)


# --- whole models ---------------------------------------------------------------------------------


def random(*shape: int, high: int) -> torch.Tensor:
    return torch.randint(high, shape, dtype=torch.uint8)


def finite_fp8(*shape: int) -> torch.Tensor:
    """E4M3 of all codes but NaN."""
    codes = random(*shape, high=254)
    return (codes + (codes > 126).byte()).view(torch.float8_e4m3fn)


def fp8_blocks(rows: int, columns: int) -> Tensors:
    grid = -(-rows // 128), -(-columns // 128)
    return {".weight": finite_fp8(rows, columns), ".weight_scale_inv": torch.rand(grid) * 1e-3}


def fp8_blocks_of_v4(rows: int, columns: int) -> Tensors:
    grid = -(-rows // 128), -(-columns // 128)
    scale = (random(*grid, high=4) + 115).view(torch.float8_e8m0fnu)
    return {".weight": finite_fp8(rows, columns), ".scale": scale}


def fp4_of_v4(rows: int, columns: int) -> Tensors:
    values = random(rows, columns // 2, high=256).view(torch.int8)
    scale = random(rows, columns // 32, high=8) + 118
    return {".weight": values, ".scale": scale.view(torch.float8_e8m0fnu)}


def int4_of_kimi(rows: int, columns: int) -> Tensors:
    return {
        ".weight_packed": random(rows, columns // 2, high=256).view(torch.int32),
        ".weight_scale": (torch.rand(rows, columns // 32) * 0.02).bfloat16(),
        ".weight_shape": torch.tensor([rows, columns], dtype=torch.int32),
    }


def fp8_rows(rows: int, columns: int) -> Tensors:
    scale = (torch.rand(rows, 1) * 1e-3).bfloat16()
    return {".weight": finite_fp8(rows, columns), ".weight_scale": scale}


def nvfp4_of_modelopt(rows: int, columns: int) -> Tensors:
    return {
        ".weight": random(rows, columns // 2, high=256),
        ".weight_scale": finite_fp8(rows, columns // 16).abs(),
        ".weight_scale_2": torch.tensor(1e-4),
        ".input_scale": torch.tensor(1.0),
    }


def mxfp4_of_gpt_oss(experts: int, columns: int, rows: int) -> Tensors:
    return {
        "_blocks": random(experts, rows, columns // 32, 16, high=256),
        "_scales": random(experts, rows, columns // 32, high=8) + 118,
    }


class Model(NamedTuple):
    """A small model as it is released.

    Attributes:
        architecture: its class in transformers.
        config: what is small in it.
        names: (pattern, replacement) from names that transformers 5.24 saves to those released.
        in_float32: a pattern of tensors that the release keeps in float32.
        encoders: how weights are stored, by a pattern of their names.
        more: tensors that the model's class does not load.
        quantization: quantization_config.
        decodes: makes transformers decode the release; None if it cannot.
    """

    architecture: str
    config: dict[str, Any]
    names: tuple[tuple[str, str], ...]
    in_float32: str
    encoders: dict[str, Callable[..., Tensors]]
    more: tuple[str, ...]
    quantization: dict[str, Any]
    decodes: Callable[..., Any] | None


SMALL = {
    "vocab_size": 64, "hidden_size": 128, "moe_intermediate_size": 128, "n_routed_experts": 2,
    "num_experts_per_tok": 1, "max_position_embeddings": 64, "q_lora_rank": 128,
    "num_attention_heads": 4, "index_n_heads": 2, "index_head_dim": 64, "index_topk": 8,
}  # fmt: skip
LATENT = {
    "intermediate_size": 128, "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "v_head_dim": 32, "num_key_value_heads": 4,
}  # fmt: skip
LLAMA = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS |= {"weight_block_size": [128, 128]}


def compressed(form: str, ignore: list[str], **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"weights": weights}},
        "ignore": ignore,
    }


MODELS = {
    "Kimi K2.6": Model(
        architecture="Kimi_K25ForConditionalGeneration",
        config={
            "text_config": SMALL | LATENT | {"model_type": "deepseek_v3"},
            "vision_config": {
                "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                "intermediate_size": 64, "pos_emb_height": 4, "pos_emb_width": 4,
            },
            "projection_hidden_size": 64, "image_token_id": 60, "video_token_id": 61,
            "vision_start_token_id": 62, "vision_end_token_id": 63, "tie_word_embeddings": False,
        },
        names=((r"^language_model\.model\.blocks\.", "language_model.model.layers."),),
        in_float32=r"e_score_correction_bias$",
        encoders={r"\.mlp\.experts\.": int4_of_kimi},
        more=(),
        quantization=compressed(
            "pack-quantized",
            ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*", "re:vision_tower.*",
             r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:mm_projector.*"],
            num_bits=4, type="int", strategy="group", group_size=32, symmetric=True,
        ),
        decodes=CompressedTensorsConfig,
    ),
    "DeepSeek-V4": Model(
        architecture="DeepseekV4ForCausalLM",
        config=SMALL | {
            "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 64,
            "qk_rope_head_dim": 32, "o_groups": 2, "o_lora_rank": 64, "sliding_window": 16,
            "compress_ratios": [0, 4, 128], "num_hash_layers": 1, "expert_dtype": "fp4",
        },
        names=(
            (r"^model\.", ""), (r"^embed_tokens\.", "embed."), (r"^hc_head\.hc_", "hc_head_"),
            (r"\.attn\.norm\.", ".attn.kv_norm."),
        ),
        in_float32=r"(hc_.*|attn_sink|\.ape|gate\.bias)$",
        encoders={
            r"\.ffn\.experts\.": fp4_of_v4,
            r"\.(wq_a|wq_b|wo_a|wo_b|attn\.wkv)\.weight$|shared_experts": fp8_blocks_of_v4,
        },
        more=("mtp.0.attn.wq_a.weight", "mtp.0.ffn.gate.weight", "mtp.0.enorm.weight"),
        quantization=BLOCKS | {"scale_fmt": "ue8m0"},
        decodes=FineGrainedFP8Config,
    ),
    "DeepSeek-V3.2": Model(
        architecture="DeepseekV32ForCausalLM",
        config=SMALL | LATENT,
        names=(),
        in_float32=r"e_score_correction_bias$|k_norm",
        encoders={r"_proj(_with_mqa)?\.weight$|indexer\.w(k|q_b)\.": fp8_blocks},
        more=("model.layers.61.self_attn.q_a_proj.weight", "model.layers.61.enorm.weight"),
        quantization=BLOCKS,
        decodes=FineGrainedFP8Config,
    ),
    "gpt-oss": Model(
        architecture="GptOssForCausalLM",
        config={
            "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_local_experts": 2, "num_experts_per_tok": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 16,
        },
        names=(),
        in_float32="^$",
        encoders={r"experts\.(gate_up|down)_proj$": mxfp4_of_gpt_oss},
        more=(),
        quantization={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                       "model.embed_tokens", "lm_head"],
        },
        decodes=Mxfp4Config,
    ),
    "Llama in FP8": Model(
        architecture="LlamaForCausalLM",
        config=LLAMA,
        names=(),
        in_float32="^$",
        encoders={r"_proj\.weight$": fp8_rows},
        more=(),
        quantization=compressed(
            "float-quantized", ["lm_head"], num_bits=8, type="float", strategy="channel",
            symmetric=True,
        ),
        decodes=CompressedTensorsConfig,
    ),
    "Llama in NVFP4": Model(
        architecture="LlamaForCausalLM",
        config=LLAMA,
        names=(),
        in_float32="^$",
        encoders={r"_proj\.weight$": nvfp4_of_modelopt},
        more=(),
        quantization={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        decodes=None,
    ),
}  # fmt: skip


def released(model: Model, folder: Path) -> tuple[Path, Tensors]:
    """Writes a model with random weights as a release stores it.

    Returns:
        Its folder; the tensors that it keeps as they are.
    """
    kind = getattr(transformers, model.architecture)
    torch.manual_seed(0)
    config = kind.config_class(**model.config)
    kind(config).bfloat16().save_pretrained(folder / "plain")
    plain = load_file(folder / "plain/model.safetensors")
    for name in model.more:
        plain[name] = torch.randn(128, 128).bfloat16()
    stored: Tensors = {}
    kept: Tensors = {}
    for name, tensor in plain.items():
        for pattern, replacement in model.names:
            name = re.sub(pattern, replacement, name)
        for pattern, encode in model.encoders.items():
            if re.search(pattern, name):
                parts = encode(*tensor.shape)
                module = name.removesuffix(".weight")
                stored |= {f"{module}{suffix}": part for suffix, part in parts.items()}
                break
        else:
            kept[name] = tensor.float() if re.search(model.in_float32, name) else tensor
    written = json.loads((folder / "plain/config.json").read_text()) | {
        key: value for key, value in model.config.items() if key == "expert_dtype"
    }
    written.get("text_config", written)["quantization_config"] = model.quantization
    return write(folder / "source", written, stored | kept), kept


def loaded(model: Model, folder: Path, **options: Any) -> tuple[PreTrainedModel, torch.Tensor]:
    """Loads a model in its own class; nothing may be missing.

    Returns:
        The model; its logits.
    """
    kind = getattr(transformers, model.architecture)
    loaded, info = kind.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **options
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all(key.startswith(("mtp.", "model.layers.61.")) for key in info["unexpected_keys"])
    with torch.no_grad():
        return loaded, loaded(torch.arange(32).view(2, 16)).logits


@pytest.mark.parametrize("name", MODELS)
def test_models_are_those_that_transformers_decodes(tmp_path: Path, name: str):
    model = MODELS[name]
    source, kept = released(model, tmp_path)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    found = tensors_of(tmp_path / "out")
    assert differing({name: found[name] for name in kept}, kept) == []
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config | config.get("text_config", {})
    assert "expert_dtype" not in config
    ours, logits = loaded(model, tmp_path / "out")
    assert bool(logits.isfinite().all())
    if model.decodes is None:
        return
    reference = model.decodes(**model.quantization | {"dequantize": True})
    theirs, expected = loaded(model, source, quantization_config=reference)
    assert differing(ours.state_dict(), theirs.state_dict()) == []
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("scales", ["e8m0", "float32"])
def test_deepseek_v4_in_fp8_is_the_same_model(tmp_path: Path, scales: Fp8Scales):
    """transformers decodes FP8 experts to what nf4conv decodes MXFP4 ones to."""
    model = MODELS["DeepSeek-V4"]
    source, _ = released(model, tmp_path)
    nf4conv.dequantize(source, tmp_path / "decoded", **CPU)
    options = {"dtype": "fp8", "fp8_scales": scales}
    nf4conv.dequantize(source, tmp_path / "out", **options, **CPU)
    config = json.loads((tmp_path / "out/config.json").read_text())
    description = config["quantization_config"] | {"dequantize": True}
    reference = FineGrainedFP8Config(**description, expert_dtype=config["expert_dtype"])
    ours, logits = loaded(model, tmp_path / "decoded")
    theirs, expected = loaded(model, tmp_path / "out", quantization_config=reference)
    assert differing(ours.state_dict(), theirs.state_dict()) == []
    assert torch.equal(logits, expected)
