"""Lists mixtures of experts."""

from typing import Final

from nf4conv.sources.gguf.families.family import GgufFamily, Join
from nf4conv.sources.gguf.families.steps.common import (
    AROUND,
    ATTENTION,
    CORRECTED,
    COUNTS_OF_DEEPSEEK,
    EXPERT_COUNTS,
    EXPERTS,
    EXPERTS_OF_GRANITE,
    EXPERTS_USED,
    GATE_AND_UP,
    GATED,
    HEAD,
    JOINED_EXPERTS_OF_GRANITE,
    JOINED_SHARED_EXPERT_OF_GRANITE,
    LAYER,
    LIKE_LLAMA,
    MULTIPLIERS,
    NEXT_TOKENS,
    NORMS,
    RMS,
    ROTARY_QK,
    ROUTER,
    SHARED_EXPERT,
    SHARED_EXPERT_OF_GRANITE,
    SHARED_EXPERTS,
    SIZES,
    WINDOW,
)
from nf4conv.sources.gguf.families.steps.completing import (
    add_norm_of_queries,
    add_rounding_of_yarn,
)
from nf4conv.sources.gguf.families.steps.joining import (
    join_alternating_experts,
    join_transposed_experts,
)

_NUMBERED_EXPERTS: Final = {
    "blk.*.ffn_gate_exps": f"{LAYER}.block_sparse_moe.experts.#.w1",
    "blk.*.ffn_down_exps": f"{LAYER}.block_sparse_moe.experts.#.w2",
    "blk.*.ffn_up_exps": f"{LAYER}.block_sparse_moe.experts.#.w3",
}

_NAMES_OF_MIXTRAL: Final = {
    **AROUND,
    **ATTENTION,
    **NORMS,
    "blk.*.ffn_gate_inp": f"{LAYER}.block_sparse_moe.gate",
}

_COUNTS_OF_MIXTRAL: Final = {**EXPERTS_USED, "expert_count": "num_local_experts"}

MIXTRAL: Final = GgufFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names=_NAMES_OF_MIXTRAL,
    experts=_NUMBERED_EXPERTS,
    changed=ROTARY_QK,
    config={**SIZES, **RMS, **_COUNTS_OF_MIXTRAL},
    marker="expert_count",
)

