"""Has the names, joins and keys that several families share."""

from typing import Final

from nf4conv.format.gguf import PLUS_ONE, ROTARY
from nf4conv.sources.gguf.families.family import Join
from nf4conv.sources.gguf.families.steps.joining import join_experts, join_rows

LAYER: Final = "model.layers.*"

ATTENTION: Final = {
    "blk.*.attn_q": f"{LAYER}.self_attn.q_proj",
    "blk.*.attn_k": f"{LAYER}.self_attn.k_proj",
    "blk.*.attn_v": f"{LAYER}.self_attn.v_proj",
    "blk.*.attn_output": f"{LAYER}.self_attn.o_proj",
    "blk.*.attn_q_norm": f"{LAYER}.self_attn.q_norm",
    "blk.*.attn_k_norm": f"{LAYER}.self_attn.k_norm",
}

AROUND: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

GATED: Final = {
    "blk.*.ffn_gate": f"{LAYER}.mlp.gate_proj",
    "blk.*.ffn_up": f"{LAYER}.mlp.up_proj",
    "blk.*.ffn_down": f"{LAYER}.mlp.down_proj",
}

NOT_GATED: Final = {
    "blk.*.ffn_up": f"{LAYER}.mlp.up_proj",
    "blk.*.ffn_down": f"{LAYER}.mlp.down_proj",
}

NORMS: Final = {
    "blk.*.attn_norm": f"{LAYER}.input_layernorm",
    "blk.*.ffn_norm": f"{LAYER}.post_attention_layernorm",
}

NORMS_BEHIND: Final = {
    "blk.*.post_attention_norm": f"{LAYER}.post_attention_layernorm",
    "blk.*.post_ffw_norm": f"{LAYER}.post_feedforward_layernorm",
}

NORMS_AROUND: Final = {
    **NORMS_BEHIND,
    "blk.*.attn_norm": f"{LAYER}.input_layernorm",
    "blk.*.ffn_norm": f"{LAYER}.pre_feedforward_layernorm",
}

LIKE_LLAMA: Final = {**AROUND, **ATTENTION, **NORMS, **GATED}

ROTARY_QK: Final = {"blk.*.attn_q": ROTARY, "blk.*.attn_k": ROTARY}

ALL_NORMS_PLUS_ONE: Final = dict.fromkeys(
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

BASIC_SIZES: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}

SIZES: Final = {
    **BASIC_SIZES,
    "attention.head_count_kv": "num_key_value_heads",
    "rope.freq_base": "rope_theta",
}

RMS: Final = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
HEAD: Final = {"attention.key_length": "head_dim"}
WINDOW: Final = {"attention.sliding_window": "sliding_window"}
EXPERTS_USED: Final = {"expert_used_count": "num_experts_per_tok"}
MULTIPLIERS: Final = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}

GATE_AND_UP: Final = ("blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight")

ROUTER: Final = {"blk.*.ffn_gate_inp": f"{LAYER}.mlp.gate"}

EXPERTS: Final = {
    "blk.*.ffn_gate_exps": f"{LAYER}.mlp.experts.#.gate_proj",
    "blk.*.ffn_up_exps": f"{LAYER}.mlp.experts.#.up_proj",
    "blk.*.ffn_down_exps": f"{LAYER}.mlp.experts.#.down_proj",
}

SHARED_EXPERT: Final = {
    "blk.*.ffn_gate_shexp": f"{LAYER}.mlp.shared_expert.gate_proj",
    "blk.*.ffn_up_shexp": f"{LAYER}.mlp.shared_expert.up_proj",
    "blk.*.ffn_down_shexp": f"{LAYER}.mlp.shared_expert.down_proj",
    "blk.*.ffn_gate_inp_shexp": f"{LAYER}.mlp.shared_expert_gate",
}

EXPERT_COUNTS: Final = {
    **EXPERTS_USED,
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}

EXPERTS_OF_GRANITE: Final = {
    "blk.*.ffn_gate_inp": f"{LAYER}.block_sparse_moe.router.layer",
    "blk.*.ffn_down_exps.weight": f"{LAYER}.block_sparse_moe.output_linear.weight",
}

SHARED_EXPERT_OF_GRANITE: Final = {"blk.*.ffn_down_shexp": f"{LAYER}.shared_mlp.output_linear"}

JOINED_EXPERTS_OF_GRANITE: Final = Join(
    f"{LAYER}.block_sparse_moe.input_linear.weight", GATE_AND_UP, join_experts
)

JOINED_SHARED_EXPERT_OF_GRANITE: Final = Join(
    f"{LAYER}.shared_mlp.input_linear.weight",
    ("blk.*.ffn_gate_shexp.weight", "blk.*.ffn_up_shexp.weight"),
    join_rows,
)

BIASES_OF_LLAMA: Final = {"attention_bias": "blk.*.attn_q.bias", "mlp_bias": "blk.*.ffn_gate.bias"}

SHARED_EXPERTS: Final = {
    "blk.*.ffn_gate_shexp": f"{LAYER}.mlp.shared_experts.gate_proj",
    "blk.*.ffn_up_shexp": f"{LAYER}.mlp.shared_experts.up_proj",
    "blk.*.ffn_down_shexp": f"{LAYER}.mlp.shared_experts.down_proj",
}

CORRECTED: Final = {"blk.*.exp_probs_b.bias": f"{LAYER}.mlp.gate.e_score_correction_bias"}

NEXT_TOKENS: Final = {
    "blk.*.nextn.eh_proj": f"{LAYER}.eh_proj",
    "blk.*.nextn.enorm": f"{LAYER}.enorm",
    "blk.*.nextn.hnorm": f"{LAYER}.hnorm",
    "blk.*.nextn.embed_tokens": f"{LAYER}.embed_tokens",
    "blk.*.nextn.shared_head_norm": f"{LAYER}.shared_head.norm",
    "blk.*.nextn.shared_head_head": f"{LAYER}.shared_head.head",
}
"""Names in the layer behind the last one, which predicts the token after the next."""

COUNTS_OF_DEEPSEEK: Final = {
    **EXPERTS_USED,
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
