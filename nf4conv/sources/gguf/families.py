"""Lists the architectures whose GGUF files can be read back.

For each: the names of its modules in the file and in transformers, what llama.cpp's converter moved
or changed (the classes in its folder conversion/), and the keys of its config. In names, `*` stands
for the number of a layer. What is not listed is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from nf4conv.format.gguf import FUSED, NEGATIVE_EXP, PLUS_ONE, ROTARY, TRANSPOSED


@dataclass(frozen=True)
class GgufFamily:
    """An architecture of llama.cpp, and the model of transformers that it stands for.

    Attributes:
        model_type: in config.json.
        architecture: the class in config.json.
        names: the name of a module in transformers by its name in the file.
        experts: the same for stacks of experts; `#` stands for the number of an expert.
        changed: what the converter did to a module, by its name in the file: one of the words
            of format/gguf.py.
        config: the key of config.json by the key of the metadata, without the architecture.
        constants: what config.json has besides.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)


_LAYER: Final = "model.layers.*"

_ATTENTION: Final = {
    "blk.*.attn_q": f"{_LAYER}.self_attn.q_proj",
    "blk.*.attn_k": f"{_LAYER}.self_attn.k_proj",
    "blk.*.attn_v": f"{_LAYER}.self_attn.v_proj",
    "blk.*.attn_output": f"{_LAYER}.self_attn.o_proj",
    "blk.*.attn_q_norm": f"{_LAYER}.self_attn.q_norm",
    "blk.*.attn_k_norm": f"{_LAYER}.self_attn.k_norm",
}

_AROUND: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_GATED: Final = {
    "blk.*.ffn_gate": f"{_LAYER}.mlp.gate_proj",
    "blk.*.ffn_up": f"{_LAYER}.mlp.up_proj",
    "blk.*.ffn_down": f"{_LAYER}.mlp.down_proj",
}

_NORMS: Final = {
    "blk.*.attn_norm": f"{_LAYER}.input_layernorm",
    "blk.*.ffn_norm": f"{_LAYER}.post_attention_layernorm",
}

_LIKE_LLAMA: Final = {**_AROUND, **_ATTENTION, **_NORMS, **_GATED}

_NORMS_OF_GEMMA_2: Final = {
    "blk.*.attn_norm": f"{_LAYER}.input_layernorm",
    "blk.*.post_attention_norm": f"{_LAYER}.post_attention_layernorm",
    "blk.*.ffn_norm": f"{_LAYER}.pre_feedforward_layernorm",
    "blk.*.post_ffw_norm": f"{_LAYER}.post_feedforward_layernorm",
}

_NORMS_OF_OLMO_2: Final = {
    "blk.*.post_attention_norm": f"{_LAYER}.post_attention_layernorm",
    "blk.*.post_ffw_norm": f"{_LAYER}.post_feedforward_layernorm",
}

_SHARED_EXPERT: Final = {
    "blk.*.ffn_gate_shexp": f"{_LAYER}.mlp.shared_expert.gate_proj",
    "blk.*.ffn_up_shexp": f"{_LAYER}.mlp.shared_expert.up_proj",
    "blk.*.ffn_down_shexp": f"{_LAYER}.mlp.shared_expert.down_proj",
    "blk.*.ffn_gate_inp_shexp": f"{_LAYER}.mlp.shared_expert_gate",
}

_ROUTER: Final = {"blk.*.ffn_gate_inp": f"{_LAYER}.mlp.gate"}

_EXPERTS: Final = {
    "blk.*.ffn_gate_exps": f"{_LAYER}.mlp.experts.#.gate_proj",
    "blk.*.ffn_up_exps": f"{_LAYER}.mlp.experts.#.up_proj",
    "blk.*.ffn_down_exps": f"{_LAYER}.mlp.experts.#.down_proj",
}

_ROTARY_QK: Final = {"blk.*.attn_q": ROTARY, "blk.*.attn_k": ROTARY}

_ALL_NORMS_PLUS_ONE: Final = dict.fromkeys(
    (
        "output_norm",
        "blk.*.attn_norm",
        "blk.*.post_attention_norm",
        "blk.*.ffn_norm",
        "blk.*.post_ffw_norm",
        "blk.*.attn_q_norm",
        "blk.*.attn_k_norm",
    ),
    PLUS_ONE,
)

_SIZES: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.freq_base": "rope_theta",
}

_RMS: Final = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_HEAD: Final = {"attention.key_length": "head_dim"}
_WINDOW: Final = {"attention.sliding_window": "sliding_window"}
_OF_EXPERTS: Final = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}

_MIXTRAL: Final = GgufFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names={
        **_AROUND,
        **_ATTENTION,
        **_NORMS,
        "blk.*.ffn_gate_inp": f"{_LAYER}.block_sparse_moe.gate",
    },
    experts={
        "blk.*.ffn_gate_exps": f"{_LAYER}.block_sparse_moe.experts.#.w1",
        "blk.*.ffn_down_exps": f"{_LAYER}.block_sparse_moe.experts.#.w2",
        "blk.*.ffn_up_exps": f"{_LAYER}.block_sparse_moe.experts.#.w3",
    },
    changed=_ROTARY_QK,
    config={
        **_SIZES,
        **_RMS,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
)

