"""Has the names and keys that many families share."""

from typing import Final

from nf4conv.format.gguf import PLUS_ONE, ROTARY

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

SIZES: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
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

BIASES_OF_LLAMA: Final = {"attention_bias": "blk.*.attn_q.bias", "mlp_bias": "blk.*.ffn_gate.bias"}
