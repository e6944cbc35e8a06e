"""Quantized sources: the output has the bytes that the decoded checkpoint would give.

The checkpoints are those of golden/inputs.py; test_released.py and codec/test_decode.py compare
what they decode to with others' code.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same_tensors, save_model, tensors_of
from inputs import ENCODED, SOURCES, save
from safetensors.torch import load_file
from test_damaged_formats import read

import nf4conv
from nf4conv.errors import SourceError

BF16 = torch.bfloat16
Q, UP, DOWN = (
    f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
)
SHAPES = {Q: (64, 128), UP: (320, 128), DOWN: (128, 320)}
PLAIN = {
    "model.embed_tokens.weight": torch.randn(
        96, 128, generator=torch.Generator().manual_seed(7)
    ).bfloat16(),
    "model.layers.0.input_layernorm.weight": torch.ones(128).bfloat16(),
    "lm_head.weight": torch.randn(96, 128, generator=torch.Generator().manual_seed(8)).bfloat16(),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "dtype": "bfloat16",
}
RUN = {"device": "cpu", "workers": 2, "buffer_size": 1}
FORMATS = [*ENCODED, "deepseek-v4", "fp4"]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def random_bytes(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def write(
    folder: Path, tensors: dict[str, torch.Tensor], description: dict[str, Any] | None = None
) -> Path:
    config = CONFIG | ({} if description is None else {"quantization_config": description})
    return save_model(folder, tensors, config)


def source_of(folder: Path, name: str, **config: Any) -> Path:
    """Writes a checkpoint of golden/inputs.py, with other values in its config."""
    SOURCES[name](folder)
    change_config(folder, **config)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    described = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(described))


def quantized(source: Path, **options: Any) -> dict[str, torch.Tensor]:
    out = source.with_name(f"{source.name}-out")
    nf4conv.quantize(source, out, **options, **RUN, overwrite=out.exists())
    return load_file(out / "model.safetensors")


def dequantized(source: Path) -> Path:
    out = source.with_name(f"{source.name}-decoded")
    nf4conv.dequantize(source, out, **RUN)
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_source_gives_what_its_decoded_form_gives(tmp_path: Path, name: str):
    source = source_of(tmp_path / "encoded", name)
    plain = dequantized(source)
    # what is in 4 bits already would otherwise stay in its own format
    options = {"quant_type": "nf4", "blocksize": 64, "double_quant": True}
    packed = quantized(source, **options)
    assert_same_tensors(packed, quantized(plain))
    assert any("quant_state" in key for key in packed)
    quantized(source, exclude=("*up_proj.weight",))
    report = nf4conv.verify(tmp_path / "encoded-out", source=source, exact=True, device="cpu")
    assert report.passed, [finding.line() for finding in report.findings]
    assert report.identical


def test_parts_of_a_weight_in_different_files(tmp_path: Path):
    """DeepSeek's scales are not always beside their weights."""
    source = source_of(tmp_path / "encoded", "fp8 blocks")
    expected = tensors_of(dequantized(source))
    tensors = read(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    weight_map = {}
    for number, are_scales in enumerate((True, False), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        found = {name: one for name, one in tensors.items() if name.endswith("_inv") is are_scales}
        save(source / file, found)
        weight_map |= dict.fromkeys(found, file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    nf4conv.dequantize(source, tmp_path / "out", **RUN)
    assert_same_tensors(tmp_path / "out", expected)


def test_modelopts_file_of_its_own_names_the_method(tmp_path: Path):
    source = source_of(tmp_path / "encoded", "nvfp4 modelopt")
    expected = tensors_of(dequantized(source))
    change_config(source, quantization_config=None)
    described = {"quantization": {"quant_algo": "NVFP4"}}
    (source / "hf_quant_config.json").write_text(json.dumps(described))
    [note] = [note for note in nf4conv.plan_quantize(source).made.notes if "quantized" in note]
    assert note == "the source is quantized (modelopt): 4 of fp4"
    nf4conv.dequantize(source, tmp_path / "out", **RUN)
    assert_same_tensors(tmp_path / "out", expected)
    assert not (tmp_path / "out/hf_quant_config.json").exists()


def test_float16_checkpoints_decode_to_float16(tmp_path: Path):
    source = source_of(tmp_path / "encoded", "int8 bitsandbytes", dtype="float16")
    assert tensors_of(dequantized(source))[f"{Q}.weight"].dtype == torch.float16


def test_llama_4_experts_in_fp8_are_split(tmp_path: Path):
    """fbgemm stores the stack [expert, in, 2 × intermediate] with a scale for each output."""
    name = "model.layers.0.feed_forward.experts.gate_up_proj"
    values, scale = random(2, 64, 256).to(torch.float8_e4m3fn), random(2, 1, 256).abs()
    down = {"model.layers.0.feed_forward.experts.down_proj": random(2, 128, 64).to(BF16)}
    decoded = {name: (values.float() * scale).to(BF16)}
    config = {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "dtype": "bfloat16",
    }
    source = write(tmp_path / "encoded", down | {name: values, f"{name}_scale": scale})
    plain = write(tmp_path / "plain", down | decoded)
    for folder in (source, plain):
        (folder / "config.json").write_text(json.dumps(config))
    expected = quantized(plain)
    assert "model.layers.0.feed_forward.experts.1.up_proj.weight.absmax" in expected
    assert_same_tensors(quantized(source), expected)


def test_a_nan_in_an_encoded_weight_is_found(tmp_path: Path):
    source = source_of(tmp_path / "encoded", "fp8 blocks")
    tensors = read(source / "model.safetensors")
    name = f"{UP}.weight"
    nan = tensors[name]._replace(content=b"\x7f" + tensors[name].content[1:])
    save(source / "model.safetensors", {**tensors, name: nan})
    with pytest.raises(SourceError, match=rf"{UP}.weight: has values that are NaN or infinite"):
        quantized(source)
    kept = quantized(source, exclude=(name,))
    assert kept[name].dtype == BF16
    assert int(torch.isnan(kept[name]).sum()) == 1


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["hqq", "aqlm", "marlin", "gguf", "never-heard-of"])
@pytest.mark.parametrize("nested", [False, True], ids=["top", "text_config"])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str, nested: bool):
    source = write(tmp_path / "source", PLAIN)
    description = {"quantization_config": {"quant_method": method}}
    (source / "config.json").write_text(
        json.dumps(CONFIG | ({"text_config": description} if nested else description))
    )
    with pytest.raises(
        SourceError,
        match=f"source: already quantized: quant_method {method}, which nf4conv does not decode",
    ):
        nf4conv.plan_quantize(source)


INT4 = torch.zeros(64, 16, dtype=torch.int32)


@pytest.mark.parametrize(
    ("tensors", "description", "message"),
    [
        (
            {f"{Q}.qweight": INT4, f"{Q}.qzeros": INT4.clone()},
            None,
            f"{Q}.qweight: part of a weight that is already quantized",
        ),
        (
            {f"{Q}.weight_packed": INT4, f"{Q}.weight_scale": torch.ones(64, 1)},
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            rf"{Q}.weight_packed: I32 \[64, 16\] does not go with",
        ),
        (
            {f"{Q}.weight": random_bytes(64, 64), f"{Q}.weight_scale": torch.ones(64, 1)},
            {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
            f"{Q}.weight_scale: part of a weight",
        ),
        (
            {f"{Q}.weight": random(64, 64).to(torch.float8_e4m3fn)},
            {"quant_method": "fp8"},
            f"{Q}.weight: lacks its weight_scale, without which it cannot be decoded",
        ),
        (
            {f"{Q}.weight": random_bytes(64, 64).view(torch.int8), f"{Q}.SCB": torch.ones(64)}
            | {f"{Q}.weight_format": torch.tensor(2, dtype=torch.uint8)},
            {"quant_method": "bitsandbytes"},
            f"{Q}.SCB.* does not go with {Q}.weight_format",
        ),
        (
            {f"{Q}.weight": random_bytes(64, 1), f"{Q}.weight.absmax": torch.ones(2)}
            | {f"{Q}.weight.quant_state.bitsandbytes__nf4": torch.zeros(5, dtype=torch.uint8)},
            {"quant_method": "bitsandbytes"},
            f"{Q}.weight.quant_state.bitsandbytes__nf4: not JSON",
        ),
        (
            {f"{Q}.weight_packed": INT4, f"{Q}.weight_scale": torch.ones(64, 0)}
            | {f"{Q}.weight_shape": torch.tensor([64, 128])},
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            rf"{Q}.weight_packed: I32 .* does not go with .*weight_scale, F32 \[64, 0\]",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    description: dict[str, Any] | None,
    message: str,
):
    with pytest.raises(SourceError, match=message):
        nf4conv.plan_quantize(write(tmp_path / "source", PLAIN | tensors, description))


def test_names_like_those_of_scales_are_nothing_in_a_plain_checkpoint(tmp_path: Path):
    """A model may have parameters of its own that end in k_scale."""
    own = {
        "model.layers.0.self_attn.k_scale": torch.ones(3).bfloat16(),
        f"{Q}.weight": random(64, 128).bfloat16(),
    }
    assert "model.layers.0.self_attn.k_scale" in quantized(write(tmp_path / "source", PLAIN | own))


# --- pickles --------------------------------------------------------------------------------------


def test_a_pickle_gives_what_safetensors_give(tmp_path: Path):
    weight = random(128, 64).bfloat16()
    state = PLAIN | {
        f"{Q}.weight": weight.t(),
        f"{UP}.weight": weight,
        f"{DOWN}.weight": weight[32:96],
    }
    plain = write(
        tmp_path / "plain", {name: tensor.clone().contiguous() for name, tensor in state.items()}
    )
    source = write(tmp_path / "pickle", {"a": torch.ones(1)})
    (source / "model.safetensors").unlink()
    torch.save(state, source / "pytorch_model.bin")
    assert_same_tensors(quantized(source), quantized(plain))


def test_sharded_pickles(tmp_path: Path):
    state = PLAIN | {f"{Q}.weight": random(64, 128).bfloat16()}
    source = write(tmp_path / "pickle", {"a": torch.ones(1)})
    (source / "model.safetensors").unlink()
    files = {
        name: f"pytorch_model-0000{1 + number % 2}-of-00002.bin"
        for number, name in enumerate(state)
    }
    for file in set(files.values()):
        torch.save(
            {name: tensor for name, tensor in state.items() if files[name] == file}, source / file
        )
    (source / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    assert_same_tensors(quantized(source), quantized(write(tmp_path / "plain", state)))


def test_safetensors_are_preferred_to_pickles(tmp_path: Path):
    source = write(tmp_path / "both", PLAIN | {f"{Q}.weight": random(64, 128).bfloat16()})
    (source / "pytorch_model.bin").write_bytes(b"never read")
    assert [file.name for file in nf4conv.plan_quantize(source).made.source.files] == [
        "model.safetensors"
    ]


def test_a_single_pickle_is_a_source(tmp_path: Path):
    path = tmp_path / "consolidated.00.pth"
    torch.save(PLAIN | {f"{Q}.weight": random(64, 128).bfloat16()}, path)
    assert f"{Q}.weight" in {
        row.name for row in nf4conv.plan_quantize(path).made.rows() if row.action == "pack"
    }


# --- AutoRound 0.16: names and configs are those that it wrote for a Llama ------------------------

AUTO_ROUND = {"quant_method": "auto-round", "autoround_version": "0.16.1", "sym": True}
AS_COMPRESSED = AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}
BLOCKS_OF_FP8 = {"group_size": [128, 128], "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("fp8 blocks", {"packing_format": "auto_round:fp8", "data_type": "fp", **BLOCKS_OF_FP8}),
        ("fp8 compressed-tensors", {"packing_format": "auto_round:fp8_static", "data_type": "fp"}),
        ("mxfp4 compressed-tensors", AS_COMPRESSED | {"data_type": "mx_fp", "group_size": 32}),
        ("mxfp8", AS_COMPRESSED | {"data_type": "mx_fp", "group_size": 32}),
        ("nvfp4 compressed-tensors", AS_COMPRESSED | {"data_type": "nv_fp", "group_size": 16}),
    ],
)
def test_floats_of_autoround(tmp_path: Path, name: str, description: dict[str, Any]):
    source = source_of(tmp_path / "source", name)
    expected = tensors_of(dequantized(source))
    change_config(source, quantization_config=AUTO_ROUND | description)
    nf4conv.dequantize(source, tmp_path / "out", device="cpu")
    assert_same_tensors(tmp_path / "out", expected)


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
            "data_type 'nvfp4_v2'",
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
        nf4conv.dequantize(source, tmp_path / "out", device="cpu")
    assert "\n" not in str(error.value)
