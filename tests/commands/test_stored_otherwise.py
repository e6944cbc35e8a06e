"""Weights that lie otherwise than their names and shapes suggest: read rightly, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import int8_vectorwise_dequant, quantize_4bit
from checkpoints import save_model
from integers import awq, gptq
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel
from transformers.integrations import fbgemm_fp8
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig

import nf4conv
from nf4conv.errors import SourceError

BF16 = torch.bfloat16
CPU = {"device": "cpu", "workers": 2, "buffer_size": 1}
FILE = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
FP8 = {"quant_method": "fp8", "format": "float8_e4m3fn", "weight_scale_method": "row"}


def write(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    description: dict[str, Any] | None,
    model_type: str = "llama",
    **more: Any,
) -> Path:
    config = {"model_type": model_type, "dtype": "bfloat16", **more}
    if description is not None:
        config["quantization_config"] = description
    return save_model(folder, tensors, config)


@pytest.mark.parametrize("inner", [64, 128])
def test_llama_4_experts_of_fbgemm(tmp_path: Path, inner: int, monkeypatch: pytest.MonkeyPatch):
    """transformers stores scales of down_proj as [expert, out, 1], which may fit both ways."""

    def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = rows.float().abs().amax(dim=1) / 448
        return (rows.float() / scale[:, None]).to(torch.float8_e4m3fn), scale

    monkeypatch.setattr(fbgemm_fp8, "quantize_fp8_per_row", quantize_rows, raising=False)
    with torch.device("meta"):
        config = Llama4TextConfig(hidden_size=64, intermediate_size=inner, num_local_experts=2)
        experts = fbgemm_fp8.FbgemmFp8Llama4TextExperts(config)
    stored, exact = {}, {}
    stem = "model.layers.0.feed_forward.experts"
    for name in ("gate_up_proj", "down_proj"):
        weight = torch.randn(getattr(experts, name).shape)
        made = fbgemm_fp8.FbgemmFp8Quantize(None).convert({name: [weight]}, model=experts)
        stored |= {f"{stem}.{key}": part.data.contiguous() for key, part in made.items()}
        exact[f"{stem}.{name}"] = weight
    description = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    source = write(tmp_path / "source", stored, description, model_type="llama4_text")
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    for name, decoded in load_file(tmp_path / "out/model.safetensors").items():
        assert decoded.shape == exact[name].shape
        error = (decoded.float() - exact[name]).abs() / exact[name].abs().amax(1, keepdim=True)
        assert error.max() < 0.04


def test_conv1d_in_8_bits(tmp_path: Path):
    """transformers quantizes the transpose of GPT-2's [in, out], which may be square."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    model = GPT2LMHeadModel(config).to(BF16)
    model.save_pretrained(tmp_path / "plain")
    wanted = BitsAndBytesConfig(load_in_8bit=True)
    packed = GPT2LMHeadModel.from_pretrained(
        tmp_path / "plain", quantization_config=wanted, device_map="cpu"
    )
    packed.save_pretrained(tmp_path / "source")
    nf4conv.dequantize(tmp_path / "source", tmp_path / "out", **CPU)
    stored = load_file(tmp_path / "source/model.safetensors")
    decoded = load_file(tmp_path / "out/model.safetensors")
    compared = 0
    for name, original in load_file(tmp_path / "plain/model.safetensors").items():
        scale = stored.get(f"{name.removesuffix('weight')}SCB")
        if scale is None:
            continue
        expected = int8_vectorwise_dequant(stored[name], scale).to(BF16).T
        assert torch.equal(decoded[name], expected)
        assert decoded[name].shape == original.shape
        compared += 1
    assert compared == 4
    report = nf4conv.verify(tmp_path / "out", source=tmp_path / "source", **CPU)
    assert report.identical, report.findings


def parts_of(weight: Any) -> dict[str, torch.Tensor]:
    return {f"{Q}.{name}": part for name, part in weight.parts.items()}


def fp8_of_gptqmodel() -> dict[str, torch.Tensor]:
    """TorchFP8Linear of GPTQModel 7.7.0: weight / weight_scale_inv."""
    return {
        f"{Q}.weight": torch.ones(64, 64).to(torch.float8_e4m3fn),
        f"{Q}.weight_scale_inv": torch.full((64,), 448.0),
    }


def of_mlx() -> dict[str, torch.Tensor]:
    return {
        f"{Q}.weight": torch.ones(64, 8, dtype=torch.uint32),
        f"{Q}.scales": torch.ones(64, 1).to(BF16),
        f"{Q}.biases": torch.ones(64, 1).to(BF16),
        "model.norm.weight": torch.ones(64).to(BF16),
    }


