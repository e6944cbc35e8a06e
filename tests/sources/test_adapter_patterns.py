"""Patterns of an adapter's config: as PEFT matches them, and never for ever."""

import json
import random
import re
import time
from pathlib import Path

import pytest
import torch
from checkpoints import write_source
from hostile import command, refused
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file

from nf4conv.errors import SourceError
from nf4conv.sources.adapters.patterns import Patterns

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
ATOMS = (
    "a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\W", "^", "$", r"\b", r"\B", "(?=a)", "(?!b)",
    "(?<=a)", "(?<!b)", "", "x|a", r"\Z",
)  # fmt: skip
ENDLESS = [
    "(a+)+b",
    "(.*.*)*x",
    "(a|aa)+$c",
    ".*" * 60 + "x",
    "((a{999}){999}){999}",
    "(?:(?:.*)*)*z",
    r"(\w+\.)*\w+x",
    "((((a?){0,900}){0,900}b?){0,900}c?){0,900}x",
]


@pytest.mark.parametrize("patterns", SANE, ids=str)
def test_they_are_matched_as_peft_does(patterns: dict[str, int]):
    found = Patterns(patterns, "here")
    for path in PATHS:
        assert found.value_of(path, 0) == patterns.get(get_pattern_key(patterns, path), 0)


def test_any_expression_matches_as_in_python():
    chosen = random.Random(32)
    compared = 0
    while compared < 4000:
        pattern = expression(chosen, 4)
        try:
            expected = re.compile(rf"(.*\.)?({pattern})$")
        except re.error:
            continue
        found = Patterns({pattern: 1}, "here")
        for _ in range(4):
            text = "".join(chosen.choice("ab.1\n") for _ in range(chosen.randrange(9)))
            compared += 1
            is_match = expected.match(text) is not None
            assert found.value_of(text, 0) == is_match, (pattern, text)


def expression(chosen: random.Random, depth: int) -> str:
    """Makes a random regular expression."""
    if depth == 0 or chosen.random() < 0.3:
        return chosen.choice(ATOMS)
    first = expression(chosen, depth - 1)
    second = expression(chosen, depth - 1)
    repeated = chosen.choice(["*", "+", "?", "{2}", "{1,3}", "*?", "{0,2}?", ""])
    forms = [f"({first}){repeated}", f"(?:{first}|{second})", f"(?={first})", first + second]
    return chosen.choice(forms)


@pytest.mark.parametrize("pattern", ENDLESS)
def test_none_takes_for_ever(pattern: str):
    started = time.process_time()
    try:
        assert Patterns({pattern: 1}, "here").value_of("a" * 1000, 0) == 0
    except SourceError as error:
        assert "takes more than 10,000,000 steps to match" in str(error)  # noqa: PT017
    assert time.process_time() - started < 30


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(?P<x>q)(?P=x)", "groupref"),
        ("(?i:q_proj)", "flags"),
        ("(", "expressions as keys"),
        ("a{9999999999999}", "expressions as keys"),
        ("(?:" * 5000, "expressions as keys"),
        ("a" * 2_000_000, "steps to match"),
    ],
)
def test_what_cannot_be_matched_is_refused(pattern: str, reason: str):
    with pytest.raises(SourceError, match=reason):
        Patterns({pattern: 1}, "here").value_of("q_proj", 0)


UP = "base_model.model.model.layers.0.mlp.up_proj"


def write_adapter(folder: Path, dtype: torch.dtype = torch.float32, **config: object) -> Path:
    folder.mkdir()
    factors = {
        f"{UP}.lora_A.weight": torch.ones((4, 128), dtype=dtype),
        f"{UP}.lora_B.weight": torch.ones((512, 4), dtype=dtype),
    }
    save_file(factors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"rank_pattern": {"(a+)+b|(.*.*)*": 4}}, None),
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
