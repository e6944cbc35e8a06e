"""Patterns of an adapter's config as PEFT matches them, and tensors that cannot be merged."""

from pathlib import Path

import pytest
import torch
from checkpoints import save_adapter, write_source
from hostile import command, refused
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file

from nf4conv.sources.adapters.adapter import Adapter

pytestmark = pytest.mark.oracle

PATHS = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.self_attn.q_proj",
    "model.layers.1.mlp.experts.gate_up_proj",
    "lm_head",
    "q_proj",
]
SANE = [
    {"q_proj": 1, "model.layers.10": 2},
    {r".*layers\.1\.": 1, r"layers\.\d+\.self_attn\.[qk]_proj": 2},
    {r"^(?!.*layers\.0).*q_proj$": 1, r"(self_attn|mlp)\.\w+": 2},
    {r"(?<=\.)q_proj": 1, "": 4, r"\bq\w*": 5},
]


@pytest.mark.parametrize("patterns", SANE, ids=str)
def test_they_are_matched_as_peft_does(patterns: dict[str, int]):
    config = {"r": 9, "rank_pattern": patterns}
    adapter = Adapter("here", Path("adapter"), config)
    for path in PATHS:
        assert adapter.rank(path) == patterns.get(get_pattern_key(patterns, path), 9)


UP = "base_model.model.model.layers.0.mlp.up_proj"


def write_adapter(folder: Path, dtype: torch.dtype = torch.float32, **config: object) -> Path:
    factors = {
        f"{UP}.lora_A.weight": torch.ones((4, 128), dtype=dtype),
        f"{UP}.lora_B.weight": torch.ones((512, 4), dtype=dtype),
    }
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    return save_adapter(folder, factors, described)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32], ids=str)
def test_factors_that_are_no_floats_are_refused(tmp_path: Path, dtype: torch.dtype):
    source = write_source(tmp_path / "source", layers=2)
    adapter = write_adapter(tmp_path / "adapter", dtype)
    for words in (("quantize", source), ("dequantize", source)):
        error = refused(command(*words, tmp_path / "out", "--lora", adapter))
        assert "adapter_model.safetensors" in error
        assert "lora_A.weight is " in error
    assert not (tmp_path / "out").exists()


def test_a_complex_tensor_replaces_no_float(tmp_path: Path):
    source = write_source(tmp_path / "source", layers=2)
    adapter = write_adapter(tmp_path / "adapter")
    norm = torch.ones(64, dtype=torch.complex64)
    name = "base_model.model.model.layers.0.input_layernorm.weight"
    save_file({name: norm}, adapter / "adapter_model.safetensors")
    error = refused(command("quantize", source, tmp_path / "out", "--lora", adapter))
    assert f"{name} is C64, and is to replace" in error
