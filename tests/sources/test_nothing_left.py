"""Nothing in a decoded result says that it is encoded: no key of a config, and no file beside it.

The cases have what released models say of their encoding, and where.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from inputs import SOURCES, save_json

import nf4conv
from nf4conv.errors import UndecodableError

FP8: Final = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


class Release(NamedTuple):
    """What a released model says of its encoding beside what its small twin already says."""

    twin: str  # a checkpoint of tests/golden/inputs.py with its layout
    config: Mapping[str, Any] = {}
    files: tuple[str, ...] = ()  # beside the weights


RELEASES: Final = {
    "deepseek-ai/DeepSeek-V3.2": Release("fp8 blocks", {"quantization_config": FP8}),
    "deepseek-ai/DeepSeek-V4-Flash": Release("deepseek-v4", {"expert_dtype": "fp4"}),
    "deepseek-ai/DeepSeek-V4.1": Release(
        "deepseek-v4",
        {
            "quantization_config": {**FP8, "expert_dtype": "fp4"},
            "text_config": {"quantization_config": {**FP8, "expert_dtype": "fp4"}},
        },
    ),
    "moonshotai/Kimi-K2.6": Release("kimi"),
    "openai/gpt-oss-20b": Release("gpt-oss"),
    "Qwen/Qwen3-30B-A3B-FP8": Release("fp8 blocks", {"quantization_config": FP8}),
    "LGAI-EXAONE/EXAONE-4.5-33B-FP8": Release(
        "fp8 blocks",
        {"torch_dtype": "float8_e4m3fn", "vision_config": {"torch_dtype": "float8_e4m3fn"}},
    ),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": Release(
        "fp8 compressed-tensors", files=("recipe.yaml",)
    ),
    "nvidia/Llama-3.1-8B-Instruct-NVFP4": Release(
        "nvfp4 modelopt", files=("hf_quant_config.json",)
    ),
    "RedHatAI models of 2024": Release(
        "fp8 compressed-tensors",
        {"compression_config": {"quant_method": "compressed-tensors"}},
        ("recipe.yaml",),
    ),
    "GPTQ, such as TheBloke's": Release("gptq", files=("quantize_config.json",)),
    "AWQ, such as casperhansen's": Release("awq", files=("quant_config.json",)),
    "AutoRound, such as Intel's": Release("autoround", files=("quantization_config.json",)),
    "ModelSlim, such as Eco-Tech's": Release(
        "int8 compressed-tensors", files=("quant_model_description.json",)
    ),
}
_ENCODING: Final = re.compile(
    r"quant|compress|fp8|fp4|float8|e4m3|e8m0|int4|int8|mxfp|gptq|awq|expert_dtype", re.IGNORECASE
)


@pytest.mark.parametrize("name", RELEASES)
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_no_key_and_no_file_says_that_it_is_encoded(tmp_path: Path, name: str, dtype: Any):
    release = RELEASES[name]
    source = tmp_path / "source"
    SOURCES[release.twin](source)
    config = json.loads((source / "config.json").read_text())
    save_json(source / "config.json", {**config, **release.config})
    for file in release.files:
        save_json(source / file, {})
    save_json(source / "generation_config.json", {"top_k": 1})
    out = tmp_path / "out"
    nf4conv.dequantize(source, out, device="cpu", dtype=dtype)
    assert not _ENCODING.search((out / "config.json").read_text())
    names = {path.name for path in out.iterdir()}
    assert names - {"SHA256SUMS"} == {
        "config.json", "generation_config.json", "model.safetensors", "nf4conv.json",
    }  # fmt: skip


def test_integers_of_chatglm_are_not_taken_for_others(tmp_path: Path):
    """Its config says 8 or 4 bits in a key of its own; 0 means none."""
    source = tmp_path / "source"
    SOURCES["int8 compressed-tensors"](source)
    config = json.loads((source / "config.json").read_text())
    for bits in (4, 8):
        save_json(source / "config.json", {**config, "quantization_bit": bits})
        with pytest.raises(UndecodableError, match=f"quantization_bit {bits} of ChatGLM"):
            nf4conv.dequantize(source, tmp_path / "out", device="cpu")
    save_json(source / "config.json", {**config, "quantization_bit": 0})
    nf4conv.dequantize(source, tmp_path / "out", device="cpu")
