"""Patterns of an adapter's config: as PEFT matches them, and never for ever."""

import time
from pathlib import Path

import pytest
import torch
from checkpoints import save_adapter, write_source
from hostile import command, refused
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file

from nf4conv.errors import SourceError
from nf4conv.sources.adapters.adapter import values_by_path

pytestmark = pytest.mark.oracle

PATHS = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.self_attn.q_proj",
    "model.layers.1.mlp.experts.gate_up_proj",
    "lm_head",
    "q_proj",
    "a\n",
]
SANE = [
    {"q_proj": 1, "model.layers.10": 2},
    {r".*layers\.1\.": 1, r"layers\.\d+\.self_attn\.[qk]_proj": 2},
    {"^model.*q_proj": 1, "lm_head": 2},
    {r"^(?!.*layers\.0).*q_proj$": 1, r"(self_attn|mlp)\.\w+": 2},
    {r"model\.layers\.(0|10)\.(.*)": 1, r"(?:.*\.)?gate_up_proj": 3},
    {r"(?<=\.)q_proj": 1, "": 4, r"\bq\w*": 5},
]
ENDLESS = ["(a+)+b", "(a|aa)+$c", ".*" * 60 + "x"]


@pytest.mark.parametrize("patterns", SANE, ids=str)
def test_they_are_matched_as_peft_does(patterns: dict[str, int]):
    found = values_by_path(patterns, PATHS, "here")
    for path in PATHS:
        key = get_pattern_key(patterns, path)
        assert found.get(path) == patterns.get(key)


def test_many_names_of_modules_are_matched_in_time():
    paths = [f"model.layers.{number}.mlp.up_proj" for number in range(2000)]
    found = values_by_path({path: number for number, path in enumerate(paths)}, paths, "here")
    assert list(found.values()) == list(range(2000))


@pytest.mark.parametrize("pattern", ENDLESS)
def test_none_takes_for_ever(pattern: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nf4conv.sources.adapters.adapter._SECONDS", 1)
    started = time.monotonic()
    with pytest.raises(SourceError, match="takes more than 1 seconds to match; write the paths"):
        values_by_path({pattern: 1}, ["a" * 1000], "here")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("pattern", ["(", "a{9999999999999}", "(?:" * 5000])
def test_what_cannot_be_matched_is_refused(pattern: str):
    with pytest.raises(SourceError, match=r"here: keys are no regular expressions: .*[Ee]rror"):
        values_by_path({pattern: 1}, ["q_proj"], "here")


UP = "base_model.model.model.layers.0.mlp.up_proj"


def write_adapter(folder: Path, dtype: torch.dtype = torch.float32, **config: object) -> Path:
    factors = {
        f"{UP}.lora_A.weight": torch.ones((4, 128), dtype=dtype),
        f"{UP}.lora_B.weight": torch.ones((512, 4), dtype=dtype),
    }
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    return save_adapter(folder, factors, described)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"rank_pattern": {r".*\.(up|down)_proj": 4}, "r": 8}, None),
        ({"target_parameters": 5}, "adapter_config.json: target_parameters: not a list of names"),
        ({"target_parameters": [5]}, "adapter_config.json: target_parameters: not a list of names"),
        ({"target_parameters": "up"}, "adapter_config.json: target_parameters: not a list of"),
        ({"rank_pattern": 5}, "rank_pattern: not a JSON object"),
    ],
    ids=str,
)
def test_configs_of_adapters(tmp_path: Path, config: dict[str, object], reason: str | None):
    source = write_source(tmp_path / "source", layers=2)
    adapter = write_adapter(tmp_path / "adapter", **config)
    done = command("quantize", source, tmp_path / "out", "--lora", adapter)
    if reason is None:
        assert done.exit_code == 0, done.output
    else:
        assert reason in refused(done)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.bool, torch.uint8], ids=str)
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
