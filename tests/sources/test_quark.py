"""What is refused of AMD's Quark; test_released.py compares what is read with Quark itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from integers import random_codes
from safetensors.torch import save_file

import nf4conv
from nf4conv.errors import SourceError

CPU = {"device": "cpu", "workers": 1}
FILE = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj"
BF16 = torch.bfloat16
FP4 = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32}
INT4 = {"dtype": "int4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}


def write(folder: Path, weight: Any, parts: dict[str, torch.Tensor], **more: Any) -> Path:
    folder.mkdir()
    description = {"quant_method": "quark", "global_quant_config": {"weight": weight}, **more}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config["quantization_config"] = description
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"{Q}.{name}": part.contiguous() for name, part in parts.items()}, folder / FILE)
    return folder


def mxfp4() -> dict[str, torch.Tensor]:
    return {
        "weight": random_codes(128, 64, bits=8).to(torch.uint8),
        "weight_scale": (random_codes(128, 4, bits=4) + 115).to(torch.uint8),
    }


@pytest.mark.parametrize(
    ("weight", "more", "message"),
    [
        ({"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0}, {}, "int4 per_channel"),
        ({"dtype": "int8", "qscheme": "per_group"}, {}, "weights in int8 per_group"),
        ({"dtype": "uint8", "qscheme": "per_group"}, {}, "weights in uint8 per_group"),
        ({"dtype": "fp6_e2m3", "qscheme": "per_group"}, {}, "weights in fp6_e2m3 per_group"),
        (FP8 | {"qscheme": "per_channel", "ch_axis": 1}, {}, "weights in fp8_e4m3 per_channel"),
        (INT4 | {"ch_axis": 0}, {}, "weights in int4 per_group"),
        ([FP8, {"dtype": "int4", "qscheme": "per_channel"}], {}, "weights in int4 per_channel"),
        (INT4, {}, "weights in int4 per_group"),
        (FP8, {"export": {"weight_format": "fake_quantized"}}, "fake_quantized"),
        (FP4 | {"scale_format": "e5m3"}, {}, "scale_format 'e5m3'"),
        (FP4, {"algo_config": [{"name": "rotation", "r1": True}]}, "rotation"),
        (FP4, {"algo_config": {"name": "quarot"}}, "quarot"),
    ],
)
def test_what_is_refused_by_name(tmp_path: Path, weight: Any, more: dict[str, Any], message: str):
    source = write(tmp_path / "source", weight, mxfp4(), **more)
    with pytest.raises(SourceError, match=f"quant_method quark, .*{message}") as error:
        nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight_scale": torch.ones(128, 4).byte()[:, :3]},
            "weight: U8 .* go with .*weight_scale",
        ),
        ({"weight_scale": None}, "weight: part of a weight"),
        ({"weight": torch.ones(128, 64).int()}, "weight_?[a-z]*: part of a weight"),
        ({"input_rotation": torch.ones(2, 2)}, "input_rotation: part of a weight"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str):
    parts = mxfp4()
    for name, part in changes.items():
        parts.pop(name, None)
        if part is not None:
            parts[name] = part
    source = write(tmp_path / "source", FP4, parts)
    with pytest.raises(SourceError, match=f"{Q}.({message})") as error:
        nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert "\n" not in str(error.value)
