"""Bytes with scales and zero points as sources: compressed-tensors' int-quantized, and torchao."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_model
from comparing import compared
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from integers import random_codes, random_scales, torchao
from safetensors.torch import load_file

import nf4conv
from nf4conv.errors import SourceError

CPU = {"device": "cpu", "workers": 2, "buffer_size": 1}
FILE = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj"
INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized"}
INT8_OF_TORCHAO = {"_type": "Int8WeightOnlyConfig", "_data": {"group_size": 32}}
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": INT8_OF_TORCHAO}}


def write(folder: Path, description: dict[str, Any], parts: dict[str, torch.Tensor]) -> Path:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config["quantization_config"] = description
    return save_model(folder, parts, config)


def random_bytes(*shape: int) -> torch.Tensor:
    return (random_codes(*shape, bits=8) - 128).to(torch.int8)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("rows", [96, 3000])
def test_int_quantized_with_zero_points(tmp_path: Path, strategy: str, rows: int):
    """3000 rows take several pieces of a buffer of 1 MB."""
    shape = {"tensor": (1,), "channel": (rows, 1), "group": (rows, 8)}[strategy]
    state = {
        "weight": random_bytes(rows, 512),
        "weight_scale": random_scales(*shape, dtype=torch.bfloat16),
        "weight_zero_point": random_bytes(*shape),
    }
    arguments: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": False}
    arguments |= {"strategy": strategy, "group_size": 64 if strategy == "group" else None}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    expected = NaiveQuantizationCompressor.decompress(dict(state), scheme)["weight"]
    description = INT8 | {"config_groups": {"all": {"weights": arguments}}}
    parts = {f"{Q}.{name}": part for name, part in state.items()}
    source = write(tmp_path / "source", description, parts)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    [(name, decoded)] = load_file(tmp_path / "out" / FILE).items()
    assert name == f"{Q}.weight"
    assert torch.equal(decoded, expected)
    nf4conv.quantize(source, tmp_path / "nf4", **CPU)
    nf4conv.quantize(tmp_path / "out", tmp_path / "nf4 of it", **CPU)
    for name, packed in load_file(tmp_path / "nf4 of it" / FILE).items():
        assert torch.equal(packed, load_file(tmp_path / "nf4" / FILE)[name])
    assert [*compared(source, tmp_path / "out").statuses.values()] == ["equal in value"]


def test_what_belongs_to_activations_is_left_out(tmp_path: Path):
    """Scales and zero points of a cache of keys and values, and of activations, in INT8."""
    parts = {f"{Q}.weight": random_bytes(64, 64), f"{Q}.weight_scale": torch.ones(64, 1).bfloat16()}
    of_activations = {f"{Q}.input_scale", f"{Q}.input_zero_point"}
    for letter in "qkv":
        for field in ("scale", "zero_point", "global_scale"):
            of_activations.add(f"model.layers.0.self_attn.{letter}_{field}")
    more = dict.fromkeys(of_activations, torch.ones(1))
    cache = {"num_bits": 8, "type": "int", "symmetric": False}
    description = INT8 | {"format": "mixed-precision", "kv_cache_scheme": cache}
    source = write(
        tmp_path / "source", description, parts | {name: one.clone() for name, one in more.items()}
    )
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert set(load_file(tmp_path / "out" / FILE)) == {f"{Q}.weight"}


def of_int4(fields: dict[str, Any]) -> dict[str, Any]:
    """A config of torchao that says how integers of 4 bits lie."""
    return TORCHAO | {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": fields}}}


def of_torchao(groups: int, scale_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What flatten_tensor_state_dict of torchao 0.18 makes of a weight.

    It is in torchao/prototype/safetensors/safetensors_support.py.
    """
    return {
        f"{Q}._weight_qdata": random_bytes(128, 256),
        f"{Q}._weight_scale": random_scales(128, groups, dtype=scale_dtype),
        f"{Q}._weight_zero_point": random_bytes(128, groups),
    }


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_integers_of_torchao(tmp_path: Path, groups: int, scale_dtype: torch.dtype):
    parts = of_torchao(groups, scale_dtype)
    source = write(tmp_path / "source", TORCHAO, parts)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    # dequantize_affine of torchao/quantization/quant_primitives.py, in the dtype of the config
    values, scale, zero = (
        part.repeat_interleave(256 // part.shape[1], 1) for part in parts.values()
    )
    expected = (values.int() - zero.int()).to(torch.bfloat16)
    expected *= scale
    [(name, decoded)] = load_file(tmp_path / "out" / FILE).items()
    assert name == f"{Q}.weight"
    assert torch.equal(decoded, expected)


def test_experts_and_layers_of_torchao_that_differ(tmp_path: Path):
    """Int8Tensor and Int4Tensor in one checkpoint, as FqnToConfig describes them."""
    int4 = torchao(64, 128, group_size=64)
    parts = of_torchao(8, torch.bfloat16)
    other = Q.replace("q_proj", "k_proj")
    parts |= {f"{other}.{name}": part for name, part in int4.parts.items()}
    int4_config = {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 64}}
    both = {"re:.*k_proj": int4_config, "_default": INT8_OF_TORCHAO}
    fqn = {"_type": "FqnToConfig", "_data": {"fqn_to_config": both}}
    source = write(tmp_path / "source", TORCHAO | {"quant_type": fqn}, parts)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    decoded = load_file(tmp_path / "out" / FILE)
    assert decoded[f"{Q}.weight"].shape == (128, 256)
    assert torch.equal(decoded[f"{other}.weight"], int4.decoded)


