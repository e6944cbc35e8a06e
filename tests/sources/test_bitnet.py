"""Checkpoints of BitNet as sources, against the layers of transformers 5."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import compared
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.bitnet import (
    pack_weights,
    replace_with_bitnet_linear,
    unpack_weights,
)
from transformers.utils.quantization_config import BitNetQuantConfig

from nf4conv import (
    QuantizeOptions,
    RunOptions,
    dequantize_checkpoint,
    inspect_checkpoint,
    quantize_checkpoint,
)
from nf4conv.codec.decode.ternary import TernaryLayout, decode_ternary
from nf4conv.commands.verify import verify_checkpoint
from nf4conv.errors import SourceError
from nf4conv.sources.encodings.cuts.rows import rows_of
from nf4conv.sources.encodings.types.ternary import Ternary
from nf4conv.sources.tensors import TensorInfo

CPU = RunOptions(device="cpu", workers=2, buffer_size=1)
FILE = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj"
CLASSES = ("bitlinear", "autobitlinear")


@pytest.fixture(autouse=True)
def without_a_compiler():
    with torch.compiler.set_stance("force_eager"):
        yield


def description(linear_class: str) -> dict[str, Any]:
    return {
        "quant_method": "bitnet",
        "linear_class": linear_class,
        "quantization_mode": "offline",
        "modules_to_not_convert": ["lm_head"],
    }


def write(folder: Path, linear_class: str) -> tuple[Path, torch.nn.Module]:
    """A small Llama with layers of BitNet; its MLP takes several pieces of a buffer of 1 MB."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=2056,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).bfloat16()
    wanted = BitNetQuantConfig(
        linear_class=linear_class, quantization_mode="offline", modules_to_not_convert=["lm_head"]
    )
    model = replace_with_bitnet_linear(model, ["lm_head"], wanted).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape).to(parameter.dtype)
    stored = model.state_dict()
    for name in stored:
        if f"{name}_scale" in stored:
            rows, columns = stored[name].shape
            rows *= 4 if linear_class == "bitlinear" else 1
            stored[name] = pack_weights(torch.randint(-1, 2, (rows, columns)))
        elif name.endswith("weight_scale"):
            stored[name] = torch.tensor([0.75 + torch.rand(()).item()]).bfloat16()
    folder.mkdir()
    save_file({name: part.contiguous() for name, part in stored.items()}, folder / FILE)
    content = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    content["quantization_config"] = description(linear_class)
    (folder / "config.json").write_text(json.dumps(content))
    return folder, model


@pytest.mark.parametrize("linear_class", CLASSES)
def test_bitnet(tmp_path: Path, linear_class: str):
    source, model = write(tmp_path / "source", linear_class)
    out = tmp_path / "out"
    dequantize_checkpoint(source, out, None, CPU)
    stored, decoded = load_file(source / FILE), load_file(out / FILE)
    assert set(decoded) == {name for name in stored if not name.endswith("weight_scale")}
    for name, found in decoded.items():
        scale = stored.get(f"{name}_scale")
        if scale is None:
            assert torch.equal(found, stored[name])
            continue
        ternary = unpack_weights(stored[name], dtype=torch.float32)
        expected = ternary / scale if linear_class == "bitlinear" else ternary * scale
        assert torch.equal(found, expected.bfloat16())
    # the layer itself: 127 in one place is exact in its activations of 8 bits
    layer = model.model.layers[0].self_attn.q_proj
    codes = stored[f"{Q}.weight"]
    if linear_class == "autobitlinear":
        codes = unpack_weights(codes, dtype=torch.bfloat16)
    layer.weight.data = codes
    layer.weight_scale = stored[f"{Q}.weight_scale"]
    made = layer(127 * torch.eye(256, dtype=torch.bfloat16)).T / 127
    # it rounds the product and the quotient to bfloat16, which loses up to 2^-8 each
    assert torch.allclose(made, decoded[f"{Q}.weight"], rtol=2**-7, atol=0)
    assert verify_checkpoint(out, source, None, CPU).identical
    rows = {row.name: row for row in inspect_checkpoint(source).tensors}
    assert rows[f"{Q}.weight"].shape == (256, 256)
    # NF4 has -1, 0 and 1 among its values
    quantize_checkpoint(source, tmp_path / "nf4", QuantizeOptions(double_quant=False), CPU)
    assert compared(tmp_path / "nf4", out).within(0)


@pytest.mark.parametrize(("first", "rows"), [(0, 32), (10, 6), (6, 4), (5, 22), (24, 8), (31, 1)])
def test_rows_of_a_weight(tmp_path: Path, first: int, rows: int):
    """Runs within a quarter of 8 rows, and over their borders."""
    ternary = torch.randint(-1, 2, (32, 16))
    codes = pack_weights(ternary.clone())
    file = tmp_path / "codes"
    file.write_bytes(codes.numpy().tobytes())
    scale = TensorInfo("scale", "F32", (1,), file, 0, 4)
    stored = TensorInfo("codes", "U8", (8, 16), file, 0, 128)
    whole = TensorInfo(
        "w", "BF16", (32, 16), file, 0, 128, Ternary(stored, scale, is_divided=True, rows=32)
    )
    encoding = rows_of(whole, first, first + rows).encoding
    assert isinstance(encoding, Ternary)
    (_, values), _ = encoding.parts
    lines = torch.tensor(list(file.read_bytes()[values.start : values.stop]), dtype=torch.uint8)
    layout = TernaryLayout(
        quarter=encoding.quarter,
        first=encoding.first,
        rows=encoding.rows,
        first_line=encoding.first_line,
        is_divided=True,
    )
    decoded = decode_ternary(lines.view(values.shape), torch.tensor([2.0]), layout, torch.float32)
    assert torch.equal(decoded, ternary[first : first + rows] / 2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"quantization_mode": "online"}, "quantization_mode 'online'; .* while the model runs"),
        ({"use_rms_norm": True}, "use_rms_norm; give"),
        ({"linear_class": "other"}, "linear_class 'other'"),
    ],
)
def test_what_is_refused_by_name(tmp_path: Path, more: dict[str, Any], message: str):
    tmp_path.joinpath("config.json").write_text(
        json.dumps(
            {"model_type": "llama", "quantization_config": description("autobitlinear") | more}
        )
    )
    save_file({f"{Q}.weight": torch.ones(4, 8).byte()}, tmp_path / FILE)
    with pytest.raises(SourceError, match=f"quant_method bitnet, {message}"):
        dequantize_checkpoint(tmp_path, tmp_path / "out", None, CPU)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, "lacks its weight_scale"),
        (torch.ones(4), r"U8 \[4, 8\] does not go with .*weight_scale, F32 \[4\]"),
        (torch.ones(1).int(), "does not go with .*weight_scale, I32"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, scale: torch.Tensor | None, message: str):
    parts = {f"{Q}.weight": torch.ones(4, 8).byte()}
    if scale is not None:
        parts[f"{Q}.weight_scale"] = scale
    save_file(parts, tmp_path / FILE)
    config = {"model_type": "llama", "quantization_config": description("bitlinear")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=f"{Q}.weight: .*{message}"):
        dequantize_checkpoint(tmp_path, tmp_path / "out", None, CPU)
