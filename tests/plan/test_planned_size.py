"""A plan knows to the byte how large the result will be, but for one number of each weight: how
many digits the nested offset of double quantization has is known when the weight has been read.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import write_source
from gguf_files import write_gguf
from safetensors import safe_open
from test_encoded import (
    Encoded,
    bitsandbytes_4bit,
    bitsandbytes_8bit,
    fp8_blocks,
    gptq_4bit,
    int4_compressed_tensors,
    mxfp4_experts,
    write,
)

import nf4conv
from nf4conv.commands.dequantize import make_plan
from nf4conv.format.layout import QUANT_STATE_PREFIX
from nf4conv.options import DequantizeOptions

LONGEST = len("-1.1754943508222875e-38")  # digits that are reserved for a nested offset
CPU = {"device": "cpu", "workers": 2, "buffer_size": 1}


def make_gguf(block_type: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder.mkdir()
        return write_gguf(folder / "model.gguf", default=block_type)

    return make


def make_encoded(encode: Callable[[], Encoded]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        encoded = encode()
        return write(folder, encoded.stored, encoded.description)

    return make


SOURCES = {
    "bf16": write_source,
    "GGUF BF16": make_gguf("BF16"),
    "GGUF Q6_K": make_gguf("Q6_K"),
    "FP8": make_encoded(fp8_blocks),
    "INT4": make_encoded(int4_compressed_tensors),
    "GPTQ": make_encoded(gptq_4bit),
    "MXFP4": make_encoded(mxfp4_experts),
    "8 bits": make_encoded(bitsandbytes_8bit),
    "4 bits": make_encoded(bitsandbytes_4bit),
}


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def spare_digits(folder: Path) -> int:
    """How many digits fewer than are reserved the nested offsets in a checkpoint have."""
    spare = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                if QUANT_STATE_PREFIX in name:
                    state = json.loads(opened.get_tensor(name).numpy().tobytes())
                    if "nested_offset" in state:
                        spare += LONGEST - len(repr(state["nested_offset"]))
    return spare


@pytest.mark.parametrize("shard_size", [10**9, 40_000], ids=["one file", "shards"])
@pytest.mark.parametrize("double_quant", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("kind", SOURCES)
def test_quantize(tmp_path: Path, kind: str, double_quant: bool, shard_size: int):
    source = SOURCES[kind](tmp_path / "source")
    options = {"double_quant": double_quant, "max_shard_size": shard_size}
    plan = nf4conv.plan_quantize(source, **options, **CPU)
    report = plan.execute(tmp_path / "out")
    written = size_of(tmp_path / "out")
    spare = spare_digits(tmp_path / "out")
    assert report.totals.packed > 0
    assert report.totals.bytes_after == written
    assert plan.totals.bytes_after == written + spare
    assert (spare > 0) == double_quant


@pytest.mark.parametrize("shard_size", [10**9, 40_000], ids=["one file", "shards"])
@pytest.mark.parametrize("kind", [kind for kind in SOURCES if kind != "bf16"])
def test_dequantize(tmp_path: Path, kind: str, shard_size: int):
    source = SOURCES[kind](tmp_path / "source")
    plan = make_plan(source, DequantizeOptions(max_shard_size=shard_size))
    nf4conv.dequantize(source, tmp_path / "out", max_shard_size=shard_size, **CPU)
    assert plan.totals().bytes_after == size_of(tmp_path / "out")
