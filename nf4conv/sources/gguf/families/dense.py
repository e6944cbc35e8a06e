"""Lists decoders whose layers are all alike: attention, and a network of two or three matrices."""

from typing import Final

from nf4conv.format.gguf import PLUS_ONE
from nf4conv.sources.gguf.families.common import (
    ALL_NORMS_PLUS_ONE,
    AROUND,
    ATTENTION,
    BIASES_OF_LLAMA,
    GATED,
    HEAD,
    LAYER,
    LIKE_LLAMA,
    MULTIPLIERS,
    NORMS,
    NORMS_AROUND,
    NORMS_BEHIND,
    NOT_GATED,
    RMS,
    ROTARY_QK,
    SIZES,
    WINDOW,
)
from nf4conv.sources.gguf.families.completing import (
    add_heads_of_gemma_4,
    add_layer_types,
    add_no_window,
    add_scale_of_gemma,
    add_sparsity_of_activations,
)
from nf4conv.sources.gguf.families.family import GgufFamily, Join
from nf4conv.sources.gguf.families.joining import join_grouped_queries

LLAMA: Final = GgufFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=LIKE_LLAMA,
    changed=ROTARY_QK,
    config={**SIZES, **RMS, **HEAD},
    shown=BIASES_OF_LLAMA,
    also=("mistral", "smollm3"),
)

MISTRAL3: Final = GgufFamily(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    names=LIKE_LLAMA,
    changed=ROTARY_QK,
    config={**SIZES, **RMS, **HEAD},
)

QWEN2: Final = GgufFamily(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    names=LIKE_LLAMA,
    config={**SIZES, **RMS},
)

QWEN3: Final = GgufFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=LIKE_LLAMA,
    config={**SIZES, **RMS, **HEAD},
)

GEMMA: Final = GgufFamily(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    names=LIKE_LLAMA,
    changed=ALL_NORMS_PLUS_ONE,
    config={**SIZES, **RMS, **HEAD},
)

_LIKE_GEMMA_2: Final = {**AROUND, **ATTENTION, **NORMS_AROUND, **GATED}

GEMMA2: Final = GgufFamily(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    names=_LIKE_GEMMA_2,
    changed=ALL_NORMS_PLUS_ONE,
    config={
        **SIZES,
        **RMS,
        **HEAD,
        **WINDOW,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    complete=(add_scale_of_gemma,),
)

GEMMA3: Final = GgufFamily(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    names=_LIKE_GEMMA_2,
    changed=ALL_NORMS_PLUS_ONE,
    config={**SIZES, **RMS, **HEAD, **WINDOW},
    complete=(add_scale_of_gemma,),
    also=("gemma3",),
)

EMBEDDING_GEMMA: Final = GgufFamily(
    model_type="gemma3_text",
    architecture="Gemma3TextModel",
    names={name: value.removeprefix("model.") for name, value in GEMMA3.names.items()},
    changed=ALL_NORMS_PLUS_ONE,
    config=GEMMA3.config,
    constants={"use_bidirectional_attention": True},
    complete=(add_scale_of_gemma,),
)

_INPUTS_OF_LAYERS: Final = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "blk.*.inp_gate": f"{LAYER}.per_layer_input_gate",
    "blk.*.proj": f"{LAYER}.per_layer_projection",
    "blk.*.post_norm": f"{LAYER}.post_per_layer_input_norm",
}
"""Names of the embeddings that Gemma 3n and 4 have for each layer."""