MLX = {"group_size": 64, "bits": 4}


@pytest.mark.parametrize(
    ("tensors", "description", "more", "message"),
    [
        (
            fp8_of_gptqmodel(),
            FP8 | {"weight_scale_semantics": "inverse"},
            {},
            "weight_scale_semantics of GPTQModel; give .*its scales divide",
        ),
        (parts_of(gptq(64, 64)), GPTQ | {"rotation": "hadamard"}, {}, "gptq, rotation; give"),
        (parts_of(awq(64, 64)), AWQ | {"rotation": "random"}, {}, "awq, rotation; give"),
        (of_mlx(), MLX, {"quantization": MLX}, "by MLX, to 4 bits; give"),
        (of_mlx(), None, {"quantization": MLX}, "by MLX, to 4 bits; give"),
    ],
)
def test_what_is_refused_by_its_config(
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    description: dict[str, Any] | None,
    more: dict[str, Any],
    message: str,
):
    source = write(tmp_path / "source", tensors, description, **more)
    with pytest.raises(SourceError, match=f"source: already quantized: .*{message}"):
        nf4conv.dequantize(source, tmp_path / "out", **CPU)


def nvfp4() -> dict[str, torch.Tensor]:
    return {
        f"{Q}.weight": torch.ones(128, 64).byte(),
        f"{Q}.weight_scale": torch.ones(128, 8).to(torch.float8_e4m3fn),
        f"{Q}.weight_scale_2": torch.tensor(0.02),
    }


def of_comfyui(kind: str) -> dict[str, torch.Tensor]:
    """FP8 with a scale under a name of its own; NVFP4 with scales in the order of a kernel."""
    if kind == "FP8":
        values = torch.ones(128, 128).to(torch.float8_e4m3fn)
        return {f"{Q}.weight": values, f"{Q}.scale_weight": torch.tensor(0.02)}
    described = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    return {**nvfp4(), f"{Q}.comfy_quant": described}


def of_quanto() -> dict[str, torch.Tensor]:
    return {
        f"{Q}.weight._data": torch.ones(64, 64).to(torch.float8_e4m3fn),
        f"{Q}.weight._scale": torch.ones(64, 1),
    }


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        (of_mlx(), "weight"),
        (of_comfyui("FP8"), "scale_weight"),
        (of_comfyui("NVFP4"), "comfy_quant"),
        (of_quanto(), "weight._scale"),
        ({f"{Q}.svdquant_lora_a": torch.ones(4, 64), **nvfp4()}, "svdquant_lora_a"),
    ],
)
def test_what_no_config_describes(tmp_path: Path, tensors: dict[str, torch.Tensor], name: str):
    source = write(tmp_path / "source", tensors, None)
    with pytest.raises(SourceError, match=f"{Q}.{name}: part of a weight that is already"):
        nf4conv.dequantize(source, tmp_path / "out", **CPU)


def test_integers_that_no_rule_knows(tmp_path: Path):
    """BitsAndBytesLinear of GPTQModel 7.7.0 names all that is beside a weight in its own way."""
    packed, state = quantize_4bit(torch.randn(64, 64))
    stored = {
        f"{Q}.weight": packed,
        f"{Q}.weight_absmax": state.absmax,
        f"{Q}.weight_quant_map": state.code,
        f"{Q}.weight_quant_state": torch.ones(9).byte(),
        "lm_head.weight": torch.ones(96, 64).to(BF16),
    }
    source = write(tmp_path / "source", stored, {"quant_method": "bitsandbytes", "format": "nf4"})
    with pytest.raises(SourceError, match=f"{Q}.weight: part of a weight whose scales are missing"):
        nf4conv.dequantize(source, tmp_path / "out", **CPU)


@pytest.mark.parametrize("desc_act", [True, False])
def test_columns_whose_order_is_lost(tmp_path: Path, desc_act: bool):
    weight = gptq(64, 64, is_reordered=desc_act)
    del weight.parts["g_idx"]
    source = write(tmp_path / "source", parts_of(weight), GPTQ | {"desc_act": desc_act})
    if not desc_act:
        nf4conv.dequantize(source, tmp_path / "out", **CPU)
        assert torch.equal(load_file(tmp_path / "out" / FILE)[f"{Q}.weight"], weight.decoded)
        return
    with pytest.raises(SourceError, match=f"{Q}.qweight: lacks its g_idx, and desc_act"):
        nf4conv.dequantize(source, tmp_path / "out", **CPU)
