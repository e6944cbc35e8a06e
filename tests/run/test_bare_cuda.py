"""The engine without torch against the one with it, and against bitsandbytes: same bytes. Needs a
GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from api import plan_quantization, quantize_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nf4conv.codec.ops import quantize_4bit
from nf4conv.errors import SourceError
from nf4conv.options import QuantizeOptions, RunOptions
from nf4conv.run.device.choice import open_devices
from nf4conv.run.device.on_driver import driver
from nf4conv.run.device.on_driver.backend import DriverBackend

pytestmark = pytest.mark.gpu

SHAPES = {
    "model.layers.0.mlp.down_proj.weight": (1024, 4096),
    "model.layers.0.mlp.gate_proj.weight": (
        4096,
        2304,
    ),  # more than one piece, mean over several thread blocks
    "model.layers.0.mlp.up_proj.weight": (33, 65),
    "model.layers.0.self_attn.q_proj.weight": (37, 5),
    "model.layers.0.self_attn.k_proj.weight": (64, 130),
    "model.layers.0.self_attn.v_proj.weight": (39, 64),
    "model.layers.0.self_attn.o_proj.weight": (511, 513),
    "model.norm.weight": (64,),
    "model.embed_tokens.weight": (100, 64),
}


def write_source(folder: Path, dtype: torch.dtype) -> Path:
    generator = torch.Generator().manual_seed(1)
    folder.mkdir()
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        for name, shape in SHAPES.items()
    }
    tensors["model.layers.0.self_attn.v_proj.weight"][0] = 0
    save_file(tensors, folder / "model.safetensors")
    name = str(dtype).removeprefix("torch.")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 100,
        "torch_dtype": name,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize(
    ("quant_type", "blocksize"), [("nf4", 64), ("fp4", 64), ("nf4", 32), ("nf4", 4096)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bytes_equal_bitsandbytes(tmp_path, dtype, quant_type, blocksize, double_quant):
    import bitsandbytes.functional as bnb

    source = write_source(tmp_path / "source", dtype)
    options = QuantizeOptions(quant_type=quant_type, blocksize=blocksize, double_quant=double_quant)
    run = RunOptions(device="cuda", workers=3, buffer_size=12 * 2**20)
    output = plan_quantization(source, options).output
    devices = open_devices(lambda: output.jobs, output.format, run, is_measured=False)
    assert isinstance(devices.main, DriverBackend)
    report = quantize_checkpoint(source, tmp_path / "out", options, run)
    assert report.packed == 7
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in load_file(source / "model.safetensors").items():
        if "proj" not in name:
            assert torch.equal(written.pop(name).view(torch.uint8), weight.view(torch.uint8)), name
            continue
        packed, state = bnb.quantize_4bit(
            weight.cuda(),
            blocksize=blocksize,
            quant_type=quant_type,
            compress_statistics=double_quant,
        )
        expected = {name: packed} | {
            f"{name}.{key}": part for key, part in state.as_dict(packed=True).items()
        }
        for key, part in expected.items():
            found = written.pop(key)
            assert found.shape == part.shape, key
            assert torch.equal(
                found.view(torch.uint8), part.cpu().contiguous().view(torch.uint8)
            ), key
    assert not written


def test_bytes_equal_those_of_the_torch_engine(tmp_path, monkeypatch):
    source = write_source(tmp_path / "source", torch.bfloat16)
    run = RunOptions(device="cuda", workers=4, buffer_size=8 * 2**20)
    quantize_checkpoint(source, tmp_path / "bare", None, run)
    monkeypatch.setattr(driver, "device_count", lambda: 0)
    quantize_checkpoint(source, tmp_path / "torch", None, run)
    bare, by_torch = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("bare", "torch")
    )
    assert bare == by_torch


def test_kernels_are_compiled_where_there_is_no_c_compiler(tmp_path):
    command = [
        sys.executable,
        "-m",
        "nf4conv",
        "quantize",
        write_source(tmp_path / "source", torch.bfloat16),
    ]
    folders = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    subprocess.run(
        [*command, tmp_path / "out", "--device", "cuda"],
        check=True,
        env=os.environ | folders | {"CC": "false"},
    )
    assert list(tmp_path.glob("cache/nf4conv/*.json"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_non_finite_weights_are_refused(tmp_path, dtype, value, name):
    source = write_source(tmp_path / "source", dtype)
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, source / "model.safetensors")
    run = RunOptions(device="cuda", workers=2, buffer_size=8 * 2**20)
    with pytest.raises(SourceError, match=f"{name}: 1 of "):
        quantize_checkpoint(source, tmp_path / "out", None, run)
    assert not (tmp_path / "out/config.json").exists()
    quantize_checkpoint(source, tmp_path / "kept", QuantizeOptions(exclude=(name,)), run)
    with safe_open(tmp_path / "kept/model.safetensors", "pt") as file:
        assert file.get_tensor(name).dtype == dtype


def test_more_elements_than_an_int32_counts(tmp_path):
    rows, columns = 65536, 32832
    weight = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    (tmp_path / "source").mkdir()
    save_file(
        {"model.layers.0.mlp.up_proj.weight": weight.cpu()}, tmp_path / "source/model.safetensors"
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    report = quantize_checkpoint(
        tmp_path / "source", tmp_path / "out", None, RunOptions(device="cuda")
    )
    assert report.run.device_peak_bytes < 1.5e9
    written = load_file(tmp_path / "out/model.safetensors")
    packed, state = quantize_4bit(weight)
    expected = {"": packed} | {f".{suffix}": part for suffix, part in state.components().items()}
    for suffix, part in expected.items():
        found = written.pop(f"model.layers.0.mlp.up_proj.weight{suffix}")
        assert torch.equal(found.view(torch.uint8), part.cpu().contiguous().view(torch.uint8)), (
            suffix
        )
    assert not written
