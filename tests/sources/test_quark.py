"""Checkpoints of AMD's Quark as sources: FP8, INT8 and MXFP4.

Quark 0.13 itself was run once (docs/sources.md). What it computes is restated here, from
quark/torch/kernel/hw_emulation/hw_emulation_interface.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import compared
from integers import random_codes, random_scales
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv.errors import SourceError

CPU = {"device": "cpu", "workers": 1}
FILE = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj"
BF16 = torch.bfloat16
FP4 = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32}
INT4 = {"dtype": "int4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}


def write(
    folder: Path, weight: Any, parts: dict[str, torch.Tensor], **more: Any
) -> tuple[Path, dict[str, Any]]:
    folder.mkdir()
    description = {"quant_method": "quark", "global_quant_config": {"weight": weight}, **more}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config["quantization_config"] = description
    (folder / "config.json").write_text(json.dumps(config))
    stored = {f"{Q}.{name}": part.contiguous() for name, part in parts.items()}
    stored["model.layers.0.self_attn.k_scale"] = torch.ones(())
    save_file(stored, folder / FILE)
    return folder, config


def floats() -> torch.Tensor:
    return random_codes(128, 64, bits=8).to(torch.uint8).clamp(max=126).view(torch.float8_e4m3fn)


def int8(*shape: int) -> torch.Tensor:
    return (random_codes(*shape, bits=8) - 128).to(torch.int8)


def mxfp4() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Words and scales; what Pack_fp4.unpack and a scale in E8M0 make of them."""
    pairs = random_codes(128, 64, bits=8).to(torch.uint8)
    scale = (random_codes(128, 4, bits=4) + 115).to(torch.uint8)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1).long()
    factors = 2.0 ** (scale.to(torch.float32) - 127)
    return {"weight": pairs, "weight_scale": scale}, values[codes] * factors.repeat_interleave(
        32, 1
    )


def kinds() -> dict[str, tuple[Any, dict[str, torch.Tensor], torch.Tensor]]:
    """What the config says, what is stored, and what it stands for in float32."""
    one = torch.tensor(0.0123).to(BF16)
    rows = random_scales(128, dtype=BF16)
    blocks = random_scales(2, 1, dtype=torch.float32)
    values, bytes8, zeros = floats(), int8(128, 64), int8(128)
    whole = torch.tensor(3, dtype=torch.int8)
    parts, decoded = mxfp4()
    row_scale = rows.float()[:, None]
    of_blocks = blocks.repeat_interleave(64, 0)
    block_size = {"block_size": [64, 64]}
    return {
        "FP8": (FP8, {"weight": values, "weight_scale": one}, values.float() * one.float()),
        "FP8 of rows": (
            FP8 | {"qscheme": "per_channel", "ch_axis": 0},
            {"weight": values, "weight_scale": rows},
            values.float() * row_scale,
        ),
        "FP8 of blocks": (
            FP8 | {"qscheme": "per_block"} | block_size,
            {"weight": values, "weight_scale": blocks},
            values.float() * of_blocks,
        ),
        "INT8": (
            {"dtype": "int8", "qscheme": "per_tensor"},
            {"weight": bytes8, "weight_scale": one.float(), "weight_zero_point": whole},
            (bytes8.float() - 3) * one.float(),
        ),
        "INT8 of rows": (
            {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0},
            {"weight": bytes8, "weight_scale": rows, "weight_zero_point": zeros},
            (bytes8.float() - zeros.float()[:, None]) * row_scale,
        ),
        "MXFP4": (FP4 | {"scale_format": "e8m0"}, parts, decoded),
    }


@pytest.mark.parametrize("kind", kinds())
def test_quark(tmp_path: Path, kind: str):
    weight, parts, decoded = kinds()[kind]
    source, config = write(tmp_path / "source", weight, parts)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    [(name, found)] = load_file(tmp_path / "out" / FILE).items()
    assert name == f"{Q}.weight"
    assert torch.equal(found, decoded.to(BF16))
    del config["quantization_config"]
    assert json.loads((tmp_path / "out/config.json").read_text()).items() >= config.items()
    for folder in (source, tmp_path / "out"):
        nf4conv.quantize(folder, tmp_path / f"{folder.name}-nf4", **CPU)
    of_it = load_file(tmp_path / "source-nf4" / FILE)
    for name, packed in load_file(tmp_path / "out-nf4" / FILE).items():
        assert torch.equal(packed, of_it[name])
    assert [*compared(source, tmp_path / "out").statuses.values()] == ["equal in value"]


@pytest.mark.parametrize(
    ("weight", "more", "message"),
    [
        ({"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0}, {}, "int4 per_channel"),
        ({"dtype": "int8", "qscheme": "per_group"}, {}, "weights in int8 per_group; give"),
        ({"dtype": "uint8", "qscheme": "per_group"}, {}, "weights in uint8 per_group; give"),
        ({"dtype": "fp6_e2m3", "qscheme": "per_group"}, {}, "weights in fp6_e2m3 per_group"),
        (FP8 | {"qscheme": "per_channel", "ch_axis": 1}, {}, "weights in fp8_e4m3 per_channel"),
        (INT4 | {"ch_axis": 0}, {}, "weights in int4 per_group"),
        ([FP8, {"dtype": "int4", "qscheme": "per_channel"}], {}, "weights of two stages"),
        (INT4, {}, "weights in int4 per_group"),
        (FP8, {"export": {"weight_format": "fake_quantized"}}, "weight_format 'fake_quantized'"),
        (FP4 | {"scale_format": "e5m3"}, {}, "scale_format 'e5m3'"),
        (FP4, {"algo_config": [{"name": "rotation", "r1": True}]}, "its weights are rotated"),
        (FP4, {"algo_config": {"name": "quarot"}}, "its weights are rotated"),
    ],
)
def test_what_is_refused_by_name(tmp_path: Path, weight: Any, more: dict[str, Any], message: str):
    source, _ = write(tmp_path / "source", weight, mxfp4()[0], **more)
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
    parts = mxfp4()[0]
    for name, part in changes.items():
        parts.pop(name, None)
        if part is not None:
            parts[name] = part
    source, _ = write(tmp_path / "source", FP4, parts)
    with pytest.raises(SourceError, match=f"{Q}.({message})") as error:
        nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert "\n" not in str(error.value)
