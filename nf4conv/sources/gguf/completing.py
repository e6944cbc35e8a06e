"""Completes config.json with what keys of the metadata do not say by themselves.

Each function gets the metadata without the architecture's name in its keys, and the names of the
tensors, also with `*` for the number of a layer. It adds to the config.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeAlias

from nf4conv.sources.gguf.header import counts_of, positive, shortest

Sizes: TypeAlias = Mapping[str, Any]
Names: TypeAlias = Collection[str]
Config: TypeAlias = dict[str, Any]

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


def add_sparsity_of_activations(sizes: Sizes, _names: Names, config: Config) -> None:
    """Adds what Gemma 3n says layer by layer: widths, and the share of activations that are 0.

    llama.cpp stores that share as the quantile of the normal distribution.
    """
    widths = counts_of(sizes, "feed_forward_length")
    if widths:
        config["intermediate_size"] = widths
    scales = sizes.get("activation_sparsity_scale")
    if isinstance(scales, list) and all(isinstance(scale, float) for scale in scales):
        from statistics import NormalDist  # importing it takes 10 ms

        shares = [NormalDist().cdf(scale) for scale in scales]
        config["activation_sparsity_pattern"] = [round(share, 6) for share in shares]


def add_heads_of_gemma_4(sizes: Sizes, names: Names, config: Config) -> None:
    """Adds the heads of keys of each kind of layer, and whether keys serve as values, too.

    The file has no values of layers in which they do.

    The share that full attention rotates is in rope_freqs.weight, and the default of transformers.
    """
    config.pop("partial_rotary_factor", None)
    config.pop("rope_theta", None)
    keys = _layers_with("attn_k.weight", names, config)
    values = _layers_with("attn_v.weight", names, config)
    config["attention_k_eq_v"] = any(
        key and not value for key, value in zip(keys, values, strict=True)
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


def add_sizes_of_minicpm(sizes: Sizes, _names: Names, config: Config) -> None:
    """Adds the sizes of MiniCPM 3's heads; the size of values is the default of llama.cpp."""
    config.pop("partial_rotary_factor", None)
    key = positive(sizes, "attention.key_length")
    rotated = positive(config, "qk_rope_head_dim")
    if key is not None and rotated is not None:
        config["qk_nope_head_dim"] = key - rotated
    _divide(config, "v_head_dim", sizes, "embedding_length", "attention.head_count")


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


def add_layers_with_attention(sizes: Sizes, _names: Names, config: Config) -> None:
    """Adds which layers of LFM2 have attention: those with heads of keys."""
    heads = counts_of(sizes, "attention.head_count_kv")
    _set_kinds(config, "layer_types", heads, ("conv", "full_attention"))
    config["num_key_value_heads"] = max(heads, default=0)


def add_layers_of_jamba(sizes: Sizes, names: Names, config: Config) -> None:
    """Adds every how many layers Jamba has attention, and every how many experts."""
    heads = counts_of(sizes, "attention.head_count_kv")
    config["num_key_value_heads"] = max(heads, default=0)
    attending = [layer for layer, count in enumerate(heads) if count]
    mixing = []
    for name in names:
        router = re.fullmatch(r"blk\.(\d+)\.ffn_gate_inp\.weight", name)
        if router is not None:
            mixing.append(int(router[1]))
    for kind, layers in (("attn", attending), ("expert", sorted(mixing))):
        if not layers:
            continue
        following = layers[1] if len(layers) > 1 else len(heads) + layers[0]
        config[f"{kind}_layer_offset"] = layers[0]
        config[f"{kind}_layer_period"] = following - layers[0]


def add_layers_of_granite(sizes: Sizes, names: Names, config: Config) -> None:
    """Adds which layers of Granite 4 have attention, and the sizes of the others' states.

    Only models without rotary embeddings have such layers: llama.cpp says so by
    `rope.scaling.finetuned`.
    """
    has_states = _layers_with("ssm_a", names, config)
    _set_kinds(config, "layer_types", has_states, ("attention", "mamba"))
    heads = counts_of(sizes, "attention.head_count_kv")
    if heads:
        config["num_key_value_heads"] = max(heads)
    config["position_embedding_type"] = "rope" if sizes.get("rope.scaling.finetuned") else None
    _divide(config, "mamba_d_head", sizes, "ssm.inner_size", "ssm.time_step_rank")
    _divide(config, "mamba_expand", sizes, "ssm.inner_size", "embedding_length")


def add_layers_of_bamba(sizes: Sizes, names: Names, config: Config) -> None:
    """Adds which layers of Bamba have attention, and the sizes of the others' states."""
    add_layers_of_granite(sizes, names, config)
    types = config.pop("layer_types")
    config["attn_layer_indices"] = [
        layer for layer, kind in enumerate(types) if kind == "attention"
    ]
    del config["position_embedding_type"]


