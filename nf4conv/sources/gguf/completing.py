"""Completes config.json with what keys of the metadata do not say by themselves.

Each function gets the metadata without the architecture's name in its keys, and the names of the
tensors, also with `*` for the number of a layer. It adds to the config.
"""

from collections.abc import Callable, Collection
from typing import Any, Final, TypeAlias

from nf4conv.sources.gguf.header import Sizes, counts_of, positive, shortest

Names: TypeAlias = Collection[str]
Config: TypeAlias = dict[str, Any]
Completion: TypeAlias = Callable[[Sizes, Names, Config], None]

_LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the models whose queries are scaled by another number than the size of a head."""


def add_scale_of_gemma(_sizes: Sizes, _names: Names, config: Config) -> None:
    """Adds by what queries of Gemma 2 and 3 are scaled, which llama.cpp knows by the layers.

    Source: load_arch_hparams of llama.cpp's models gemma2.cpp and gemma3.cpp.
    """
    scale = config.get("head_dim")
    heads = positive(config, "num_attention_heads")
    hidden = positive(config, "hidden_size")
    is_27b = config.get("num_hidden_layers") == _LAYERS_OF_27B[config["model_type"]]
    if is_27b and hidden is not None and heads is not None:
        scale = hidden // heads
    config["query_pre_attn_scalar"] = scale


def add_layer_types(sizes: Sizes, _names: Names, config: Config) -> None:
    """Adds which layers attend to a window alone."""
    pattern = sizes.get("attention.sliding_window_pattern")
    _set_kinds(config, "layer_types", pattern, ("full_attention", "sliding_attention"))


def add_no_window(_sizes: Sizes, _names: Names, config: Config) -> None:
    """Says that there is no window, where transformers would take one for granted."""
    config.setdefault("sliding_window", None)


def add_heads_of_gemma_4(sizes: Sizes, names: Names, config: Config) -> None:
    """Adds the heads of keys of each kind of layer, and whether keys serve as values, too.

    The file has no values of layers in which they do.

    The share that full attention rotates is in rope_freqs.weight, and the default of transformers.
    """
    config.pop("partial_rotary_factor", None)
    config.pop("rope_theta", None)
    layers = positive(config, "num_hidden_layers") or 0
    config["attention_k_eq_v"] = any(
        f"blk.{layer}.attn_k.weight" in names and f"blk.{layer}.attn_v.weight" not in names
        for layer in range(min(layers, len(names)))
    )
    heads = counts_of(sizes, "attention.head_count_kv")
    types = config.get("layer_types", [])
    for kind, key in (
        ("sliding_attention", "num_key_value_heads"),
        ("full_attention", "num_global_key_value_heads"),
    ):
        of_kind = [count for count, found in zip(heads, types, strict=False) if found == kind]
        if of_kind:
            config[key] = of_kind[0]
    widths = counts_of(sizes, "feed_forward_length")
    if widths:
        config["intermediate_size"] = min(widths)
    config["use_double_wide_mlp"] = len(set(widths)) > 1


def add_sizes_of_latents(sizes: Sizes, _names: Names, config: Config) -> None:
    """Adds the sizes of DeepSeek's heads, which llama.cpp counts otherwise.

    Source: DeepseekV2Model of llama.cpp's converter. Files before April 2025 lack the keys that end
    with _mla. Attention is scaled by mscale_all_dim; mscale, which is not in the file, equals it in
    all releases.
    """
    config.pop("partial_rotary_factor", None)  # a part of each head has a size of its own
    config["num_key_value_heads"] = config.get("num_attention_heads")
    config.setdefault("q_lora_rank", None)
    config.setdefault("norm_topk_prob", False)
    suffix = "_mla" if "attention.key_length_mla" in sizes else ""
    key = positive(sizes, f"attention.key_length{suffix}")
    value = positive(sizes, f"attention.value_length{suffix}")
    rotated = positive(config, "qk_rope_head_dim")
    if key is not None and rotated is not None:
        config["qk_nope_head_dim"] = key - rotated
        config["head_dim"] = rotated
    if value is not None:
        config["v_head_dim"] = value
    multiplier = sizes.get("rope.scaling.yarn_log_multiplier")
    if "rope_scaling" in config and isinstance(multiplier, float):
        scale = shortest(multiplier * 10)  # llama.cpp multiplies by 0.1
        config["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale}
    groups = positive(config, "n_group")
    if config["model_type"] == "deepseek_v2" and groups is not None and groups > 1:
        config["topk_method"] = "group_limited_greedy"


def add_norm_of_queries(_sizes: Sizes, _names: Names, config: Config) -> None:
    """Adds whether Llama 4 normalizes queries and keys, which llama.cpp knows by the experts.

    Source: load_arch_hparams of llama.cpp's model llama4.cpp: Maverick, of 128, does not.
    """
    config["use_qk_norm"] = config.get("num_local_experts") != 128


def add_rounding_of_yarn(_sizes: Sizes, _names: Names, config: Config) -> None:
    """Says that gpt-oss does not round the bounds between which YaRN fades."""
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False


def add_scaling_of_ministral(sizes: Sizes, _names: Names, config: Config) -> None:
    """Adds how Ministral 3 stretches rotary embeddings and scales queries by their position.

    Source: Ministral3Model of llama.cpp's converter, which leaves out mscale. It equals
    mscale_all_dim in all releases.
    """
    stretched = config.pop("rope_scaling", {})
    scale = sizes.get("rope.scaling.yarn_log_multiplier")
    beta = sizes.get("attention.temperature_scale")
    if not stretched or not isinstance(scale, float) or not isinstance(beta, float):
        return
    config["rope_parameters"] = {
        **stretched,
        "rope_theta": config.pop("rope_theta", None),
        "mscale": scale,
        "mscale_all_dim": scale,
        "llama_4_scaling_beta": shortest(beta),
    }


def add_linear_attention(sizes: Sizes, _names: Names, config: Config) -> None:
    """Adds which layers of Qwen3-Next have linear attention, and the size of its values."""
    values = positive(sizes, "ssm.inner_size")
    heads = positive(sizes, "ssm.time_step_rank")
    if values is not None and heads is not None:
        config["linear_value_head_dim"] = values // heads
    recurrent = sizes.get("attention.recurrent_layers")
    _set_kinds(config, "layer_types", recurrent, ("full_attention", "linear_attention"))


def _set_kinds(config: Config, key: str, flags: Any, kinds: tuple[str, str]) -> None:
    """Sets a key to the kind of each layer, by a list of flags, if it is one."""
    if isinstance(flags, list):
        layers = positive(config, "num_hidden_layers")
        config[key] = [kinds[bool(flag)] for flag in flags[:layers]]
