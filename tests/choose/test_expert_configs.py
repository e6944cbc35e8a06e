"""config.json of a 4-bit mixture of experts says the same to transformers 4 and 5.

tests/architectures loads such checkpoints with transformers 4.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from adapters import make_model

import nf4conv
from nf4conv.models.config import add_keys_of_transformers_4, at_all_levels, levels

UNREAD = {"_load_in_4bit": True, "_load_in_8bit": False}
"""Keys that transformers writes into quantization_config, and no loader reads."""

CPU = {"device": "cpu", "workers": 2}

RENAMED = {
    "qwen3_moe": ("num_experts",),
    "qwen3_vl_moe": ("num_experts",),
    "qwen3_omni_moe": ("num_experts",),
    "glm4_moe": ("partial_rotary_factor",),
    "qwen3_next": ("partial_rotary_factor",),
    "mixtral": (),
    "gpt_oss": ("rope_scaling",),  # its positions are scaled
    "olmoe": (),
}
"""By model type, what transformers 4.57.6 reads and 5.23.0 does not write, besides rope_theta."""


def with_keys_of_both(config: dict[str, Any]) -> dict[str, Any]:
    return at_all_levels(config, add_keys_of_transformers_4)


def config_as_saved(model_type: str) -> dict[str, Any]:
    """Returns the config of a model as the installed transformers 5 saves it."""
    content = json.loads(transformers.AutoConfig.for_model(model_type).to_json_string())
    for _, level in levels(content):
        if "rope_theta" in level:
            level["rope_theta"] = 12345.0
    return content


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", RENAMED)
def test_the_keys_of_transformers_4_are_added(model_type: str):
    saved = config_as_saved(model_type)
    added: set[str] = set()
    edited = dict(levels(with_keys_of_both(saved)))
    for path, level in levels(saved):
        for key, value in edited[path].items():
            if key not in level:
                added.add(key)
            elif not isinstance(value, dict):
                assert value == level[key], "what is there does not change"
        if isinstance(level.get("rope_parameters"), dict):
            assert edited[path]["rope_theta"] == 12345.0
        if "num_experts" in added and "num_local_experts" in level:
            assert edited[path]["num_experts"] == level["num_local_experts"]
    assert added - {"rope_theta", "rope_scaling"} == {*RENAMED[model_type]} - {"rope_scaling"}
    assert added >= {"rope_theta", *RENAMED[model_type]}


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", RENAMED)
def test_transformers_5_reads_the_same_with_them(model_type: str):
    saved = config_as_saved(model_type)
    config_class = type(transformers.AutoConfig.for_model(model_type))
    before = config_class.from_dict(json.loads(json.dumps(saved)))
    after = config_class.from_dict(with_keys_of_both(saved))
    assert after.to_dict() == before.to_dict()


def test_nothing_is_added_twice_or_to_others():
    config = {"model_type": "llama", "rope_theta": 5.0, "num_local_experts": 4}
    assert with_keys_of_both(config) == config
    both = {
        "model_type": "qwen3_moe",
        "num_local_experts": 4,
        "num_experts": 4,
        "rope_theta": 1.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1.0},
    }
    assert with_keys_of_both(both) == both
    nested = {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}
    assert with_keys_of_both(nested) == nested


@pytest.mark.oracle
def test_a_quantized_mixture_has_them(tmp_path: Path):
    source = make_model(tmp_path / "source", "qwen3_moe")
    assert "num_experts" not in json.loads((source / "config.json").read_text())
    nf4conv.quantize(source, tmp_path / "out", moe="packed", **CPU)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["num_experts"] == written["num_local_experts"] == 4
    assert not UNREAD.keys() & written["quantization_config"].keys()
    assert "lm_head" in written["quantization_config"]["llm_int8_skip_modules"]
    assert "model.layers.0.mlp.gate" in written["quantization_config"]["llm_int8_skip_modules"]