GEMMA3N: Final = GgufFamily(
    model_type="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    names={
        **_LIKE_GEMMA_2,
        **_INPUTS_OF_LAYERS,
        "blk.*.altup_correct_scale.weight": f"{LAYER}.altup.correct_output_scale",
        "blk.*.altup_correct_coef": f"{LAYER}.altup.correction_coefs",
        "blk.*.altup_predict_coef": f"{LAYER}.altup.prediction_coefs",
        "blk.*.altup_router": f"{LAYER}.altup.modality_router",
        "blk.*.altup_router_norm": f"{LAYER}.altup.router_norm",
        "blk.*.laurel_l": f"{LAYER}.laurel.linear_left",
        "blk.*.laurel_r": f"{LAYER}.laurel.linear_right",
        "blk.*.laurel_post_norm": f"{LAYER}.laurel.post_laurel_norm",
    },
    experts={
        "altup_proj": "model.altup_projections.#",
        "altup_unembd_proj": "model.altup_unembed_projections.#",
    },
    config={
        **SIZES,
        **RMS,
        **HEAD,
        **WINDOW,
        "rope.freq_base_swa": "rope_local_base_freq",
        "final_logit_softcapping": "final_logit_softcapping",
        "altup.active_idx": "altup_active_idx",
        "altup.num_inputs": "altup_num_inputs",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "attention.shared_kv_layers": "num_kv_shared_layers",
    },
    rows={
        "laurel_rank": "model.layers.0.laurel.linear_left.weight",
        "vocab_size_per_layer_input": "model.embed_tokens_per_layer.weight",
    },
    complete=(add_layer_types, add_sparsity_of_activations),
    also=("gemma3n",),
)