def add_heads_of_states(sizes: Sizes, names: Names, config: Config) -> None:
    """Adds the sizes of Mamba 2's heads."""
    _divide(config, "head_dim", sizes, "ssm.inner_size", "ssm.time_step_rank")
    _divide(config, "expand", sizes, "ssm.inner_size", "embedding_length")
    config["use_conv_bias"] = "blk.*.ssm_conv1d.bias" in names


def add_linear_attention(sizes: Sizes, _names: Names, config: Config) -> None:
    """Adds which layers of Qwen3-Next have linear attention, and the size of its values."""
    _divide(config, "linear_value_head_dim", sizes, "ssm.inner_size", "ssm.time_step_rank")
    recurrent = sizes.get("attention.recurrent_layers")
    _set_kinds(config, "layer_types", recurrent, ("full_attention", "linear_attention"))


def add_size_of_heads(sizes: Sizes, _names: Names, config: Config) -> None:
    """Adds the size of a head of GLM, which the converter takes for granted (ChatGLMModel)."""
    _divide(config, "head_dim", sizes, "embedding_length", "attention.head_count")


def add_full_rotation(_sizes: Sizes, _names: Names, config: Config) -> None:
    """Has transformers rotate all of a head of Solar Open, which is its default.

    The metadata may say a half: the converter writes that, as for GLM, for a config without it.
    """
    config.pop("partial_rotary_factor", None)


def add_kinds_of_networks(_sizes: Sizes, names: Names, config: Config) -> None:
    """Adds which layers have experts: those with a router."""
    has_router = _layers_with("ffn_gate_inp.weight", names, config)
    _set_kinds(config, "mlp_layer_types", has_router, ("dense", "sparse"))


def add_choice_of_experts(sizes: Sizes, _names: Names, config: Config) -> None:
    """Adds by which function Cohere's router chooses (ExpertGatingFuncType in gguf's constants)."""
    is_sigmoid = sizes.get("expert_gating_func") == 2
    config["expert_selection_fn"] = "sigmoid" if is_sigmoid else "softmax"


def add_rotation_of_each_kind(sizes: Sizes, _names: Names, config: Config) -> None:
    """Adds by which base each kind of Mellum's layers is rotated."""
    rotations = {}
    for kind, key in (
        ("full_attention", "rope.freq_base"),
        ("sliding_attention", "rope.freq_base_swa"),
    ):
        base = sizes.get(key)
        if isinstance(base, float):
            rotations[kind] = {"rope_type": "default", "rope_theta": base}
    if rotations:
        config.pop("rope_theta", None)
        config["rope_parameters"] = rotations


def add_kinds_of_indexers(sizes: Sizes, _names: Names, config: Config) -> None:
    """Adds which layers of GLM-5 choose tokens themselves, and which share a choice."""
    _set_kinds(config, "indexer_types", sizes.get("attention.indexer.types"), ("shared", "full"))


def add_layers_of_nemotron(sizes: Sizes, names: Names, config: Config) -> None:
    """Adds what each layer of Nemotron-H is, and the sizes of its states and heads."""
    has_states = _layers_with("ssm_a", names, config)
    attends = _layers_with("attn_q.weight", names, config)
    has_router = _layers_with("ffn_gate_inp.weight", names, config)
    kinds = []
    for is_state, is_attention, is_mixture in zip(has_states, attends, has_router, strict=True):
        if is_mixture:
            kinds.append("moe")
        elif is_attention:
            kinds.append("attention")
        else:
            kinds.append("mamba" if is_state else "mlp")
    config["layers_block_type"] = kinds
    config["num_key_value_heads"] = max(counts_of(sizes, "attention.head_count_kv"), default=0)
    widths = counts_of(sizes, "feed_forward_length")
    if any(widths):
        config["intermediate_size"] = max(widths)
    _divide(config, "mamba_head_dim", sizes, "ssm.inner_size", "ssm.time_step_rank")
    config.pop("partial_rotary_factor", None)


def _divide(config: Config, key: str, sizes: Sizes, whole: str, count: str) -> None:
    """Sets a key to the size of one of so many equal parts, if both numbers are known."""
    size = positive(sizes, whole)
    parts = positive(sizes, count)
    if size is not None and parts is not None:
        config[key] = size // parts


def _set_kinds(config: Config, key: str, flags: Any, kinds: tuple[str, str]) -> None:
    """Sets a key to the kind of each layer, by a list of flags, if it is one."""
    if isinstance(flags, list):
        layers = positive(config, "num_hidden_layers")
        config[key] = [kinds[bool(flag)] for flag in flags[:layers]]


def _layers_with(tensor: str, names: Names, config: Config) -> list[bool]:
    """Returns for each layer whether it has a tensor; a file has no more layers than tensors."""
    layers = positive(config, "num_hidden_layers") or 0
    return [f"blk.{layer}.{tensor}" in names for layer in range(min(layers, len(names)))]
