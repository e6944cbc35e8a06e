"""Lists mixtures of experts of 2025 and 2026: Trinity, K-EXAONE, Hunyuan, Mellum 2, North Mini."""

from typing import Final

from nf4conv.sources.gguf.families.family import GgufFamily
from nf4conv.sources.gguf.families.mixtures import GLM4_MOE
from nf4conv.sources.gguf.families.steps.common import (
    AROUND,
    ATTENTION,
    COUNTS_OF_DEEPSEEK,
    EXPERT_COUNTS,
    EXPERTS,
    GATED,
    HEAD,
    LAYER,
    LIKE_LLAMA,
    NORMS,
    RMS,
    ROUTER,
    SHARED_EXPERTS,
    SIZES,
    WINDOW,
)
from nf4conv.sources.gguf.families.steps.completing import (
    add_choice_of_experts,
    add_full_rotation,
    add_kinds_of_networks,
    add_layer_types,
    add_rotation_of_each_kind,
)
from nf4conv.sources.gguf.families.steps.telling import has_tokens_of_solar

_SHARED_MLP: Final = {
    "blk.*.ffn_gate_shexp": f"{LAYER}.mlp.shared_mlp.gate_proj",
    "blk.*.ffn_up_shexp": f"{LAYER}.mlp.shared_mlp.up_proj",
    "blk.*.ffn_down_shexp": f"{LAYER}.mlp.shared_mlp.down_proj",
}

_NAMES_OF_AFMOE: Final = {
    **AROUND,
    **ATTENTION,
    **GATED,
    **SHARED_EXPERTS,
    "blk.*.attn_gate": f"{LAYER}.self_attn.gate_proj",
    "blk.*.attn_norm": f"{LAYER}.input_layernorm",
    "blk.*.post_attention_norm": f"{LAYER}.post_attention_layernorm",
    "blk.*.ffn_norm": f"{LAYER}.pre_mlp_layernorm",
    "blk.*.post_ffw_norm": f"{LAYER}.post_mlp_layernorm",
    "blk.*.ffn_gate_inp": f"{LAYER}.mlp.router.gate",
    "blk.*.exp_probs_b.bias": f"{LAYER}.mlp.expert_bias",
}

AFMOE: Final = GgufFamily(
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    names=_NAMES_OF_AFMOE,
    experts=EXPERTS,
    config={
        **SIZES,
        **RMS,
        **HEAD,
        **WINDOW,
        **EXPERT_COUNTS,
        "expert_shared_count": "num_shared_experts",
        "expert_weights_scale": "route_scale",
        "leading_dense_block_count": "num_dense_layers",
    },
    constants={"mup_enabled": True},  # llama.cpp scales the embeddings of every such model
)

EXAONE_MOE: Final = GgufFamily(
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    names={
        **LIKE_LLAMA,
        **ROUTER,
        **SHARED_EXPERTS,
        "blk.*.exp_probs_b.bias": f"{LAYER}.mlp.e_score_correction_bias",
    },
    experts=EXPERTS,
    config={
        **SIZES,
        **RMS,
        **HEAD,
        **WINDOW,
        **COUNTS_OF_DEEPSEEK,
        "expert_count": "num_experts",
        "expert_shared_count": "num_shared_experts",
    },
    complete=(add_layer_types,),
)

HUNYUAN_MOE: Final = GgufFamily(
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    names={
        **LIKE_LLAMA,
        **_SHARED_MLP,
        "blk.*.attn_q_norm": f"{LAYER}.self_attn.query_layernorm",
        "blk.*.attn_k_norm": f"{LAYER}.self_attn.key_layernorm",
        "blk.*.ffn_gate_inp": f"{LAYER}.mlp.gate.wg",
    },
    experts=EXPERTS,
    config={
        **SIZES,
        **RMS,
        **HEAD,
        "expert_count": "num_experts",
        "expert_used_count": "moe_topk",
    },
    shown={"attention_bias": "blk.*.attn_q.bias"},
)

HY_V3: Final = GgufFamily(
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    names={
        **LIKE_LLAMA,
        **_SHARED_MLP,
        "blk.*.ffn_gate_inp": f"{LAYER}.mlp.router.gate",
        "blk.*.exp_probs_b": f"{LAYER}.mlp.expert_bias",
    },
    experts=EXPERTS,
    config={
        **SIZES,
        **RMS,
        **HEAD,
        **EXPERT_COUNTS,
        "expert_weights_scale": "router_scaling_factor",
    },
    complete=(add_kinds_of_networks,),
)

MELLUM: Final = GgufFamily(
    model_type="mellum",
    architecture="MellumForCausalLM",
    names={**AROUND, **ATTENTION, **NORMS, **GATED, **ROUTER},
    experts=EXPERTS,
    config={**SIZES, **RMS, **HEAD, **WINDOW, **EXPERT_COUNTS},
    complete=(add_layer_types, add_kinds_of_networks, add_rotation_of_each_kind),
)

COHERE2_MOE: Final = GgufFamily(
    model_type="cohere2_moe",
    architecture="Cohere2MoeForCausalLM",
    names={**AROUND, **ATTENTION, **NORMS, **GATED, **ROUTER},
    experts=EXPERTS,
    config={
        **SIZES,
        **HEAD,
        **WINDOW,
        **EXPERT_COUNTS,
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "expert_feed_forward_length": "intermediate_size",
        "expert_weights_norm": "norm_topk_prob",
        "logit_scale": "logit_scale",
    },
    rows={"prefix_dense_intermediate_size": "model.layers.0.mlp.gate_proj.weight"},
    complete=(add_layer_types, add_kinds_of_networks, add_choice_of_experts),
)

SOLAR_OPEN: Final = GgufFamily(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    names={**LIKE_LLAMA, **GLM4_MOE.names},
    experts=EXPERTS,
    config=GLM4_MOE.config,
    complete=(add_full_rotation,),
    sign=has_tokens_of_solar,
)

GRANITE_MOE_SWA: Final = GgufFamily(
    model_type="granitemoe_swa",
    architecture="GraniteMoeSWAForCausalLM",
    names={},
    marker="blk.*.ffn_gate_up_exps.weight",
    refusal="has experts in a layout that nf4conv does not read",
)
