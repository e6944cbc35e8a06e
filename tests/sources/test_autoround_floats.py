"""Small floats of AutoRound 0.16: FP8 in blocks and rows, MXFP4, MXFP8 and NVFP4.

Names and configs are those that it wrote for a Llama of two layers (docs/sources.md).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from api import RunOptions, dequantize_checkpoint
from safetensors.torch import load_file
from test_encoded import (
    BF16,
    PLAIN,
    SHAPES,
    Encoded,
    fp8_blocks,
    nvfp4_compressed_tensors,
    random,
    random_bytes,
    unpacked,
    write,
)

from nf4conv.errors import SourceError

AUTO_ROUND = {"quant_method": "auto-round", "autoround_version": "0.16.1", "sym": True}
AS_COMPRESSED = AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}


def fp8_of_rows() -> Encoded:
    stored, decoded = {}, {}
    for module, shape in SHAPES.items():
        values, scale = random(*shape).to(torch.float8_e4m3fn), random(shape[0]).abs().to(BF16)
        parts = {"weight": values, "weight_scale": scale, "input_scale": torch.ones(1).to(BF16)}
        stored |= {f"{module}.{name}": part for name, part in parts.items()}
        decoded[f"{module}.weight"] = (values.float() * scale.float()[:, None]).to(BF16)
    return Encoded(stored, decoded, None)


def mxfp4() -> Encoded:
    stored, decoded = {}, {}
    for module, (rows, columns) in SHAPES.items():
        pairs, scale = random_bytes(rows, columns // 2), random_bytes(rows, columns // 32, high=8)
        stored |= {f"{module}.weight_packed": pairs, f"{module}.weight_scale": scale + 120}
        factors = torch.exp2(scale.float() - 7).repeat_interleave(32, dim=1)
        decoded[f"{module}.weight"] = (unpacked(pairs) * factors).to(BF16)
    return Encoded(stored, decoded, None)


def mxfp8() -> Encoded:
    stored, decoded = {}, {}
    for module, (rows, columns) in SHAPES.items():
        values = random(rows, columns).to(torch.float8_e4m3fn)
        scale = random_bytes(rows, columns // 32, high=8)
        stored |= {f"{module}.weight": values, f"{module}.weight_scale": scale + 120}
        factors = torch.exp2(scale.float() - 7).repeat_interleave(32, dim=1)
        decoded[f"{module}.weight"] = (values.float() * factors).to(BF16)
    return Encoded(stored, decoded, None)


@pytest.mark.parametrize(
    ("encode", "description"),
    [
        (
            fp8_blocks,
            {
                "packing_format": "auto_round:fp8",
                "data_type": "fp",
                "group_size": [128, 128],
                "weight_block_size": [128, 128],
            },
        ),
        (fp8_of_rows, {"packing_format": "auto_round:fp8_static", "data_type": "fp"}),
        (mxfp4, AS_COMPRESSED | {"data_type": "mx_fp", "group_size": 32}),
        (mxfp8, AS_COMPRESSED | {"data_type": "mx_fp", "group_size": 32}),
        (nvfp4_compressed_tensors, AS_COMPRESSED | {"data_type": "nv_fp", "group_size": 16}),
    ],
)
def test_floats(tmp_path: Path, encode: Callable[[], Encoded], description: dict[str, Any]):
    encoded = encode()
    source = write(tmp_path / "source", PLAIN | encoded.stored, AUTO_ROUND | description)
    dequantize_checkpoint(source, tmp_path / "out", None, RunOptions(device="cpu"))
    found = load_file(tmp_path / "out/model.safetensors")
    for name, tensor in encoded.decoded.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-e5m3-pack-quantized"},
            "weight_packed: U8 .* does not go with .*weight_scale, U8",
        ),
        (
            AUTO_ROUND
            | {"packing_format": "auto_round:llm_compressor_nvfp4_e5m3", "data_type": "nvfp4_v2"},
            "data_type 'nvfp4_v2'; .* nf4conv decodes int, fp",
        ),
    ],
)
def test_scales_in_e5m3_are_no_powers_of_two(
    tmp_path: Path, description: dict[str, Any], message: str
):
    stored = {}
    for module, (rows, columns) in SHAPES.items():
        stored[f"{module}.weight_packed"] = random_bytes(rows, columns // 2)
        stored[f"{module}.weight_scale"] = random_bytes(rows, columns // 16)
    source = write(tmp_path / "source", PLAIN | stored, description)
    with pytest.raises(SourceError, match=message) as error:
        dequantize_checkpoint(source, tmp_path / "out", None, RunOptions(device="cpu"))
    assert "\n" not in str(error.value)
