"""Lists the models of Gemma, from the first to Gemma 4."""

from typing import Final

from nf4conv.sources.gguf.families.family import GgufFamily
from nf4conv.sources.gguf.families.steps.common import (
    ALL_NORMS_PLUS_ONE,
    AROUND,
    ATTENTION,
    GATED,
    HEAD,
    LAYER,
    LIKE_LLAMA,
    NORMS_AROUND,
    RMS,
    SIZES,
    WINDOW,
)
from nf4conv.sources.gguf.families.steps.completing import (
    add_heads_of_gemma_4,
    add_layer_types,
    add_scale_of_gemma,
    add_sparsity_of_activations,
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
    is_encoder=True,
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

GEMMA4_MOE: Final = GgufFamily(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    names={
        **GEMMA4.names,
        "blk.*.post_ffw_norm_1": f"{LAYER}.post_feedforward_layernorm_1",
        "blk.*.post_ffw_norm_2": f"{LAYER}.post_feedforward_layernorm_2",
        "blk.*.pre_ffw_norm_2": f"{LAYER}.pre_feedforward_layernorm_2",
        "blk.*.ffn_gate_inp.weight": f"{LAYER}.router.proj.weight",
        "blk.*.ffn_gate_inp.scale": f"{LAYER}.router.scale",
        "blk.*.ffn_down_exps.scale": f"{LAYER}.router.per_expert_scale",
        "blk.*.ffn_gate_up_exps.weight": f"{LAYER}.experts.gate_up_proj",
        "blk.*.ffn_down_exps.weight": f"{LAYER}.experts.down_proj",
    },
    config={
        **GEMMA4.config,
        "expert_count": "num_experts",
        "expert_used_count": "top_k_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    constants={"enable_moe_block": True},
    rows=GEMMA4.rows,
    complete=GEMMA4.complete,
    marker="expert_count",
    also=GEMMA4.also,
)
