"""`dequantize` without torch against bitsandbytes, and against the engine with torch: same values.
Needs a GPU.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from api import dequantize_checkpoint, plan_dequantization
from four_bit import pack, write
from safetensors.torch import load_file

from nf4conv.codec.ops import dequantize_4bit
from nf4conv.codec.quant_state import QuantState
from nf4conv.errors import SourceError
from nf4conv.options import DequantizeOptions, RunOptions
from nf4conv.run.device.choice import open_devices
from nf4conv.run.device.on_driver.backend import DriverBackend

pytestmark = pytest.mark.gpu

SHAPES = {
    "model.layers.0.mlp.down_proj.weight": (1024, 4096),
    "model.layers.0.mlp.gate_proj.weight": (4096, 2304),  # more than one piece
    "model.layers.0.mlp.up_proj.weight": (33, 65),
    "model.layers.0.self_attn.q_proj.weight": (37, 5),
    "model.layers.0.self_attn.k_proj.weight": (64, 130),
    "model.layers.0.self_attn.o_proj.weight": (511, 513),
}
GPU = RunOptions(device="cuda", workers=3, buffer_size=12 * 2**20)
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def packed_checkpoint(folder: Path, dtype: torch.dtype, **options: Any) -> dict[str, torch.Tensor]:
    """The stored tensors of a checkpoint in that folder."""
    generator = torch.Generator().manual_seed(1)
    stored = {"model.norm.weight": torch.ones(64, dtype=dtype)}
    for name, shape in SHAPES.items():
        weight = (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        weight.view(-1)[:64] = 0
        stored |= pack(name, weight, **options)
    write(folder, stored)
    return stored


def parts_of(stored: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {
        key.removeprefix(f"{name}."): part
        for key, part in stored.items()
        if key.startswith(f"{name}.")
    }


def is_bare(source: Path, options: DequantizeOptions | None = None) -> bool:
    plan = plan_dequantization(source, options)
    output = plan.output
    devices = open_devices(lambda: output.jobs, output.format, GPU, is_measured=False)
    return isinstance(devices.main, DriverBackend)


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual.view(BITS[actual.dtype]), expected.cpu().view(BITS[actual.dtype]))


@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize(
    ("quant_type", "blocksize"),
    [("nf4", 64), ("fp4", 64), ("nf4", 32), ("nf4", 4096), ("fp4", 512)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_values_equal_bitsandbytes(tmp_path, dtype, quant_type, blocksize, double_quant):
    import bitsandbytes.functional as bnb

    source = tmp_path / "source"
    stored = packed_checkpoint(
        source, dtype, quant_type=quant_type, blocksize=blocksize, double_quant=double_quant
    )
    assert is_bare(source)
    report = dequantize_checkpoint(source, tmp_path / "out", None, GPU)
    assert report.decoded == len(SHAPES)
    written = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(written.pop("model.norm.weight"), torch.ones(64, dtype=dtype))
    for name in SHAPES:
        parts = {key: part.cuda() for key, part in parts_of(stored, name).items()}
        state = bnb.QuantState.from_dict(parts, torch.device("cuda"))
        same_bits(written.pop(name), bnb.dequantize_4bit(stored[name].cuda(), state))
    assert not written


def test_torch_is_not_imported_once_the_kernels_are_compiled(tmp_path):
    packed_checkpoint(tmp_path / "source", torch.bfloat16)
    assert is_bare(tmp_path / "source")  # compiles them
    program = (
        "import sys\nfrom nf4conv.cli import main\n"
        f"main(['dequantize', {str(tmp_path / 'source')!r}, {str(tmp_path / 'out')!r}], "
        f"standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert (tmp_path / "out/model.safetensors").exists()


@pytest.mark.parametrize("blocksize", [64, 4096])
def test_the_smallest_buffers(tmp_path, blocksize):
    """256 blocks of 4096 are more than a piece: the buffers grow to what cannot be cut."""
    stored = packed_checkpoint(tmp_path / "source", torch.float32, blocksize=blocksize)
    dequantize_checkpoint(
        tmp_path / "source",
        tmp_path / "out",
        None,
        RunOptions(device="cuda", workers=5, buffer_size=1),
    )
    written = load_file(tmp_path / "out/model.safetensors")
    for name in SHAPES:
        expected = dequantize_4bit(stored[name], QuantState.from_components(parts_of(stored, name)))
        same_bits(written[name], expected)


@pytest.mark.parametrize(
    "variant", ["float storage", "a row", "parts in another shard", "a map of its own"]
)
def test_variants(tmp_path, variant):
    name = "model.layers.0.mlp.up_proj.weight"
    weight = torch.randn(256, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    stored = pack(name, weight)
    if variant == "a map of its own":
        stored[f"{name}.nested_quant_map"] = stored[f"{name}.nested_quant_map"].bfloat16().float()
    expected = dequantize_4bit(stored[name], QuantState.from_components(parts_of(stored, name)))
    shards = [stored]
    if variant == "float storage":
        stored[name] = stored[name].view(-1).view(torch.bfloat16).view(-1, 1)
    elif variant == "a row":
        stored[name] = stored[name].view(1, -1)
    elif variant == "parts in another shard":
        shards = [{name: stored.pop(name)}, stored]
    source = write(tmp_path / "source", *shards)
    assert is_bare(source)
    dequantize_checkpoint(source, tmp_path / "out", None, GPU)
    same_bits(load_file(tmp_path / "out/model.safetensors")[name], expected)


def test_thousands_of_small_weights(tmp_path):
    stored: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for index in range(3000):
        name = f"model.layers.0.mlp.experts.{index}.up_proj.weight"
        stored |= pack(name, torch.randn(3, 32 + index % 40, generator=generator).bfloat16())
    source = write(tmp_path / "source", stored)
    assert is_bare(source)
    dequantize_checkpoint(source, tmp_path / "out", None, GPU)
    written = load_file(tmp_path / "out/model.safetensors")
    assert len(written) == 3000
    for name, found in written.items():
        same_bits(
            found, dequantize_4bit(stored[name], QuantState.from_components(parts_of(stored, name)))
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_weights_decoded_to_another_dtype_are_rounded_once(tmp_path, dtype):
    stored = packed_checkpoint(tmp_path / "source", torch.bfloat16)
    options = DequantizeOptions(dtype=str(dtype)[6:])
    assert is_bare(tmp_path / "source", options)
    dequantize_checkpoint(tmp_path / "source", tmp_path / "out", options, GPU)
    written = load_file(tmp_path / "out/model.safetensors")
    for name in SHAPES:
        state = QuantState.from_components(parts_of(stored, name))
        same_bits(written[name], dequantize_4bit(stored[name], state, dtype=dtype))


def test_a_damaged_quant_state_is_named(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    stored = pack(name, torch.randn(64, 64).bfloat16())
    key = next(key for key in stored if "quant_state" in key)
    blob = bytes(stored[key].tolist()).replace(b"nested_offset", b"nested_offsex")
    stored[key] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    source = write(tmp_path / "source", stored)
    with pytest.raises(SourceError, match=f"{name}.quant_state.*: lacks nested_offset"):
        dequantize_checkpoint(source, tmp_path / "out", None, GPU)
