"""`dequantize --dtype fp8`: MXFP4 experts of DeepSeek-V4 become FP8, and no value changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import command_line
import pytest
import torch
from checkpoints import contents, save_model, tensors_of
from safetensors.torch import save_file

import nf4conv
from nf4conv.errors import Nf4convError, PlanError
from nf4conv.options import Fp8Scales

CPU = {"device": "cpu", "workers": 2}
SMALL = {"device": "cpu", "workers": 2, "buffer_size": 1}
FP8 = {"dtype": "fp8"}

EXPERT = "layers.0.ffn.experts.1.w2"
WEIGHT = f"{EXPERT}.weight"
TRUNK = "layers.0.attn.wq_a"
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "n_routed_experts": 2,
    "torch_dtype": "bfloat16",
    "expert_dtype": "fp4",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}


def random_bytes(*shape: int, high: int = 256) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=GENERATOR)


GENERATOR = torch.Generator()


def v4() -> dict[str, torch.Tensor]:
    """Names, dtypes and layout of DeepSeek-V4, small: experts of several blocks, partial ones too;
    what is kept in FP8, BF16 and F32; a layer that predicts the token after the next one.
    """
    GENERATOR.manual_seed(48)
    tensors = {
        "embed.weight": torch.randn(96, 160, generator=GENERATOR).to(torch.bfloat16),
        "head.weight": torch.randn(96, 160, generator=GENERATOR).to(torch.bfloat16),
    }
    for place in ("layers.0", "mtp.0"):
        for module in ("attn.wq_a", "ffn.shared_experts.w1"):
            values = random_bytes(200, 160) & 0xBF  # no NaN
            tensors[f"{place}.{module}.weight"] = values.view(torch.float8_e4m3fn)
            scale = random_bytes(2, 2, high=8) + 118
            tensors[f"{place}.{module}.scale"] = scale.view(torch.float8_e8m0fnu)
        for expert in range(2):
            for part, (rows, columns) in {"w1": (200, 160), "w2": (160, 192)}.items():
                name = f"{place}.ffn.experts.{expert}.{part}"
                tensors[f"{name}.weight"] = random_bytes(rows, columns // 2).view(torch.int8)
                scale = random_bytes(rows, columns // 32, high=15) + 110
                tensors[f"{name}.scale"] = scale.view(torch.float8_e8m0fnu)
        tensors[f"{place}.ffn.gate.weight"] = torch.randn(2, 160, generator=GENERATOR).to(
            torch.bfloat16
        )
        tensors[f"{place}.ffn.gate.bias"] = torch.randn(2, generator=GENERATOR)
        tensors[f"{place}.hc_attn_fn"] = torch.randn(4, 64, generator=GENERATOR)
    return tensors


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] = CONFIG) -> Path:
    """Writes two shards; scales are in the second one, and may be away from their values."""
    folder.mkdir()
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map = {name: files[name.endswith(".scale")] for name in tensors}
    for file in files:
        content = {name: part for name, part in tensors.items() if weight_map[name] == file}
        save_file(content, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", v4())


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("scales", [None, "e8m0", "float32"])
def test_both_decode_to_equal_values(tmp_path: Path, source: Path, scales: Fp8Scales | None):
    """And what was in FP8, or in floats, is as it was."""
    out = tmp_path / "out"
    report = nf4conv.dequantize(source, out, **{**FP8, "fp8_scales": scales}, **CPU)
    assert (report.totals.decoded, report.totals.copied) == (8, 16)
    assert report.totals.bytes_before == sum(part.nbytes for part in v4().values())
    assert json.loads((out / "config.json").read_text()) == {**CONFIG, "expert_dtype": "fp8"}
    before, after = v4(), tensors_of(out)
    assert before.keys() == after.keys()
    wanted = torch.float32 if scales == "float32" else torch.float8_e8m0fnu
    for name, tensor in after.items():
        if name.endswith(".scale"):
            assert tensor.dtype == wanted
        if ".experts." in name and name.endswith(".weight"):
            assert tensor.dtype == torch.float8_e4m3fn
            rows, pairs = before[name].shape
            assert tensor.shape == (rows, 2 * pairs)
            grid = after[name.replace(".weight", ".scale")].shape
            assert grid == (-(-rows // 128), -(-2 * pairs // 128))
        elif ".experts." not in name and not name.endswith(".scale"):
            assert same_bytes(tensor, before[name])
        elif ".experts." not in name:
            assert torch.equal(tensor.float(), before[name].float())
    for place in (source, out):
        nf4conv.dequantize(place, tmp_path / f"{place.name}-16", **CPU)
    decoded = tensors_of(tmp_path / "source-16")
    again = tensors_of(tmp_path / "out-16")
    assert all(same_bytes(again[name], tensor) for name, tensor in decoded.items())


def flip(out: Path, name: str) -> None:
    """Changes a bit of a tensor of the only weight file."""
    [file] = out.glob("*.safetensors")
    tensors = tensors_of(out)
    tensors[name].view(torch.uint8)[-1, -1] ^= 1
    save_file(tensors, file)


def faults_of(out: Path, source: Path) -> set[tuple[str, str]]:
    """The checks that fail, and the tensors."""
    report = nf4conv.verify(out, source=source, **CPU)
    return {(fault.check, fault.tensor) for fault in report.findings if fault.is_fault}


def test_verify_compares_every_byte(tmp_path: Path, source: Path):
    out = tmp_path / "out"
    nf4conv.dequantize(source, out, **FP8, **CPU)
    for run in (CPU, SMALL):
        report = nf4conv.verify(out, source=source, exact=True, **run)
        assert report.passed
        assert report.relation == "decoded"
    flip(out, WEIGHT)
    flip(out, f"{EXPERT}.scale")
    assert faults_of(out, source) == {("copies", WEIGHT), ("copies", f"{EXPERT}.scale")}


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [None, "float32"])
def test_a_gpu_gives_the_same_bytes(tmp_path: Path, source: Path, scales: Fp8Scales | None):
    options = {**FP8, "fp8_scales": scales}
    for device in ("cpu", "cuda"):
        nf4conv.dequantize(source, tmp_path / device, **options, device=device)
        assert nf4conv.verify(tmp_path / device, source=source, device=device).passed
    assert contents(tmp_path / "cpu") == contents(tmp_path / "cuda")


def test_a_block_too_wide_is_refused_by_name(tmp_path: Path):
    tensors = v4()
    scale = tensors[f"{EXPERT}.scale"].view(torch.uint8)
    scale[130, 5] = 150
    source = write(tmp_path / "source", tensors)
    words = ["dequantize", str(source), str(tmp_path / "out"), "--dtype", "fp8", "--device", "cpu"]
    done = command_line.run(*words, "--quiet")
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert f"{WEIGHT}: " in line
    assert "values are not exact in FP8" in line
    assert "--dtype bfloat16 decodes them" in line
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert not (tmp_path / "out" / "config.json").exists()


class Checkpoint(NamedTuple):
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]


def without_experts(made: Checkpoint) -> None:
    for name in list(made.tensors):
        if ".experts." in name:
            del made.tensors[name]


def in_int8(made: Checkpoint) -> None:
    made.tensors[f"{TRUNK}.weight"] = made.tensors[f"{TRUNK}.weight"].view(torch.int8)
    made.tensors[f"{TRUNK}.scale"] = torch.ones(2, 2)


def of_another_method(made: Checkpoint) -> None:
    made.config["quantization_config"]["quant_method"] = "compressed-tensors"


def narrow_blocks(made: Checkpoint) -> None:
    without_experts(made)
    made.tensors["layers.0.ffn.experts.0.w1.weight"] = random_bytes(8, 16).view(torch.int8)
    scale = torch.full((8, 1), 120, dtype=torch.uint8)
    made.tensors["layers.0.ffn.experts.0.w1.scale"] = scale.view(torch.float8_e8m0fnu)
    made.config["quantization_config"]["weight_block_size"] = [100, 80]


def in_float32(made: Checkpoint) -> None:
    made.tensors[f"{TRUNK}.scale"] = made.tensors[f"{TRUNK}.scale"].float()


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (without_experts, FP8, "is for experts in MXFP4 of a model that is in FP8 otherwise"),
        (of_another_method, FP8, "is for experts in MXFP4 of a model that is in FP8 otherwise"),
        (in_int8, FP8, rf"{TRUNK}\.weight: is INT8, .* --dtype bfloat16 decodes it"),
        (narrow_blocks, FP8, r"weight_block_size of its config is \[100, 80\]"),
        (in_float32, {**FP8, "fp8_scales": "e8m0"}, rf"{TRUNK}\.scale: is F32"),
        (None, {"fp8_scales": "e8m0"}, "means nothing without --dtype fp8"),
        (
            None,
            {"dtype": "bfloat16", "fp8_scales": "float32"},
            "means nothing without --dtype fp8",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_without_loss_is_refused_before_anything_is_written(
    tmp_path: Path,
    damage: Callable[[Checkpoint], None] | None,
    options: dict[str, Any],
    message: str,
):
    made = Checkpoint(v4(), json.loads(json.dumps(CONFIG)))
    if damage is not None:
        damage(made)
    source = write(tmp_path / "source", *made)
    with pytest.raises(PlanError, match=message):
        nf4conv.dequantize(source, tmp_path / "out", **options, **CPU)
    assert not (tmp_path / "out").exists()


def test_scales_of_experts_are_as_those_of_the_rest(tmp_path: Path):
    """In float32, if those of all others are."""
    tensors = v4()
    for name in tensors:
        if name.endswith(".scale") and ".experts." not in name:
            tensors[name] = tensors[name].float() * 1.5
    source = write(tmp_path / "source", tensors)
    nf4conv.dequantize(source, tmp_path / "out", **FP8, **CPU)
    after = tensors_of(tmp_path / "out")
    assert {part.dtype for name, part in after.items() if name.endswith(".scale")} == {
        torch.float32
    }
    assert torch.equal(after[f"{TRUNK}.scale"], tensors[f"{TRUNK}.scale"])
    assert nf4conv.verify(tmp_path / "out", source=source, **CPU).passed


def test_config_of_v4_1_and_of_none(tmp_path: Path):
    """V4.1 has expert_dtype inside, and blocks of 32 × 32; where it is missing it is added."""
    inside = {**CONFIG["quantization_config"], "expert_dtype": "fp4"}
    plain = {key: value for key, value in CONFIG.items() if key != "expert_dtype"}
    expected = {**plain, "quantization_config": {**inside, "expert_dtype": "fp8"}}
    cases = {
        "inside": ({**plain, "quantization_config": inside}, expected),
        "missing": (plain, {**plain, "expert_dtype": "fp8"}),
    }
    for name, (config, wanted) in cases.items():
        source = write(tmp_path / name, v4(), config)
        nf4conv.dequantize(source, tmp_path / f"{name}-out", **FP8, **CPU)
        assert json.loads((tmp_path / f"{name}-out" / "config.json").read_text()) == wanted


def test_transformers_takes_the_experts_for_fp8(tmp_path: Path, source: Path):
    from transformers import AutoConfig

    nf4conv.dequantize(source, tmp_path / "out", **FP8, **CPU)
    for place, dtype in ((source, "fp4"), (tmp_path / "out", "fp8")):
        config = AutoConfig.from_pretrained(place)
        assert config.quantization_config["expert_dtype"] == dtype


def test_other_sources_are_told_what_to_do(tmp_path: Path):
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}
    folder = tmp_path / "plain"
    save_model(folder, tensors, {})
    with pytest.raises(Nf4convError, match="no tensor of this checkpoint is quantized"):
        nf4conv.dequantize(folder, tmp_path / "out", **FP8, **CPU)