QWEN2MOE: Final = GgufFamily(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    names={**AROUND, **ATTENTION, **NORMS, **GATED, **ROUTER, **SHARED_EXPERT},
    experts=EXPERTS,
    config={
        **SIZES,
        **RMS,
        **EXPERT_COUNTS,
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
)

QWEN3MOE: Final = GgufFamily(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names={**AROUND, **ATTENTION, **NORMS, **GATED, **ROUTER},
    experts=EXPERTS,
    config={**SIZES, **RMS, **HEAD, **EXPERT_COUNTS},
    constants={"norm_topk_prob": True},
    shown={"attention_bias": "blk.*.attn_q.bias"},
)

OLMOE: Final = GgufFamily(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    names={**AROUND, **ATTENTION, **NORMS, **ROUTER},
    experts=EXPERTS,
    config={**SIZES, **RMS, **EXPERTS_USED, "expert_count": "num_experts"},
)

MINIMAX_M2: Final = GgufFamily(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    names={
        **_NAMES_OF_MIXTRAL,
        "blk.*.exp_probs_b.bias": f"{LAYER}.block_sparse_moe.e_score_correction_bias",
    },
    experts=_NUMBERED_EXPERTS,
    config={
        **SIZES,
        **RMS,
        **HEAD,
        **_COUNTS_OF_MIXTRAL,
        "rope.dimension_count": "rotary_dim",
    },
    constants={"use_routing_bias": True, "scoring_func": "sigmoid", "use_qk_norm": True},
)

GPT_OSS: Final = GgufFamily(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    names={
        **AROUND,
        **ATTENTION,
        "blk.*.attn_norm": f"{LAYER}.input_layernorm",
        "blk.*.post_attention_norm": f"{LAYER}.post_attention_layernorm",
        "blk.*.attn_sinks.weight": f"{LAYER}.self_attn.sinks",
        "blk.*.ffn_gate_inp": f"{LAYER}.mlp.router",
        "blk.*.ffn_down_exps.bias": f"{LAYER}.mlp.experts.down_proj_bias",
    },
    joined=(
        Join(f"{LAYER}.mlp.experts.gate_up_proj", GATE_AND_UP, join_alternating_experts),
        Join(
            f"{LAYER}.mlp.experts.gate_up_proj_bias",
            ("blk.*.ffn_gate_exps.bias", "blk.*.ffn_up_exps.bias"),
            join_alternating_experts,
        ),
        Join(
            f"{LAYER}.mlp.experts.down_proj",
            ("blk.*.ffn_down_exps.weight",),
            join_transposed_experts,
        ),
    ),
    config={**SIZES, **RMS, **HEAD, **WINDOW, **_COUNTS_OF_MIXTRAL},
    complete=(add_rounding_of_yarn,),
)

LLAMA4: Final = GgufFamily(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    names={
        **AROUND,
        **ATTENTION,
        **NORMS,
        "blk.*.ffn_gate": f"{LAYER}.feed_forward.gate_proj",
        "blk.*.ffn_up": f"{LAYER}.feed_forward.up_proj",
        "blk.*.ffn_down": f"{LAYER}.feed_forward.down_proj",
        "blk.*.ffn_gate_inp": f"{LAYER}.feed_forward.router",
        "blk.*.ffn_gate_shexp": f"{LAYER}.feed_forward.shared_expert.gate_proj",
        "blk.*.ffn_up_shexp": f"{LAYER}.feed_forward.shared_expert.up_proj",
        "blk.*.ffn_down_shexp": f"{LAYER}.feed_forward.shared_expert.down_proj",
    },
    joined=(
        Join(f"{LAYER}.feed_forward.experts.gate_up_proj", GATE_AND_UP, join_transposed_experts),
        Join(
            f"{LAYER}.feed_forward.experts.down_proj",
            ("blk.*.ffn_down_exps.weight",),
            join_transposed_experts,
        ),
    ),
    config={
        **SIZES,
        **RMS,
        **HEAD,
        **EXPERTS_USED,
        "feed_forward_length": "intermediate_size_mlp",
        "expert_feed_forward_length": "intermediate_size",
        "expert_count": "num_local_experts",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
    },
    complete=(add_norm_of_queries,),
)

GLM4_MOE: Final = GgufFamily(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    names={
        **AROUND,
        **ATTENTION,
        **GATED,
        **ROUTER,
        **CORRECTED,
        **SHARED_EXPERTS,
        **NEXT_TOKENS,
        "blk.*.attn_norm": f"{LAYER}.input_layernorm",
        "blk.*.post_attention_norm": f"{LAYER}.post_attention_layernorm",
    },
    experts=EXPERTS,
    config={**SIZES, **RMS, **HEAD, **COUNTS_OF_DEEPSEEK},
    shown={
        "attention_bias": "blk.*.attn_q.bias",
        "use_qk_norm": "blk.*.attn_q_norm.weight",
    },
)

DOTS1: Final = GgufFamily(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    names={**LIKE_LLAMA, **ROUTER, **CORRECTED, **SHARED_EXPERTS},
    experts=EXPERTS,
    config={**SIZES, **RMS, **HEAD, **COUNTS_OF_DEEPSEEK},
    shown={"attention_bias": "blk.*.attn_q.bias"},
)

ERNIE4_5_MOE: Final = GgufFamily(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    names={
        **LIKE_LLAMA,
        **ROUTER,
        **SHARED_EXPERTS,
        "blk.*.exp_probs_b.bias": f"{LAYER}.mlp.moe_statics.e_score_correction_bias",
    },
    experts=EXPERTS,
    config={
        **SIZES,
        **RMS,
        **HEAD,
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_k",
        "expert_shared_count": "moe_num_shared_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "leading_dense_block_count": "moe_layer_start_index",
        "interleave_moe_layer_step": "moe_layer_interval",
    },
    shown={"use_bias": "blk.*.attn_q.bias"},
)

_NAMES_OF_GRANITE: Final = {
    **AROUND,
    **ATTENTION,
    **NORMS,
    **EXPERTS_OF_GRANITE,
}

_CONFIG_OF_GRANITE: Final = {
    **SIZES,
    **RMS,
    **MULTIPLIERS,
    **_COUNTS_OF_MIXTRAL,
}

GRANITE_MOE: Final = GgufFamily(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    names=_NAMES_OF_GRANITE,
    joined=(JOINED_EXPERTS_OF_GRANITE,),
    changed=ROTARY_QK,
    config=_CONFIG_OF_GRANITE,
    shown={"attention_bias": "blk.*.attn_q.bias"},
)

GRANITE_MOE_SHARED: Final = GgufFamily(
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    names={**_NAMES_OF_GRANITE, **SHARED_EXPERT_OF_GRANITE},
    joined=(JOINED_EXPERTS_OF_GRANITE, JOINED_SHARED_EXPERT_OF_GRANITE),
    changed=ROTARY_QK,
    config={**_CONFIG_OF_GRANITE, "expert_shared_feed_forward_length": "shared_intermediate_size"},
    shown={"attention_bias": "blk.*.attn_q.bias"},
    marker="blk.*.ffn_gate_shexp.weight",
)

PHIMOE: Final = GgufFamily(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    names=_NAMES_OF_MIXTRAL,
    experts=_NUMBERED_EXPERTS,
    config={
        **SIZES,
        **RMS,
        **WINDOW,
        **_COUNTS_OF_MIXTRAL,
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    },
    shown={
        "attention_bias": "blk.*.attn_q.bias",
        "lm_head_bias": "output.bias",
    },
)
