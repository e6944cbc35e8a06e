"""config.json of the output: exactly the keys that transformers writes, and nothing of an earlier
quantization.
"""

import json
from pathlib import Path

import pytest

from nf4conv.format.layout import Format
from nf4conv.models.config import (
    architecture_of,
    checkpoint_dtype,
    quantized_config,
    without_quantization,
)
from nf4conv.sources.tensors import TensorInfo

UNREAD = {"_load_in_4bit": True, "_load_in_8bit": False}
"""Keys that transformers writes into quantization_config, and no loader reads."""

FORMAT = Format("nf4", 64, True, "bfloat16")
SETTINGS = {"compute_dtype": "bfloat16", "skip_modules": ("lm_head",)}


def tensor(name: str, dtype: str = "BF16") -> TensorInfo:
    return TensorInfo(name, dtype, (4, 4), Path("model.safetensors"), 0, 32)


@pytest.mark.oracle
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_the_keys_and_values_are_those_that_transformers_writes(quant_type, double_quant):
    import torch
    from transformers import BitsAndBytesConfig

    theirs = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["lm_head"],
    ).to_dict()
    format = Format(quant_type, 64, double_quant, "bfloat16")
    ours = quantized_config({}, format, **SETTINGS, dtype=None)["quantization_config"]
    assert {**ours, **UNREAD} == {**theirs, "quant_method": "bitsandbytes"}
    assert list(ours) == sorted(theirs.keys() - UNREAD.keys())
    assert len(ours) == 11


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (["LlamaForCausalLM", "Other"], "LlamaForCausalLM"),
        ([], ""),
        (None, ""),
        (5, ""),
        ("LlamaForCausalLM", ""),
        ([5], ""),
    ],
    ids=["two", "empty", "null", "number", "no list", "list of a number"],
)
def test_the_architecture_is_a_name_or_nothing(stored, expected):
    assert architecture_of({"architectures": stored}) == expected
    assert architecture_of({}) == ""


def test_the_threshold_is_a_json_float():
    assert '"llm_int8_threshold": 6.0' in json.dumps(
        quantized_config({}, FORMAT, **SETTINGS, dtype=None)
    )


def test_leftovers_of_a_quantization_are_removed_at_every_level():
    config = {
        "model_type": "llava",
        "compression_config": {"format": "float-quantized"},
        "quantization_config": {"quant_method": "fp8"},
        "text_config": {"hidden_size": 64, "quantization_config": {"quant_method": "fp8"}},
    }
    assert without_quantization(config) == {
        "model_type": "llava",
        "text_config": {"hidden_size": 64},
    }
    edited = quantized_config(config, FORMAT, **SETTINGS, dtype=None)
    assert edited["quantization_config"]["quant_method"] == "bitsandbytes"
    assert "quantization_config" not in edited["text_config"]
    assert config["text_config"]["quantization_config"] == {"quant_method": "fp8"}, (
        "the source's config was changed"
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "float16"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float16"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        ({}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        (
            {"dtype": "float16", "text_config": {"dtype": "float16", "hidden_size": 8}},
            {
                "dtype": "bfloat16",
                "torch_dtype": "bfloat16",
                "text_config": {"dtype": "bfloat16", "hidden_size": 8},
            },
        ),
    ],
    ids=["old-key", "new-key", "no-key", "nested"],
)
def test_the_dtype_is_named_where_old_and_new_readers_look(config, expected):
    edited = quantized_config(config, FORMAT, **SETTINGS, dtype="bfloat16")
    del edited["quantization_config"]
    assert edited == expected


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float16"}, "float16"),
        ({"text_config": {"torch_dtype": "bfloat16"}}, "bfloat16"),
        ({"torch_dtype": None}, None),
        ({}, None),
    ],
)
def test_the_dtype_of_a_checkpoint_is_what_its_config_says(config, dtype):
    assert checkpoint_dtype(config) == dtype
