"""Experts that a source stores in 8 or 4 bits, packed by both engines."""

import json
import math
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same_tensors, tensors_of
from test_two_engines import (
    BARE,
    GENERATOR,
    KINDS,
    MIXED,
    by_torch,
    gpu,  # noqa: F401  the driver is played for each test
    same,
    without_torch,
    write,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import nf4conv

EXPERTS = "model.layers.0.mlp.experts"
PACKED = {"moe": "packed"}
Tensors = dict[str, torch.Tensor]


def random_bytes(*shape: int, high: int = 256) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=GENERATOR)


def source(folder: Path, model_type: str, tensors: Tensors, quantization=None) -> Path:
    q_proj = {"model.layers.0.self_attn.q_proj.weight": torch.ones(64, 64, dtype=torch.float16)}
    write(folder, tensors | q_proj, quantization)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    return folder


def mxfp4() -> tuple[Tensors, Tensors]:
    """Returns the experts of gpt-oss as they are stored, and decoded to [experts, in, out]."""
    stored, decoded = {}, {}
    for name, shape in {"gate_up_proj": (3, 192, 2), "down_proj": (3, 64, 3)}.items():
        blocks = random_bytes(*shape, 16)
        scales = random_bytes(*shape, high=8) + 120
        stored[f"{EXPERTS}.{name}_blocks"] = blocks
        stored[f"{EXPERTS}.{name}_scales"] = scales
        # its values are exact in float16
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        decoded[f"{EXPERTS}.{name}"] = values.half()
    return stored, decoded


def assert_same_experts(one: Path, other: Path):
    assert_same_tensors(one, other)
    assert f"{EXPERTS}.2.up_proj.weight.absmax" in tensors_of(one)


def test_experts_of_gpt_oss_in_mxfp4(tmp_path: Path):
    stored, decoded = mxfp4()
    encoded = source(tmp_path / "encoded", "gpt_oss", stored, {"quant_method": "mxfp4"})
    plain = source(tmp_path / "plain", "gpt_oss", decoded)
    by_torch(nf4conv.quantize, encoded, tmp_path / "torch", **PACKED)
    by_torch(nf4conv.quantize, plain, tmp_path / "expected", **PACKED)
    assert_same_experts(tmp_path / "torch", tmp_path / "expected")
    nf4conv.quantize(encoded, tmp_path / "bare", **PACKED, **MIXED)
    same(tmp_path / "bare", tmp_path / "torch")


@pytest.mark.parametrize("model_type", ["mistral4", "aria", "gpt_oss", "inkling2"])
def test_both_engines_cut_the_same_experts_out_of_stacks(tmp_path: Path, model_type: str):
    """Concatenated and interleaved, [out, in] and [in, out]."""
    names = {
        "mistral4": ("gate_up_proj", "down_proj"),
        "aria": ("fc1.weight", "fc2.weight"),
        "gpt_oss": ("gate_up_proj", "down_proj"),
        "inkling2": ("w13_weight", "w2_weight"),
    }
    both = torch.randn(3, 192, 65, generator=GENERATOR).half()
    down = torch.randn(3, 65, 96, generator=GENERATOR).half()
    if model_type in ("aria", "gpt_oss"):
        both, down = both.transpose(1, 2), down.transpose(1, 2)
    first, second = names[model_type]
    tensors = {f"{EXPERTS}.{first}": both, f"{EXPERTS}.{second}": down}
    stacked = source(tmp_path / "stacked", model_type, tensors)
    by_torch(nf4conv.quantize, stacked, tmp_path / "torch", **PACKED)
    nf4conv.quantize(stacked, tmp_path / "bare", **PACKED, **MIXED)
    same(tmp_path / "bare", tmp_path / "torch")
    assert f"{EXPERTS}.2.up_proj.weight.absmax" in tensors_of(tmp_path / "torch")


@pytest.mark.parametrize("inner", [96, 128], ids=["blocks that two share", "blocks of one"])
def test_stacks_in_fp8(tmp_path: Path, inner: int, monkeypatch: pytest.MonkeyPatch):
    """A scale for each 128 × 128 values. With 96 rows each, gate and up share one."""
    stored, decoded = {}, {}
    for name, rows, columns in (("gate_up_proj", 2 * inner, 65), ("down_proj", 65, inner)):
        blocks = (3, math.ceil(rows / 128), math.ceil(columns / 128))
        values = random_bytes(3, rows, columns, high=120).view(torch.float8_e4m3fn)
        scale = torch.rand(blocks, generator=GENERATOR).half().float()
        stored[f"{EXPERTS}.{name}"] = values
        stored[f"{EXPERTS}.{name}_scale_inv"] = scale
        spread = scale.repeat_interleave(128, 1)[:, :rows]
        spread = spread.repeat_interleave(128, 2)[:, :, :columns]
        decoded[f"{EXPERTS}.{name}"] = (values.float() * spread).half()
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    encoded = source(tmp_path / "encoded", "mistral4", stored, quantization)
    plain = source(tmp_path / "plain", "mistral4", decoded)
    by_torch(nf4conv.quantize, encoded, tmp_path / "torch", **PACKED)
    by_torch(nf4conv.quantize, plain, tmp_path / "expected", **PACKED)
    assert_same_experts(tmp_path / "torch", tmp_path / "expected")
    if inner == 128:
        without_torch(monkeypatch)
    run = BARE if inner == 128 else MIXED
    nf4conv.quantize(encoded, tmp_path / "bare", **PACKED, **run)
    same(tmp_path / "bare", tmp_path / "torch")


def test_single_experts_in_nvfp4(tmp_path: Path):
    description, parts = KINDS["modelopt"]
    stored = {}
    for expert in range(2):
        for name, shape in {
            "gate_proj": (96, 64),
            "up_proj": (96, 64),
            "down_proj": (64, 96),
        }.items():
            for suffix, part in parts(*shape).items():
                stored[f"{EXPERTS}.{expert}.{name}.{suffix}"] = part
    encoded = source(tmp_path / "encoded", "qwen3_moe", stored, description)
    by_torch(nf4conv.quantize, encoded, tmp_path / "torch", **PACKED)
    found = tensors_of(tmp_path / "torch")
    packed = [name for name in found if name.endswith("_proj.weight.absmax") and EXPERTS in name]
    assert len(packed) == 6
    nf4conv.quantize(encoded, tmp_path / "bare", **PACKED, **MIXED)
    same(tmp_path / "bare", tmp_path / "torch")
