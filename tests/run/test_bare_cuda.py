"""The engine without torch against bitsandbytes, and against the engine with torch: the same bytes
of `quantize` and the same values of `dequantize`. Needs a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_model
from four_bit import pack, write
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv.codec.ops import dequantize_4bit, quantize_4bit
from nf4conv.codec.quant_state import QuantState
from nf4conv.commands.planning import make_plan
from nf4conv.errors import SourceError
from nf4conv.options import DequantizeOptions, RunOptions
from nf4conv.plan.jobs import Plan
from nf4conv.run.device.choice import open_device
from nf4conv.run.device.on_driver.device import DriverBackend

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
}
SHAPES = {
    "model.layers.0.mlp.down_proj.weight": (1024, 4096),
    # more than one piece, mean over several thread blocks
    "model.layers.0.mlp.gate_proj.weight": (4096, 2304),
    # of another layer, for those of one layer go together
    "model.layers.1.mlp.up_proj.weight": (33, 65),
    "model.layers.0.self_attn.q_proj.weight": (37, 5),
    "model.layers.0.self_attn.k_proj.weight": (64, 130),
    "model.layers.0.self_attn.v_proj.weight": (39, 64),
    "model.layers.0.self_attn.o_proj.weight": (511, 513),
    "model.norm.weight": (64,),
    "model.embed_tokens.weight": (100, 64),
}


def write_source(folder: Path, dtype: torch.dtype) -> Path:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        for name, shape in SHAPES.items()
    }
    tensors["model.layers.0.self_attn.v_proj.weight"][0] = 0
    config = CONFIG | {"vocab_size": 100, "torch_dtype": str(dtype)[6:]}
    return save_model(folder, tensors, config)


GPU = {"device": "cuda", "workers": 3, "buffer_size": 12 * 2**20}
PACKED = {name: shape for name, shape in SHAPES.items() if "v_proj" not in name and "proj" in name}


def packed_checkpoint(folder: Path, dtype: torch.dtype, **options: Any) -> dict[str, torch.Tensor]:
    """The stored tensors of a checkpoint in that folder."""
    generator = torch.Generator().manual_seed(1)
    stored = {"model.norm.weight": torch.ones(64, dtype=dtype)}
    for name, shape in PACKED.items():
        weight = (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        weight.view(-1)[:64] = 0
        stored |= pack(name, weight, **options)
    write(folder, stored)
    return stored


def decoded(
    stored: dict[str, torch.Tensor], name: str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Decodes a stored weight with the codec."""
    prefix = f"{name}."
    parts = {key[len(prefix) :]: part for key, part in stored.items() if key.startswith(prefix)}
    return dequantize_4bit(stored[name], QuantState.from_components(parts), dtype=dtype)


def is_bare(output: Plan) -> bool:
    run = RunOptions(**GPU)
    backend = open_device(lambda: output.jobs, output.format, run, is_measured=False)
    return isinstance(backend, DriverBackend)


def same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    raw = expected.cpu().contiguous().view(-1).view(torch.uint8)
    assert torch.equal(actual.view(-1).view(torch.uint8), raw)


@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize(
    ("quant_type", "blocksize"), [("nf4", 64), ("fp4", 64), ("nf4", 32), ("nf4", 4096)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bytes_equal_bitsandbytes(tmp_path, dtype, quant_type, blocksize, double_quant):
    import bitsandbytes.functional as bnb

    source = write_source(tmp_path / "source", dtype)
    options = {"quant_type": quant_type, "blocksize": blocksize, "double_quant": double_quant}
    assert is_bare(nf4conv.plan_quantize(source, **options).made.output)
    report = nf4conv.quantize(source, tmp_path / "out", **options, **GPU)
    assert report.totals.packed == 7
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in load_file(source / "model.safetensors").items():
        if "proj" not in name:
            same_bytes(written.pop(name), weight)
            continue
        packed, state = bnb.quantize_4bit(
            weight.cuda(),
            blocksize=blocksize,
            quant_type=quant_type,
            compress_statistics=double_quant,
        )
        same_bytes(written.pop(name), packed)
        for key, part in state.as_dict(packed=True).items():
            same_bytes(written.pop(f"{name}.{key}"), part)
    assert not written


def test_kernels_are_compiled_where_there_is_no_c_compiler(tmp_path):
    source = write_source(tmp_path / "source", torch.bfloat16)
    command = [sys.executable, "-m", "nf4conv", "quantize", source, tmp_path / "out"]
    folders = {"XDG_CACHE_HOME": f"{tmp_path}/cache", "TRITON_CACHE_DIR": f"{tmp_path}/triton"}
    environment = os.environ | folders | {"CC": "false"}
    subprocess.run([*command, "--device", "cuda"], check=True, env=environment)
    assert list(tmp_path.glob("cache/nf4conv/*.json"))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.bfloat16, torch.nan), (torch.float16, torch.inf), (torch.float32, -torch.inf)],
    ids=str,
)
@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_non_finite_weights_are_refused(tmp_path, dtype, value, name):
    source = write_source(tmp_path / "source", dtype)
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, source / "model.safetensors")
    run = {"device": "cuda", "workers": 2, "buffer_size": 8 * 2**20}
    with pytest.raises(SourceError, match=f"{name}: has values that are NaN"):
        nf4conv.quantize(source, tmp_path / "out", **run)
    assert not (tmp_path / "out/config.json").exists()
    nf4conv.quantize(source, tmp_path / "kept", exclude=(name,), **run)
    with safe_open(tmp_path / "kept/model.safetensors", "pt") as file:
        assert file.get_tensor(name).dtype == dtype


def test_more_elements_than_an_int32_counts(tmp_path):
    rows, columns = 65536, 32832
    weight = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    save_model(tmp_path / "source", {"model.layers.0.mlp.up_proj.weight": weight.cpu()}, CONFIG)
    report = nf4conv.quantize(tmp_path / "source", tmp_path / "out", device="cuda")
    assert report.device_peak_bytes < 1.5e9
    written = load_file(tmp_path / "out/model.safetensors")
    packed, state = quantize_4bit(weight)
    name = "model.layers.0.mlp.up_proj.weight"
    same_bytes(written.pop(name), packed)
    for suffix, part in state.components().items():
        same_bytes(written.pop(f"{name}.{suffix}"), part)
    assert not written


# --- dequantize ---------------------------------------------------------------------------------


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
    assert is_bare(make_plan(source, DequantizeOptions()).output)
    report = nf4conv.dequantize(source, tmp_path / "out", **GPU)
    assert report.totals.decoded == len(PACKED)
    written = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(written.pop("model.norm.weight"), torch.ones(64, dtype=dtype))
    for name in PACKED:
        prefix = f"{name}."
        parts = {key[len(prefix) :]: stored[key].cuda() for key in stored if key.startswith(prefix)}
        state = bnb.QuantState.from_dict(parts, torch.device("cuda"))
        same_bytes(written.pop(name), bnb.dequantize_4bit(stored[name].cuda(), state))
    assert not written


def test_torch_is_not_imported_once_the_kernels_are_compiled(tmp_path):
    packed_checkpoint(tmp_path / "source", torch.bfloat16)
    assert is_bare(make_plan(tmp_path / "source", DequantizeOptions()).output)  # compiles them
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
    nf4conv.dequantize(
        tmp_path / "source", tmp_path / "out", device="cuda", workers=5, buffer_size=1
    )
    written = load_file(tmp_path / "out/model.safetensors")
    for name in PACKED:
        same_bytes(written[name], decoded(stored, name))