def test_floats_of_torchao(tmp_path: Path):
    values = torch.randn(64, 64).to(torch.float8_e4m3fn)
    scale = random_scales(64, 1, dtype=torch.float32)
    parts = {f"{Q}._weight_qdata": values, f"{Q}._weight_scale": scale}
    description = TORCHAO | {"quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}}
    source = write(tmp_path / "source", description, parts)
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    expected = (values.float() * scale).bfloat16()
    assert torch.equal(load_file(tmp_path / "out" / FILE)[f"{Q}.weight"], expected)


@pytest.mark.parametrize(
    ("description", "changes", "message"),
    [
        (
            TORCHAO | {"quant_type": {"default": {"_type": "UIntXWeightOnlyConfig"}}},
            {},
            "quant_method torchao, quant_type UIntXWeightOnlyConfig",
        ),
        *(
            (of_int4({"int4_packing_format": named}), {}, f"torchao, packing format '{name}'")
            for named, name in (
                ("tile_packed_to_4d", "tile_packed_to_4d"),
                ({"_type": "Int4PackingFormat", "_data": "PRESHUFFLED"}, "preshuffled"),
            )
        ),
        (of_int4({}), {"zero_point": torch.ones(128, 8)}, "does not go with .*_weight_scale, F32"),
        (
            of_int4({}),
            {"zero_point": torch.ones(8, 128).half()},
            "does not go with .*_weight_scale, F32",
        ),
        (of_int4({}), {"qdata": torch.ones(128, 64).int()}, "_weight_scale: part of a weight"),
        (of_int4({}), {"scale": torch.ones(4), "zero_point": torch.ones(4)}, "does not go with"),
        (TORCHAO | {"quant_type": "int4_weight_only"}, {}, "quant_type int4_weight_only"),
        (TORCHAO | {"quant_type": None}, {}, "quant_type nothing"),
        (TORCHAO, {"scale": None}, "_weight_qdata: part of a weight"),
        (TORCHAO, {"scale": torch.ones(8, 128)}, r"_weight_scale, F32 \[8, 128\]"),
        (TORCHAO, {"zero_point": torch.ones(128, 1)}, r"_weight_zero_point, F32 \[128, 1\]"),
        (TORCHAO, {"act_pre_scale": torch.ones(1)}, "_weight_act_pre_scale: part of a weight"),
        (INT8, {"scale": torch.ones(1)}, "_weight_(qdata|scale): part of a weight"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, description: dict[str, Any], changes: dict[str, Any], message: str
):
    parts = of_torchao(8, torch.float32)
    for name, part in changes.items():
        parts.pop(f"{Q}._weight_{name}", None)
        if part is not None:
            parts[f"{Q}._weight_{name}"] = part
    source = write(tmp_path / "source", description, parts)
    with pytest.raises(SourceError, match=message) as error:
        nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("zero", [torch.ones(64, 1), random_bytes(64, 2)])
def test_zero_points_that_do_not_fit(tmp_path: Path, zero: torch.Tensor):
    parts = {f"{Q}.weight": random_bytes(64, 64), f"{Q}.weight_scale": torch.ones(64, 1)}
    source = write(tmp_path / "source", INT8, parts | {f"{Q}.weight_zero_point": zero})
    with pytest.raises(SourceError, match=f"{Q}.weight: I8 .* does not go with .*zero_point"):
        nf4conv.dequantize(source, tmp_path / "out", **CPU)
