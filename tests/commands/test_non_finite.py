"""NaN and infinity in what is kept in 4 bits, and in adapters, is never certified."""

import json
import math
from pathlib import Path

import pytest
import torch
from adapters import make_model
from four_bit import pack, write
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv.errors import SourceError

RUN = {"device": "cpu", "workers": 1}
NAME = "model.layers.0.mlp.up_proj.weight"
OTHER = "model.layers.0.self_attn.q_proj.weight"


def packed_source(folder: Path, double_quant: bool, damage: str, value: float) -> Path:
    """A 4-bit checkpoint one weight of which has a scale that is not finite."""
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for name in (NAME, OTHER):
        weight = torch.randn(96, 128, generator=generator).bfloat16()
        tensors |= pack(name, weight, double_quant=double_quant)
    if damage == "nested_offset":
        state = f"{NAME}.quant_state.bitsandbytes__nf4"
        fields = json.loads(bytes(tensors[state].tolist()))
        fields["nested_offset"] = value
        tensors[state] = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)
    else:
        scales = tensors[f"{NAME}.{damage}"]
        scales.view(-1)[-1] = value
    tensors["model.embed_tokens.weight"] = torch.ones(256, 128).bfloat16()
    tensors["lm_head.weight"] = torch.ones(256, 128).bfloat16()
    return write(folder, tensors)


DAMAGES = [(False, "absmax"), (True, "nested_absmax"), (True, "nested_offset")]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("double_quant", "damage"), DAMAGES)
@pytest.mark.parametrize("verify", [False, True])
def test_scales_that_are_not_finite_are_refused(
    tmp_path: Path, double_quant: bool, damage: str, value: float, verify: bool
):
    source = packed_source(tmp_path / "source", double_quant, damage, value)
    with pytest.raises(SourceError, match=rf"{NAME}.*(NaN|infini|quant_state|nested_offset)"):
        nf4conv.quantize(source, tmp_path / "out", **RUN, verify=verify)
    assert not (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("double_quant", "damage"), DAMAGES)
def test_dequantize_refuses_what_decodes_to_nan(
    tmp_path: Path, double_quant: bool, damage: str, value: float
):
    source = packed_source(tmp_path / "source", double_quant, damage, value)
    with pytest.raises(SourceError, match=rf"{NAME}: has scales that are NaN or infinite"):
        nf4conv.dequantize(source, tmp_path / "out", **RUN)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("merged", [False, True], ids=["plain", "below an adapter"])
def test_dequantize_refuses_it_below_an_adapter_too(tmp_path: Path, model: Path, merged: bool):
    packed = tmp_path / "packed"
    nf4conv.quantize(model, packed, double_quant=False, **RUN)
    path = packed / "model.safetensors"
    tensors = load_file(path)
    name = min(name for name in tensors if name.endswith("q_proj.weight.absmax"))
    tensors[name][0] = math.nan
    save_file(tensors, path, {"format": "pt"})
    lora = (str(adapter_with(tmp_path / "adapter", model, 1.0)),) if merged else ()
    with pytest.raises(SourceError, match=r"q_proj\.weight: has scales that are NaN or infinite"):
        nf4conv.dequantize(packed, tmp_path / "out", lora=lora, **RUN)


@pytest.mark.parametrize(("double_quant", "damage"), DAMAGES)
def test_what_float16_cannot_hold_is_told(tmp_path: Path, double_quant: bool, damage: str):
    source = packed_source(tmp_path / "source", double_quant, damage, 1e6)
    in_float16 = {"dtype": "float16"}
    told = rf"{NAME}: has values too large for float16, to which it would be cast"
    with pytest.raises(SourceError, match=told):
        nf4conv.dequantize(source, tmp_path / "out", **in_float16, **RUN)
    nf4conv.dequantize(source, tmp_path / "wide", **RUN)
    assert load_file(tmp_path / "wide/model.safetensors")[NAME].isfinite().all()


# --- adapters -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_model(folder / "model", "llama")


def adapter_with(folder: Path, model: Path, value: float) -> Path:
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    adapted.save_pretrained(folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    first = min(name for name in tensors if "lora_B" in name)
    tensors = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    tensors[first][0, 0] = value
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_adapter_that_is_not_finite_is_refused(tmp_path: Path, model: Path, value: float):
    adapter = adapter_with(tmp_path / "adapter", model, value)
    options = {"lora": (str(adapter),)}
    refused = r"q_proj\.weight: adapters make finite values NaN or infinite in \w*float"
    with pytest.raises(SourceError, match=refused):
        nf4conv.dequantize(model, tmp_path / "out", **options, **RUN)
    assert not (tmp_path / "out/config.json").exists()
    with pytest.raises(SourceError, match=r"q_proj\.weight"):
        nf4conv.quantize(model, tmp_path / "q", lora=(str(adapter),), **RUN)


def test_an_adapter_whose_sums_float16_cannot_hold_is_refused(tmp_path: Path, model: Path):
    adapter = adapter_with(tmp_path / "adapter", model, 1e6)
    options = {"lora": (str(adapter),), "dtype": "float16"}
    with pytest.raises(SourceError, match="adapters make finite values NaN or infinite in float16"):
        nf4conv.dequantize(model, tmp_path / "out", **options, **RUN)


def test_an_adapter_with_large_finite_values_is_merged(tmp_path: Path, model: Path):
    adapter = adapter_with(tmp_path / "adapter", model, 1e6)
    options = {"lora": (str(adapter),)}
    report = nf4conv.dequantize(model, tmp_path / "out", **options, **RUN)
    assert report.totals.copied + report.totals.decoded > 0
