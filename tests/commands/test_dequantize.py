"""`dequantize` from a folder to a folder, on the CPU: our own checkpoints and those that others
write.
"""

import json

import bitsandbytes.functional as bnb
import pytest
import torch
from adapters import make_model
from checkpoints import components, contents, save_model, tensors_of
from four_bit import pack, write
from weights import same_bits, special_weight

import nf4conv
from nf4conv.codec.ops import dequantize_4bit, quantize_4bit
from nf4conv.codec.quant_state import QuantState
from nf4conv.errors import PlanError

CPU = {"device": "cpu"}
SMALL = {"device": "cpu", "workers": 2, "buffer_size": 1}
NAME = "model.layers.0.mlp.up_proj.weight"


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decoded(
    tensors: dict[str, torch.Tensor], name: str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Decodes a stored weight with the codec."""
    state = QuantState.from_components(components(tensors, name))
    return dequantize_4bit(tensors[name], state, dtype=dtype)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 4096])
@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"]
)
def test_values_are_what_the_codec_decodes(
    tmp_path, monkeypatch, quant_type, blocksize, double_quant, dtype
):
    """Also those of zero, infinite, subnormal and NaN blocks, and where a weight takes several
    pieces.
    """
    special = special_weight(dtype, blocksize, "constant")
    weights = {
        "model.layers.0.mlp.up_proj.weight": random(520, 260).to(dtype),
        "model.layers.0.mlp.down_proj.weight": special[: special.numel() // 7 * 7].view(7, -1),
        "model.layers.0.self_attn.q_proj.weight": random(33, 7).to(dtype),
    }
    options = {"quant_type": quant_type, "blocksize": blocksize, "double_quant": double_quant}
    stored = {
        key: part
        for name, weight in weights.items()
        for key, part in pack(name, weight, **options).items()
    }
    source = write(tmp_path / "source", stored | {"model.norm.weight": torch.ones(7, dtype=dtype)})
    monkeypatch.setattr("nf4conv.commands.writing.check_scales", lambda *_: None)
    nf4conv.dequantize(source, tmp_path / "out", **SMALL)
    found = tensors_of(tmp_path / "out")
    assert found.keys() == {*weights, "model.norm.weight"}
    for name, weight in weights.items():
        same_bits(found[name], decoded(stored, name))
        assert found[name].dtype == weight.dtype
    assert torch.equal(found["model.norm.weight"], torch.ones(7, dtype=dtype))


@pytest.mark.oracle
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
def test_values_are_those_of_bitsandbytes(tmp_path, quant_type, nested):
    weight = random(128, 256).bfloat16()
    packed, state = bnb.quantize_4bit(weight, quant_type=quant_type, compress_statistics=nested)
    parts = {f"{NAME}.{suffix}": part for suffix, part in state.as_dict(packed=True).items()}
    source = write(tmp_path / "source", {NAME: packed, **parts})
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    # equality of numbers: bitsandbytes' CPU code loses the sign of FP4's zero, which its CUDA code
    # keeps
    assert torch.equal(tensors_of(tmp_path / "out")[NAME], bnb.dequantize_4bit(packed, state))


def test_a_round_trip_brings_back_all_but_the_precision(source, tmp_path):
    """Same tensors, dtypes and shapes, the same config and files; a second round trip changes
    nothing more.
    """
    (source / "chat_template.jinja").write_text("{{ x }}")
    nf4conv.quantize(source, tmp_path / "packed", **CPU)
    nf4conv.dequantize(tmp_path / "packed", tmp_path / "out", **CPU)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in after.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in before.items()
    }
    for name, tensor in before.items():
        if "proj" not in name:
            assert torch.equal(after[name], tensor)
        else:
            error = (after[name].float() - tensor.float()).norm() / tensor.float().norm()
            assert 0.08 < error < 0.1, name
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == json.loads((source / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    assert sorted(contents(tmp_path / "out")) == [
        "chat_template.jinja", "config.json", "model.safetensors", "nf4conv.json", "tokenizer.json",
    ]  # fmt: skip


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_codes_stored_as_floats(tmp_path, storage):
    """bnb_4bit_quant_storage, as for FSDP: the same bytes under another dtype."""
    stored = pack(NAME, random(64, 64).bfloat16())
    plain = dict(stored)
    stored[NAME] = stored[NAME].view(-1).view(storage).view(-1, 1)
    nf4conv.dequantize(write(tmp_path / "source", stored), tmp_path / "out", **CPU)
    same_bits(tensors_of(tmp_path / "out")[NAME], decoded(plain, NAME))


@pytest.mark.parametrize(
    "variant", ["row", "flat", "no quant_map", "low-precision map", "split over shards"]
)
def test_variants_of_other_tools_and_older_releases(tmp_path, variant):
    stored = pack(NAME, random(64, 96).half(), quant_type="fp4")
    shards = [stored, {"model.norm.weight": torch.ones(96).half()}]
    if variant == "row":
        stored[NAME] = stored[NAME].view(1, -1)
    elif variant == "flat":
        stored[NAME] = stored[NAME].view(-1)
    elif variant == "no quant_map":
        del stored[f"{NAME}.quant_map"]
    elif variant == "low-precision map":
        stored[f"{NAME}.nested_quant_map"] = stored[f"{NAME}.nested_quant_map"].bfloat16().float()
    expected = decoded(stored, NAME)
    if variant == "split over shards":
        for suffix in ("absmax", "quant_state.bitsandbytes__fp4"):
            shards[1][f"{NAME}.{suffix}"] = stored.pop(f"{NAME}.{suffix}")
    nf4conv.dequantize(write(tmp_path / "source", *shards), tmp_path / "out", **CPU)
    same_bits(tensors_of(tmp_path / "out")[NAME], expected)


def test_stacked_parameters_without_a_module(tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored = pack(name, random(3, 40, 24).bfloat16(), blocksize=128)
    nf4conv.dequantize(write(tmp_path / "source", stored), tmp_path / "out", **SMALL)
    assert tensors_of(tmp_path / "out")[name].shape == (3, 40, 24)
    same_bits(tensors_of(tmp_path / "out")[name], decoded(stored, name))


def test_conv1d_weights_are_transposed_back(tmp_path):
    """GPT-2 stores [in, out], packed [out, in]; a square weight shows that shapes do not decide."""
    weights = {
        f"transformer.h.0.attn.{name}.weight": random(64, width)
        for name, width in (("c_attn", 192), ("c_proj", 64))
    }
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "torch_dtype": "float32"}
    save_model(tmp_path / "source", weights, config)
    nf4conv.quantize(tmp_path / "source", tmp_path / "packed", **CPU)
    nf4conv.dequantize(tmp_path / "packed", tmp_path / "out", **CPU)
    for name, weight in weights.items():
        packed, state = quantize_4bit(weight.t().contiguous())
        same_bits(
            tensors_of(tmp_path / "out")[name], dequantize_4bit(packed, state).t().contiguous()
        )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_is_rounded_to_once_and_told_by_the_config(tmp_path, dtype):
    stored = pack(NAME, random(64, 64).half()) | {
        "model.norm.weight": torch.ones(64).bfloat16(),
        "model.layers.0.mlp.router.e_score_correction_bias": random(64),
    }
    source = write(tmp_path / "source", stored)
    nf4conv.dequantize(source, tmp_path / "out", dtype=dtype, **CPU)
    target = getattr(torch, dtype)
    found = tensors_of(tmp_path / "out")
    same_bits(found[NAME], decoded(stored, NAME, target))
    assert found["model.norm.weight"].dtype == target
    assert found["model.layers.0.mlp.router.e_score_correction_bias"].dtype == torch.float32
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == (dtype, dtype)


def test_leftovers_of_the_quantization_are_gone(tmp_path):
    source = write(tmp_path / "source", pack(NAME, random(64, 64).half()))
    config = json.loads((source / "config.json").read_text())
    config["text_config"] = {
        "quantization_config": config["quantization_config"],
        "hidden_size": 64,
    }
    (source / "config.json").write_text(json.dumps(config))
    (source / "quantize_config.json").write_text("{}")
    nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert "quantization" not in (tmp_path / "out/config.json").read_text()
    assert json.loads((tmp_path / "out/config.json").read_text())["text_config"] == {
        "hidden_size": 64
    }
    assert not (tmp_path / "out/quantize_config.json").exists()


def test_what_is_not_quantized_is_refused(source, tmp_path):
    with pytest.raises(PlanError, match="no tensor of this checkpoint is quantized"):
        nf4conv.dequantize(source, tmp_path / "out", **CPU)
    assert not (tmp_path / "out").exists()


@pytest.mark.oracle
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
def test_a_checkpoint_of_transformers_and_bitsandbytes_loads_without_them(tmp_path, nested):
    """It gives what the quantized model gives when that computes in float32."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    source = make_model(tmp_path / "source", "llama", intermediate_size=128)
    wish = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested
    )
    quantized = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=wish, dtype=torch.float32, device_map="cpu"
    )
    quantized.save_pretrained(tmp_path / "packed")
    report = nf4conv.dequantize(tmp_path / "packed", tmp_path / "out", **CPU)
    assert report.totals.decoded == 14
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert {type(module) for module in plain.modules() if hasattr(module, "in_features")} == {
        torch.nn.Linear
    }
    state = quantized.state_dict()
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        same_bits(plain.state_dict()[name], decoded(state, name))
    tokens = torch.arange(40).view(1, -1)
    # with gradients, because without them bitsandbytes multiplies in bfloat16 on CPUs that can
    expected, actual = quantized(tokens).logits, plain(tokens).logits
    assert torch.equal(actual, expected)
