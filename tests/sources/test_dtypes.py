"""`dequantize --dtype` of every released format: float32 is the product in float32, bfloat16 and
float16 are that rounded once, and float16 refuses by name what it cannot hold.
"""

import struct
from pathlib import Path
from typing import Final

import pytest
import torch
from checkpoints import tensors_of
from inputs import BLOCKS, ENCODED, SOURCES, Tensor, save
from test_damaged_formats import read

import nf4conv
from nf4conv.errors import SourceError

OF_POWERS_OF_TWO: Final = (
    "fp8 powers of two", "fp8 casts", "mxfp8", "mxfp4 rows", "mxfp4 compressed-tensors",
    "deepseek-v4", "gpt-oss",
)  # fmt: skip
"""Formats whose values have so few bits that bfloat16 holds them too."""

FORMATS: Final = [
    *ENCODED,
    *("deepseek-v4", "kimi", "gpt-oss"),
    *(f"gguf {name}" for name in BLOCKS if name not in ("F32", "F16", "BF16")),
]
HALVES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def place_of(folder: Path, name: str) -> Path:
    SOURCES[name](folder)
    gguf = folder / "model.gguf"
    return gguf if gguf.exists() else folder


@pytest.mark.parametrize("name", FORMATS)
def test_every_dtype_is_rounded_once_from_the_product_in_float32(tmp_path: Path, name: str):
    source = place_of(tmp_path / "source", name)
    decoded = {}
    for dtype in ("float32", *HALVES):
        nf4conv.dequantize(source, tmp_path / dtype, device="cpu", dtype=dtype)
        decoded[dtype] = tensors_of(tmp_path / dtype)
    exact = decoded["float32"]
    for dtype, half in HALVES.items():
        for key, tensor in decoded[dtype].items():
            if tensor.dtype != torch.float32:  # what is in float32 by design stays
                assert torch.equal(tensor.view(torch.int16), exact[key].to(half).view(torch.int16))
    matrices = {key: one for key, one in decoded["bfloat16"].items() if one.dim() > 1}
    halves = [exact[key] for key, one in matrices.items() if one.dtype != torch.float32]
    widened = [torch.equal(one.bfloat16().float(), one) for one in halves]
    has_few_bits = name in (*OF_POWERS_OF_TWO, "gguf MXFP4", "gguf NVFP4")
    assert all(widened) if has_few_bits else not all(widened)


def raised(tensor: Tensor) -> Tensor:
    """Scales with the largest finite magnitude, or one with which values are above 65504."""
    largest = {
        "F32": struct.pack("<f", 1e30),
        "BF16": struct.pack("<f", 1e30)[2:],
        "F16": struct.pack("<e", 60000.0),
        "F8_E8M0": bytes([200]),
        "U8": bytes([200]),
        "F8_E4M3": bytes([0x7E]),
    }[tensor.dtype]
    count = len(tensor.content) // len(largest)
    return tensor._replace(content=largest * count)


SCALES: Final = (
    ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".scale", ".scales", ".SCB", "_scales",
    "._weight_scale",
)  # fmt: skip
WITHOUT_SCALES: Final = "fp8 casts"


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if not name.startswith("gguf") and name != WITHOUT_SCALES]
)
def test_float16_refuses_by_name_what_it_cannot_hold(tmp_path: Path, name: str):
    source = place_of(tmp_path / "source", name)
    [file] = source.glob("*.safetensors")
    tensors = read(file)
    scale = next(key for key in reversed(tensors) if key.endswith(SCALES))
    for key in tensors:  # one weight may have scales of two levels
        if key.endswith(SCALES) and key.rpartition(".")[0] == scale.rpartition(".")[0]:
            tensors[key] = raised(tensors[key])
        if key.endswith(".weight_global_scale"):
            tensors[key] = tensors[key]._replace(content=struct.pack("<f", 1e-6))
    save(file, tensors)
    with pytest.raises(SourceError, match="too large for float16") as error:
        nf4conv.dequantize(source, tmp_path / "out", device="cpu", dtype="float16")
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{error.value.path}: {error.value.tensor}: ")
    stem = scale.rpartition(".")[0].removesuffix(".weight")
    assert name == "nvfp4 compressed-tensors" or str(error.value.tensor).startswith(stem)
    assert not (tmp_path / "out" / "config.json").exists()
    for dtype in ("bfloat16", "float32"):
        nf4conv.dequantize(source, tmp_path / dtype, device="cpu", dtype=dtype)


def test_a_scale_of_gguf_that_float16_cannot_multiply(tmp_path: Path):
    source = place_of(tmp_path / "source", "gguf Q8_0")
    content = bytearray(source.read_bytes())
    content[-34:-32] = struct.pack("<e", 60000.0)  # the last block of the file
    content[-32:] = bytes([100]) * 32
    source.write_bytes(content)
    with pytest.raises(SourceError, match=r"model.gguf: [\w.]+: .*too large for float16"):
        nf4conv.dequantize(source, tmp_path / "out", device="cpu", dtype="float16")
