"""Makes the content of config.json of the metadata of a GGUF file."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from nf4conv.format.layout import DTYPE_NAMES
from nf4conv.sources.gguf.families import GgufFamily
from nf4conv.sources.tensors import TensorInfo

_TOKENS: Final = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}

_LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the models whose queries are scaled by another number than the size of a head."""


def config_of(
    metadata: Mapping[str, Any], family: GgufFamily, tensors: Sequence[TensorInfo], dtype: str
) -> dict[str, Any]:
    """Returns what config.json would say.

    Args:
        metadata: of the file.
        family: that of its architecture.
        tensors: as they are presented.
        dtype: the tag that they are presented in.
    """
    architecture = metadata.get("general.architecture")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": DTYPE_NAMES[dtype],
    }
    for key, name in family.config.items():
        value = metadata.get(f"{architecture}.{key}")
        if isinstance(value, float):
            config[name] = _shortest(value)
        elif isinstance(value, int) and (value or name != "sliding_window"):
            config[name] = value
    for key, name in _TOKENS.items():
        token = metadata.get(key)
        if isinstance(token, int):
            config[name] = token
    config.update(family.constants)
    _add_what_tensors_tell(config, family, tensors)
    _add_rotary_share(config, metadata)
    if family.model_type in _LAYERS_OF_27B:
        _add_scale_of_gemma(config)
    return config


def _add_scale_of_gemma(config: dict[str, Any]) -> None:
    """Adds by what queries of Gemma 2 and 3 are scaled, which llama.cpp knows by the layers.

    Source: load_arch_hparams of llama.cpp's models gemma2.cpp and gemma3.cpp.
    """
    scale = config.get("head_dim")
    if config.get("num_hidden_layers") == _LAYERS_OF_27B[config["model_type"]]:
        scale = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = scale


def _shortest(value: float) -> float:
    """Returns the shortest decimal that is the same number in float32, as which it is stored."""
    for digits in range(1, 10):
        rounded = float(f"{value:.{digits}g}")
        if struct.pack("<f", rounded) == struct.pack("<f", value):
            return rounded
    return value


def _add_what_tensors_tell(
    config: dict[str, Any], family: GgufFamily, tensors: Sequence[TensorInfo]
) -> None:
    """Adds the size of the vocabulary, whether the head is tied, and which layers have biases."""
    names = {tensor.name for tensor in tensors}
    by_name = {tensor.name: tensor for tensor in tensors}
    embedding = by_name.get(f"{family.names['token_embd']}.weight")
    if embedding is not None:
        config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = f"{family.names['output']}.weight" not in names
    attention = family.names.get("blk.*.attn_q", "")
    if family.model_type in ("llama", "granite", "command-r", "cohere"):
        config["attention_bias"] = f"{attention.replace('*', '0')}.bias" in names
        gate = family.names["blk.*.ffn_gate"].replace("*", "0")
        config["mlp_bias"] = f"{gate}.bias" in names
    if family.model_type == "stablelm":
        config["use_qkv_bias"] = f"{attention.replace('*', '0')}.bias" in names
    if family.model_type == "starcoder2":
        config["use_bias"] = f"{attention.replace('*', '0')}.bias" in names


def _add_rotary_share(config: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    """Adds which share of a head is rotated, where it is not all of it."""
    architecture = metadata.get("general.architecture")
    rotated = metadata.get(f"{architecture}.rope.dimension_count")
    heads = config.get("num_attention_heads")
    if not isinstance(rotated, int) or not isinstance(heads, int) or heads <= 0:
        return
    size = config.get("head_dim") or config.get("hidden_size", 0) // heads
    if 0 < rotated < size:
        key = "rotary_pct" if config["model_type"] == "gpt_neox" else "partial_rotary_factor"
        config[key] = rotated / size
