"""Weights that lie otherwise than their names and shapes suggest: read rightly, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from checkpoints import save_model
from integers import awq, gptq
from safetensors.torch import load_file

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
            "weight_scale_semantics",
        ),
        (parts_of(gptq(64, 64)), GPTQ | {"rotation": "hadamard"}, {}, "gptq, rotation"),
        (parts_of(awq(64, 64)), AWQ | {"rotation": "random"}, {}, "awq, rotation"),
        (of_mlx(), MLX, {"quantization": MLX}, "by MLX"),
        (of_mlx(), None, {"quantization": MLX}, "by MLX"),
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
    with pytest.raises(SourceError, match=f"source: already quantized: .*{message}, which nf4conv"):
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
    with pytest.raises(SourceError, match=f"{Q}.weight: part of a weight that is already"):
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
    with pytest.raises(SourceError, match=f"{Q}.qweight: lacks its g_idx"):
        nf4conv.dequantize(source, tmp_path / "out", **CPU)
