"""A plan knows to the byte how large the result will be, but for one number of each weight: how
many digits the nested offset of double quantization has is known when the weight has been read.
"""

import json
from pathlib import Path

import pytest
from inputs import SOURCES
from safetensors import safe_open

import nf4conv
from nf4conv.commands.planning import make_plan
from nf4conv.format.layout import QUANT_STATE_PREFIX
from nf4conv.options import DequantizeOptions

LONGEST = len("-1.1754943508222875e-38")  # digits that are reserved for a nested offset
CPU = {"device": "cpu", "workers": 2, "buffer_size": 1}


KINDS = (
    "plain", "gguf BF16", "gguf Q6_K", "fp8 blocks", "int4 compressed-tensors", "gptq", "gpt-oss",
    "int8 bitsandbytes", "nf4",
)  # fmt: skip


def source_of(kind: str, folder: Path) -> Path:
    """Writes a checkpoint of golden/inputs.py."""
    SOURCES[kind](folder)
    return folder / "model.gguf" if kind.startswith("gguf") else folder


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
@pytest.mark.parametrize("kind", KINDS)
def test_quantize(tmp_path: Path, kind: str, double_quant: bool, shard_size: int):
    source = source_of(kind, tmp_path / "source")
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
@pytest.mark.parametrize("kind", KINDS[1:])
def test_dequantize(tmp_path: Path, kind: str, shard_size: int):
    source = source_of(kind, tmp_path / "source")
    plan = make_plan(source, DequantizeOptions(max_shard_size=shard_size))
    nf4conv.dequantize(source, tmp_path / "out", max_shard_size=shard_size, **CPU)
    assert plan.totals.bytes_after == size_of(tmp_path / "out")
