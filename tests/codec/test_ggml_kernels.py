"""The kernels that decode GGUF's blocks, against torch's decoders, bit for bit; test_ggml.py
compares these with the package `gguf`.
"""

import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import LLAMA, SHAPES, blocks_of, write_gguf
from test_decode_kernels import DEVICE, DTYPES, by_kernel, same_bits
from test_two_engines import BARE, by_torch, same, without_torch
from test_two_engines import gpu as gpu

import nf4conv
from nf4conv.codec.decode.ggml import decode_ggml
from nf4conv.codec.kernels.ahead import ggml_decoder
from nf4conv.format.gguf import BY_NAME, LAYOUTS, PLAIN
from nf4conv.run.device.on_driver.device import DriverBackend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("block_type", LAYOUTS)
def test_every_type(block_type: str):
    """More rows than a program has, and columns that are no whole number of programs."""
    values_of_block = BY_NAME[block_type].values
    raw = blocks_of(
        block_type, 5 if values_of_block == 256 else 13, 10 if values_of_block == 256 else 20
    )
    for dtype in DTYPES if block_type in ("Q4_K", "Q8_0") else [torch.float32]:
        expected = decode_ggml(raw, block_type, dtype)
        codec = ggml_decoder(DEVICE, dtype, BY_NAME[block_type].number, None)
        found = by_kernel(codec, (raw,), expected.shape, raw.shape[1], 1)
        same_bits(found, expected)
        assert expected.unique().numel() > 100


TYPES = {
    "blk.0.attn_q.weight": "Q4_K",
    "blk.0.attn_k.weight": "Q8_0",
    "blk.0.attn_v.weight": "Q6_K",
    "blk.0.attn_output.weight": "Q5_K",
    "blk.0.ffn_gate.weight": "Q3_K",
    "blk.0.ffn_up.weight": "Q2_K",
    "blk.0.ffn_down.weight": "Q5_1",
    "token_embd.weight": "Q4_0",
    "output.weight": "Q5_0",
}

GEMMA: dict[str, Any] = {key.replace("llama.", "gemma."): found for key, found in LLAMA.items()}
GEMMA["general.architecture"] = "gemma"

# several pieces of the queries, which are cut between heads
ROTARY_SHAPES = {
    "token_embd.weight": (12, 256),
    "blk.0.attn_norm.weight": (256,),
    "blk.0.attn_q.weight": (288, 256),
    "blk.0.attn_q.bias": (288,),
    "blk.0.attn_k.weight": (8, 256),
    "blk.0.attn_v.weight": (9, 256),
    "blk.0.attn_output.weight": (16, 256),
    "blk.0.ffn_gate.weight": (5, 256),
    "blk.0.ffn_up.weight": (5, 256),
    "blk.0.ffn_down.weight": (4, 512),
    "output.weight": (12, 256),
}
Case = tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]
FAMILIES: dict[str, Case] = {
    "rows of heads": ("llama", LLAMA, ROTARY_SHAPES),
    "norms plus 1": (
        "gemma",
        GEMMA,
        {"blk.0.attn_norm.weight": (256,), "blk.0.attn_v.weight": (9, 256)},
    ),
}


def borrowed(folder: Path, model_type: str, dtype: str = "float16") -> dict[str, Any]:
    """A config; the interpreter rounds to bfloat16 otherwise than a GPU."""
    folder.mkdir()
    config = {
        "model_type": model_type,
        "architectures": [f"{model_type.title()}ForCausalLM"],
        "dtype": dtype,
        "vocab_size": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return {"config_from": str(folder)}


@pytest.mark.parametrize(
    ("family", "command"),
    [
        *((family, nf4conv.dequantize) for family in FAMILIES),
        ("rows of heads", nf4conv.quantize),
    ],
)
def test_commands_without_torch(
    tmp_path: Path,
    gpu: list[DriverBackend],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    command: Callable[..., Any],
):
    model_type, metadata, shapes = FAMILIES[family]
    types = dict(TYPES, **{"blk.0.ffn_up.weight": "Q4_1"})
    path = write_gguf(tmp_path / "model.gguf", metadata, types, shapes, default="F16")
    where = borrowed(tmp_path / "original", model_type)

    by_torch(command, path, tmp_path / "torch", **where)
    with monkeypatch.context() as patch:
        without_torch(patch)
        command(path, tmp_path / "bare", **where, **BARE)
    same(tmp_path / "bare", tmp_path / "torch")
    assert len(gpu) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("command", [nf4conv.quantize, nf4conv.dequantize])
def test_a_model_of_all_types(
    tmp_path: Path, gpu: list[DriverBackend], command: Callable[..., Any]
):
    """The bytes of the CPU, of torch on a GPU, and of the driver; large tensors are cut."""
    where = borrowed(tmp_path / "original", "llama", "bfloat16")
    shapes = {"output_norm.weight": (512,)}
    for layer in range(4):
        for name, shape in SHAPES.items():
            if name.startswith("blk.0.") and len(shape) == 2:
                rows = 5120 if layer == 0 else 320
                shapes[name.replace(".0.", f".{layer}.")] = (rows, 512)
    types = dict(zip([name for name in shapes if "blk" in name], cycle([*LAYOUTS, *PLAIN])))
    path = write_gguf(tmp_path / "model.gguf", {**LLAMA, "llama.block_count": 4}, types, shapes)
    command(path, tmp_path / "cpu", **where, **{**BARE, "device": "cpu"})
    by_torch(command, path, tmp_path / "torch", **where)
    command(path, tmp_path / "bare", **where, **BARE)
    same(tmp_path / "bare", tmp_path / "torch")
    same(tmp_path / "bare", tmp_path / "cpu")
    assert len(gpu) == 1