_LLAMA: Final = GgufFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=_LIKE_LLAMA,
    changed=_ROTARY_QK,
    config={**_SIZES, **_RMS, **_HEAD},
)

_MISTRAL3: Final = GgufFamily(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    names=_LIKE_LLAMA,
    changed=_ROTARY_QK,
    config={**_SIZES, **_RMS, **_HEAD},
)

_QWEN2: Final = GgufFamily(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    names=_LIKE_LLAMA,
    config={**_SIZES, **_RMS},
)

_QWEN3: Final = GgufFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=_LIKE_LLAMA,
    config={**_SIZES, **_RMS, **_HEAD},
)

_QWEN2MOE: Final = GgufFamily(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    names={**_AROUND, **_ATTENTION, **_NORMS, **_GATED, **_ROUTER, **_SHARED_EXPERT},
    experts=_EXPERTS,
    config={
        **_SIZES,
        **_RMS,
        **_OF_EXPERTS,
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
)

_QWEN3MOE: Final = GgufFamily(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names={**_AROUND, **_ATTENTION, **_NORMS, **_GATED, **_ROUTER},
    experts=_EXPERTS,
    config={**_SIZES, **_RMS, **_HEAD, **_OF_EXPERTS},
    constants={"norm_topk_prob": True},
)

_GEMMA: Final = GgufFamily(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    names=_LIKE_LLAMA,
    changed=_ALL_NORMS_PLUS_ONE,
    config={**_SIZES, **_RMS, **_HEAD},
)

_GEMMA2: Final = GgufFamily(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    names={**_AROUND, **_ATTENTION, **_NORMS_OF_GEMMA_2, **_GATED},
    changed=_ALL_NORMS_PLUS_ONE,
    config={
        **_SIZES,
        **_RMS,
        **_HEAD,
        **_WINDOW,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
)

_GEMMA3: Final = GgufFamily(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    names={**_AROUND, **_ATTENTION, **_NORMS_OF_GEMMA_2, **_GATED},
    changed=_ALL_NORMS_PLUS_ONE,
    config={**_SIZES, **_RMS, **_HEAD, **_WINDOW},
)

_PHI3: Final = GgufFamily(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    names={
        **_AROUND,
        **_NORMS,
        "blk.*.attn_qkv": f"{_LAYER}.self_attn.qkv_proj",
        "blk.*.attn_output": f"{_LAYER}.self_attn.o_proj",
        "blk.*.ffn_up": f"{_LAYER}.mlp.gate_up_proj",
        "blk.*.ffn_down": f"{_LAYER}.mlp.down_proj",
    },
    config={
        **_SIZES,
        **_RMS,
        **_WINDOW,
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    },
)

_GRANITE: Final = GgufFamily(
    model_type="granite",
    architecture="GraniteForCausalLM",
    names=_LIKE_LLAMA,
    changed=_ROTARY_QK,
    config={
        **_SIZES,
        **_RMS,
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
)

_COMMAND_R: Final = GgufFamily(
    model_type="cohere",
    architecture="CohereForCausalLM",
    names=_LIKE_LLAMA,
    config={
        **_SIZES,
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "logit_scale": "logit_scale",
    },
)

_OLMO2: Final = GgufFamily(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    names={**_AROUND, **_ATTENTION, **_NORMS_OF_OLMO_2, **_GATED},
    config={**_SIZES, **_RMS},
)

_STARCODER2: Final = GgufFamily(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    names={
        **_AROUND,
        **_ATTENTION,
        **_NORMS,
        "blk.*.ffn_up": f"{_LAYER}.mlp.c_fc",
        "blk.*.ffn_down": f"{_LAYER}.mlp.c_proj",
    },
    config={**_SIZES, "attention.layer_norm_epsilon": "norm_epsilon"},
)

_STABLELM: Final = GgufFamily(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    names=_LIKE_LLAMA,
    config={
        **_SIZES,
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "use_parallel_residual": "use_parallel_residual",
    },
)

_NEMOTRON: Final = GgufFamily(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    names={
        **_AROUND,
        **_ATTENTION,
        **_NORMS,
        "blk.*.ffn_up": f"{_LAYER}.mlp.up_proj",
        "blk.*.ffn_down": f"{_LAYER}.mlp.down_proj",
    },
    changed={
        "output_norm": PLUS_ONE,
        "blk.*.attn_norm": PLUS_ONE,
        "blk.*.ffn_norm": PLUS_ONE,
    },
    config={**_SIZES, "attention.layer_norm_epsilon": "norm_eps"},
)

_GPT2: Final = GgufFamily(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    names={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "blk.*.attn_norm": "transformer.h.*.ln_1",
        "blk.*.ffn_norm": "transformer.h.*.ln_2",
        "blk.*.attn_qkv": "transformer.h.*.attn.c_attn",
        "blk.*.attn_output": "transformer.h.*.attn.c_proj",
        "blk.*.ffn_up": "transformer.h.*.mlp.c_fc",
        "blk.*.ffn_down": "transformer.h.*.mlp.c_proj",
    },
    changed=dict.fromkeys(
        ("blk.*.attn_qkv", "blk.*.attn_output", "blk.*.ffn_up", "blk.*.ffn_down"), TRANSPOSED
    ),
    config={
        "block_count": "n_layer",
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
)

_GPTNEOX: Final = GgufFamily(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    names={
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
        "blk.*.attn_norm": "gpt_neox.layers.*.input_layernorm",
        "blk.*.ffn_norm": "gpt_neox.layers.*.post_attention_layernorm",
        "blk.*.attn_qkv": "gpt_neox.layers.*.attention.query_key_value",
        "blk.*.attn_output": "gpt_neox.layers.*.attention.dense",
        "blk.*.ffn_up": "gpt_neox.layers.*.mlp.dense_h_to_4h",
        "blk.*.ffn_down": "gpt_neox.layers.*.mlp.dense_4h_to_h",
    },
    changed={"blk.*.attn_qkv": FUSED},
    config={
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "use_parallel_residual": "use_parallel_residual",
    },
)

_BLOOM: Final = GgufFamily(
    model_type="bloom",
    architecture="BloomForCausalLM",
    names={
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "blk.*.attn_norm": "transformer.h.*.input_layernorm",
        "blk.*.ffn_norm": "transformer.h.*.post_attention_layernorm",
        "blk.*.attn_qkv": "transformer.h.*.self_attention.query_key_value",
        "blk.*.attn_output": "transformer.h.*.self_attention.dense",
        "blk.*.ffn_up": "transformer.h.*.mlp.dense_h_to_4h",
        "blk.*.ffn_down": "transformer.h.*.mlp.dense_4h_to_h",
    },
    changed={"blk.*.attn_qkv": FUSED},
    config={
        "block_count": "n_layer",
        "embedding_length": "hidden_size",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
)

_FALCON: Final = GgufFamily(
    model_type="falcon",
    architecture="FalconForCausalLM",
    names={
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "blk.*.attn_norm": "transformer.h.*.input_layernorm",
        "blk.*.attn_qkv": "transformer.h.*.self_attention.query_key_value",
        "blk.*.attn_output": "transformer.h.*.self_attention.dense",
        "blk.*.ffn_up": "transformer.h.*.mlp.dense_h_to_4h",
        "blk.*.ffn_down": "transformer.h.*.mlp.dense_4h_to_h",
    },
    changed={"blk.*.attn_qkv": FUSED},
    config={
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_kv_heads",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
)

_MAMBA: Final = GgufFamily(
    model_type="mamba",
    architecture="MambaForCausalLM",
    names={
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "output": "lm_head",
        "blk.*.attn_norm": "backbone.layers.*.norm",
        "blk.*.ssm_in": "backbone.layers.*.mixer.in_proj",
        "blk.*.ssm_conv1d": "backbone.layers.*.mixer.conv1d",
        "blk.*.ssm_x": "backbone.layers.*.mixer.x_proj",
        "blk.*.ssm_dt": "backbone.layers.*.mixer.dt_proj",
        "blk.*.ssm_a": "backbone.layers.*.mixer.A_log",
        "blk.*.ssm_d": "backbone.layers.*.mixer.D",
        "blk.*.ssm_out": "backbone.layers.*.mixer.out_proj",
    },
    changed={"blk.*.ssm_a": NEGATIVE_EXP},
    config={
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        "ssm.conv_kernel": "conv_kernel",
        "ssm.inner_size": "intermediate_size",
        "ssm.state_size": "state_size",
        "ssm.time_step_rank": "time_step_rank",
    },
)

FAMILIES: Final[Mapping[str, GgufFamily]] = {
    "llama": _LLAMA,
    "mistral3": _MISTRAL3,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "qwen2moe": _QWEN2MOE,
    "qwen3moe": _QWEN3MOE,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "phi3": _PHI3,
    "granite": _GRANITE,
    "command-r": _COMMAND_R,
    "olmo2": _OLMO2,
    "starcoder2": _STARCODER2,
    "stablelm": _STABLELM,
    "nemotron": _NEMOTRON,
    "gpt2": _GPT2,
    "gptneox": _GPTNEOX,
    "bloom": _BLOOM,
    "falcon": _FALCON,
    "mamba": _MAMBA,
}
"""The families by the architecture that `general.architecture` names."""

COMPUTED: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that a converter computed from the config, and that no checkpoint of transformers has."""


def family_of(architecture: str, expert_count: int) -> GgufFamily | None:
    """Returns the family of an architecture; None if it is not listed.

    Args:
        architecture: what `general.architecture` says.
        expert_count: experts of a layer; llama.cpp calls Mixtral a llama that has some.
    """
    if architecture == "llama" and expert_count > 0:
        return _MIXTRAL
    return FAMILIES.get(architecture)