GEMMA4: Final = GgufFamily(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    names={
        **_LIKE_GEMMA_2,
        **_INPUTS_OF_LAYERS,
        "blk.*.layer_output_scale.weight": f"{LAYER}.layer_scalar",
    },
    config={
        **SIZES,
        **RMS,
        **WINDOW,
        "attention.key_length": "global_head_dim",
        "attention.key_length_swa": "head_dim",
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    rows={"vocab_size_per_layer_input": "model.embed_tokens_per_layer.weight"},
    complete=(add_layer_types, add_heads_of_gemma_4),
    also=("gemma4",),
)

PHI3: Final = GgufFamily(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    names={
        **AROUND,
        **NORMS,
        "blk.*.attn_qkv": f"{LAYER}.self_attn.qkv_proj",
        "blk.*.attn_output": f"{LAYER}.self_attn.o_proj",
        "blk.*.ffn_up": f"{LAYER}.mlp.gate_up_proj",
        "blk.*.ffn_down": f"{LAYER}.mlp.down_proj",
    },
    config={
        **SIZES,
        **RMS,
        **WINDOW,
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    },
)

GRANITE: Final = GgufFamily(
    model_type="granite",
    architecture="GraniteForCausalLM",
    names=LIKE_LLAMA,
    changed=ROTARY_QK,
    config={**SIZES, **RMS, **MULTIPLIERS},
    shown=BIASES_OF_LLAMA,
)

COMMAND_R: Final = GgufFamily(
    model_type="cohere",
    architecture="CohereForCausalLM",
    names=LIKE_LLAMA,
    config={
        **SIZES,
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "logit_scale": "logit_scale",
    },
    shown={"attention_bias": "blk.*.attn_q.bias"},
)

OLMO2: Final = GgufFamily(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    names={**AROUND, **ATTENTION, **NORMS_BEHIND, **GATED},
    config={**SIZES, **RMS},
)

STARCODER2: Final = GgufFamily(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    names={
        **AROUND,
        **ATTENTION,
        **NORMS,
        "blk.*.ffn_up": f"{LAYER}.mlp.c_fc",
        "blk.*.ffn_down": f"{LAYER}.mlp.c_proj",
    },
    config={**SIZES, "attention.layer_norm_epsilon": "norm_epsilon"},
    shown={"use_bias": "blk.*.attn_q.bias"},
)

STABLELM: Final = GgufFamily(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    names=LIKE_LLAMA,
    config={
        **SIZES,
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "use_parallel_residual": "use_parallel_residual",
    },
    shown={"use_qkv_bias": "blk.*.attn_q.bias"},
)

NEMOTRON: Final = GgufFamily(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    names={**AROUND, **ATTENTION, **NORMS, **NOT_GATED},
    changed=dict.fromkeys(("output_norm", "blk.*.attn_norm", "blk.*.ffn_norm"), PLUS_ONE),
    config={**SIZES, "attention.layer_norm_epsilon": "norm_eps"},
)

OLMO: Final = GgufFamily(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    names={**AROUND, **ATTENTION, **GATED},
    changed=ROTARY_QK,
    config={**SIZES, "attention.clamp_kqv": "clip_qkv"},
)

OLMO3: Final = GgufFamily(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    names={**AROUND, **ATTENTION, **NORMS_BEHIND, **GATED},
    config={**SIZES, **RMS, **WINDOW},
    complete=(add_layer_types,),
    marker="attention.sliding_window",
)

COHERE2: Final = GgufFamily(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    names=LIKE_LLAMA,
    config={
        **SIZES,
        **WINDOW,
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "logit_scale": "logit_scale",
    },
    constants={"attention_bias": False},
)

SMOLLM3: Final = GgufFamily(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    names=LIKE_LLAMA,
    changed=ROTARY_QK,
    config={**SIZES, **RMS},
    shown=BIASES_OF_LLAMA,
)

ERNIE4_5: Final = GgufFamily(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    names=LIKE_LLAMA,
    config={**SIZES, **RMS, **HEAD},
    shown={"use_bias": "blk.*.attn_q.bias"},
)

EXAONE4: Final = GgufFamily(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    names={**AROUND, **ATTENTION, **NORMS_BEHIND, **GATED},
    config={**SIZES, **RMS, **HEAD, **WINDOW},
    complete=(add_layer_types, add_no_window),
)

GLM4: Final = GgufFamily(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    names={
        **AROUND,
        **ATTENTION,
        **NORMS,
        "blk.*.post_attention_norm": f"{LAYER}.post_self_attn_layernorm",
        "blk.*.post_ffw_norm": f"{LAYER}.post_mlp_layernorm",
        "blk.*.ffn_up": f"{LAYER}.mlp.gate_up_proj",
        "blk.*.ffn_down": f"{LAYER}.mlp.down_proj",
    },
    config={**SIZES, **RMS, **HEAD},
    shown={"attention_bias": "blk.*.attn_q.bias"},
)

SEED_OSS: Final = GgufFamily(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    names={
        **AROUND,
        **ATTENTION,
        **GATED,
        "blk.*.attn_norm": f"{LAYER}.input_layernorm",
        "blk.*.post_attention_norm": f"{LAYER}.post_attention_layernorm",
    },
    config={**SIZES, **RMS, **HEAD},
    shown={
        "attention_bias": "blk.*.attn_q.bias",
        "attention_out_bias": "blk.*.attn_output.bias",
        "mlp_bias": "blk.*.ffn_gate.bias",
    },
)

ARCEE: Final = GgufFamily(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    names={**AROUND, **ATTENTION, **NORMS, **NOT_GATED},
    changed=ROTARY_QK,
    config={**SIZES, **RMS, **HEAD},
    shown={"attention_bias": "blk.*.attn_q.bias", "mlp_bias": "blk.*.ffn_up.bias"},
)

HUNYUAN_DENSE: Final = GgufFamily(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    names={
        **LIKE_LLAMA,
        "blk.*.attn_q_norm": f"{LAYER}.self_attn.query_layernorm",
        "blk.*.attn_k_norm": f"{LAYER}.self_attn.key_layernorm",
    },
    config={**SIZES, **RMS, **HEAD},
    shown={"attention_bias": "blk.*.attn_q.bias"},
)

INTERNLM2: Final = GgufFamily(
    model_type="internlm2",
    architecture="InternLM2ForCausalLM",
    names={
        "token_embd": "model.tok_embeddings",
        "output_norm": "model.norm",
        "output": "output",
        "blk.*.attn_output": f"{LAYER}.attention.wo",
        "blk.*.attn_norm": f"{LAYER}.attention_norm",
        "blk.*.ffn_norm": f"{LAYER}.ffn_norm",
        "blk.*.ffn_gate": f"{LAYER}.feed_forward.w1",
        "blk.*.ffn_down": f"{LAYER}.feed_forward.w2",
        "blk.*.ffn_up": f"{LAYER}.feed_forward.w3",
    },
    joined=(
        Join(
            f"{LAYER}.attention.wqkv.weight",
            ("blk.*.attn_q.weight", "blk.*.attn_k.weight", "blk.*.attn_v.weight"),
            join_grouped_queries,
        ),
    ),
    config={**SIZES, **RMS},
    constants={"bias": False},
)
