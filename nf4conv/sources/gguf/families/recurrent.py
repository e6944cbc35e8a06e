"""Lists models whose layers carry states or convolve, all of them or some."""

from typing import Final

from nf4conv.format.gguf import NEGATIVE_EXP
from nf4conv.sources.gguf.families.family import CHANNELS, FLAT, GgufFamily, Join
from nf4conv.sources.gguf.families.steps.common import (
    AROUND,
    ATTENTION,
    BASIC_SIZES,
    COUNTS_OF_DEEPSEEK,
    EXPERTS_OF_GRANITE,
    EXPERTS_USED,
    HEAD,
    JOINED_EXPERTS_OF_GRANITE,
    JOINED_SHARED_EXPERT_OF_GRANITE,
    LAYER,
    MULTIPLIERS,
    NORMS,
    RMS,
    ROTARY_QK,
    SHARED_EXPERT_OF_GRANITE,
    SIZES,
)
from nf4conv.sources.gguf.families.steps.completing import (
    add_heads_of_states,
    add_layers_of_bamba,
    add_layers_of_granite,
    add_layers_of_jamba,
    add_layers_of_nemotron,
    add_layers_with_attention,
)
from nf4conv.sources.gguf.families.steps.joining import join_rows
from nf4conv.sources.gguf.families.steps.telling import (
    has_layers_that_differ,
    rotates_beside_states,
)

_SIZES_OF_MAMBA: Final = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "state_size",
}

MAMBA: Final = GgufFamily(
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
    shapes={"blk.*.ssm_conv1d.weight": CHANNELS},
    config={
        **_SIZES_OF_MAMBA,
        "ssm.inner_size": "intermediate_size",
        "ssm.time_step_rank": "time_step_rank",
    },
)

FALCON_MAMBA: Final = GgufFamily(
    model_type="falcon_mamba",
    architecture="FalconMambaForCausalLM",
    names=MAMBA.names,
    changed=MAMBA.changed,
    shapes=MAMBA.shapes,
    config=MAMBA.config,
    marker="ssm.dt_b_c_rms",
)

MAMBA2: Final = GgufFamily(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    names={
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "output": "lm_head",
        "blk.*.attn_norm": "backbone.layers.*.norm",
        "blk.*.ssm_in": "backbone.layers.*.mixer.in_proj",
        "blk.*.ssm_conv1d": "backbone.layers.*.mixer.conv1d",
        "blk.*.ssm_dt.bias": "backbone.layers.*.mixer.dt_bias",
        "blk.*.ssm_a": "backbone.layers.*.mixer.A_log",
        "blk.*.ssm_d": "backbone.layers.*.mixer.D",
        "blk.*.ssm_norm": "backbone.layers.*.mixer.norm",
        "blk.*.ssm_out": "backbone.layers.*.mixer.out_proj",
    },
    changed={"blk.*.ssm_a": NEGATIVE_EXP},
    shapes={
        "blk.*.ssm_conv1d.weight": CHANNELS,
        "blk.*.ssm_a": FLAT,
        "blk.*.ssm_d": FLAT,
        "blk.*.ssm_norm.weight": FLAT,
    },
    config={
        **_SIZES_OF_MAMBA,
        "ssm.time_step_rank": "num_heads",
        "ssm.group_count": "n_groups",
    },
    complete=(add_heads_of_states,),
)

_NAMES_OF_GRANITE: Final = {
    **AROUND,
    **ATTENTION,
    **NORMS,
    "blk.*.ssm_in": f"{LAYER}.mamba.in_proj",
    "blk.*.ssm_conv1d": f"{LAYER}.mamba.conv1d",
    "blk.*.ssm_dt.bias": f"{LAYER}.mamba.dt_bias",
    "blk.*.ssm_a": f"{LAYER}.mamba.A_log",
    "blk.*.ssm_d": f"{LAYER}.mamba.D",
    "blk.*.ssm_norm": f"{LAYER}.mamba.norm",
    "blk.*.ssm_out": f"{LAYER}.mamba.out_proj",
}

_CONFIG_OF_GRANITE: Final = {
    **SIZES,
    **RMS,
    **MULTIPLIERS,
    **EXPERTS_USED,
    "expert_count": "num_local_experts",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}

GRANITE_HYBRID: Final = GgufFamily(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    names={**_NAMES_OF_GRANITE, "blk.*.ffn_down": f"{LAYER}.shared_mlp.output_linear"},
    joined=(
        Join(
            f"{LAYER}.shared_mlp.input_linear.weight",
            ("blk.*.ffn_gate.weight", "blk.*.ffn_up.weight"),
            join_rows,
        ),
    ),
    changed={**ROTARY_QK, "blk.*.ssm_a": NEGATIVE_EXP},
    shapes=MAMBA2.shapes,
    config=_CONFIG_OF_GRANITE,
    complete=(add_layers_of_granite,),
)

GRANITE_HYBRID_MOE: Final = GgufFamily(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    names={
        **_NAMES_OF_GRANITE,
        **EXPERTS_OF_GRANITE,
        **SHARED_EXPERT_OF_GRANITE,
    },
    joined=(JOINED_EXPERTS_OF_GRANITE, JOINED_SHARED_EXPERT_OF_GRANITE),
    changed=GRANITE_HYBRID.changed,
    shapes=MAMBA2.shapes,
    config=_CONFIG_OF_GRANITE,
    complete=(add_layers_of_granite,),
    marker="blk.*.ffn_gate_exps.weight",
)

BAMBA: Final = GgufFamily(
    model_type="bamba",
    architecture="BambaForCausalLM",
    names={
        **_NAMES_OF_GRANITE,
        "output_norm": "model.final_layernorm",
        "blk.*.ffn_norm": f"{LAYER}.pre_ff_layernorm",
        "blk.*.ffn_gate": f"{LAYER}.feed_forward.gate_proj",
        "blk.*.ffn_up": f"{LAYER}.feed_forward.up_proj",
        "blk.*.ffn_down": f"{LAYER}.feed_forward.down_proj",
    },
    changed=GRANITE_HYBRID.changed,
    shapes=MAMBA2.shapes,
    config=_CONFIG_OF_GRANITE,
    complete=(add_layers_of_bamba,),
    sign=rotates_beside_states,
)

_NAMES_OF_NEMOTRON: Final = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "blk.*.attn_norm": "backbone.layers.*.norm",
    "blk.*.attn_q": "backbone.layers.*.mixer.q_proj",
    "blk.*.attn_k": "backbone.layers.*.mixer.k_proj",
    "blk.*.attn_v": "backbone.layers.*.mixer.v_proj",
    "blk.*.attn_output": "backbone.layers.*.mixer.o_proj",
    "blk.*.ffn_up": "backbone.layers.*.mixer.up_proj",
    "blk.*.ffn_down": "backbone.layers.*.mixer.down_proj",
    **{name: module for name, module in MAMBA2.names.items() if name.startswith("blk.*.ssm_")},
}

_CONFIG_OF_NEMOTRON: Final = {
    **BASIC_SIZES,
    **HEAD,
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads",
}

NEMOTRON_H: Final = GgufFamily(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    names=_NAMES_OF_NEMOTRON,
    changed={**MAMBA2.changed, **ROTARY_QK},
    shapes=MAMBA2.shapes,
    config=_CONFIG_OF_NEMOTRON,
    complete=(add_layers_of_nemotron,),
)

NEMOTRON_H_MOE: Final = GgufFamily(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    names={
        **_NAMES_OF_NEMOTRON,
        "blk.*.ffn_gate_inp": "backbone.layers.*.mixer.gate",
        "blk.*.exp_probs_b.bias": "backbone.layers.*.mixer.gate.e_score_correction_bias",
        "blk.*.ffn_up_shexp": "backbone.layers.*.mixer.shared_experts.up_proj",
        "blk.*.ffn_down_shexp": "backbone.layers.*.mixer.shared_experts.down_proj",
        "blk.*.ffn_latent_down": "backbone.layers.*.mixer.fc1_latent_proj",
        "blk.*.ffn_latent_up": "backbone.layers.*.mixer.fc2_latent_proj",
    },
    experts={
        "blk.*.ffn_up_exps": "backbone.layers.*.mixer.experts.#.up_proj",
        "blk.*.ffn_down_exps": "backbone.layers.*.mixer.experts.#.down_proj",
    },
    changed={**MAMBA2.changed, **ROTARY_QK},
    shapes=MAMBA2.shapes,
    config={
        **_CONFIG_OF_NEMOTRON,
        **COUNTS_OF_DEEPSEEK,
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "moe_latent_size": "moe_latent_size",
    },
    complete=(add_layers_of_nemotron,),
)

NEMOTRON_PUZZLE: Final = GgufFamily(
    model_type="nemotron_h_puzzle",
    architecture="NemotronHPuzzleForCausalLM",
    names={},
    sign=has_layers_that_differ,
    refusal="has layers that differ, for which transformers has no config",
)

_LAYER_OF_JAMBA: Final = {
    **ATTENTION,
    "token_embd": "model.embed_tokens",
    "output_norm": "model.final_layernorm",
    "output": "lm_head",
    "blk.*.attn_norm": f"{LAYER}.input_layernorm",
    "blk.*.ffn_norm": f"{LAYER}.pre_ff_layernorm",
    "blk.*.ffn_gate": f"{LAYER}.feed_forward.gate_proj",
    "blk.*.ffn_up": f"{LAYER}.feed_forward.up_proj",
    "blk.*.ffn_down": f"{LAYER}.feed_forward.down_proj",
    "blk.*.ffn_gate_inp": f"{LAYER}.feed_forward.router",
    "blk.*.ssm_in": f"{LAYER}.mamba.in_proj",
    "blk.*.ssm_conv1d": f"{LAYER}.mamba.conv1d",
    "blk.*.ssm_x": f"{LAYER}.mamba.x_proj",
    "blk.*.ssm_dt": f"{LAYER}.mamba.dt_proj",
    "blk.*.ssm_dt_norm": f"{LAYER}.mamba.dt_layernorm",
    "blk.*.ssm_b_norm": f"{LAYER}.mamba.b_layernorm",
    "blk.*.ssm_c_norm": f"{LAYER}.mamba.c_layernorm",
    "blk.*.ssm_a": f"{LAYER}.mamba.A_log",
    "blk.*.ssm_d": f"{LAYER}.mamba.D",
    "blk.*.ssm_out": f"{LAYER}.mamba.out_proj",
}

JAMBA: Final = GgufFamily(
    model_type="jamba",
    architecture="JambaForCausalLM",
    names=_LAYER_OF_JAMBA,
    experts={
        "blk.*.ffn_gate_exps": f"{LAYER}.feed_forward.experts.#.gate_proj",
        "blk.*.ffn_up_exps": f"{LAYER}.feed_forward.experts.#.up_proj",
        "blk.*.ffn_down_exps": f"{LAYER}.feed_forward.experts.#.down_proj",
    },
    changed={"blk.*.ssm_a": NEGATIVE_EXP},
    shapes={"blk.*.ssm_conv1d.weight": CHANNELS},
    config={
        **SIZES,
        **RMS,
        **EXPERTS_USED,
        "expert_count": "num_experts",
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.time_step_rank": "mamba_dt_rank",
    },
    complete=(add_layers_of_jamba,),
)

_LAYER_OF_LFM2: Final = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
    "blk.*.attn_norm": f"{LAYER}.operator_norm",
    "blk.*.ffn_norm": f"{LAYER}.ffn_norm",
    "blk.*.attn_q": f"{LAYER}.self_attn.q_proj",
    "blk.*.attn_k": f"{LAYER}.self_attn.k_proj",
    "blk.*.attn_v": f"{LAYER}.self_attn.v_proj",
    "blk.*.attn_output": f"{LAYER}.self_attn.out_proj",
    "blk.*.attn_q_norm": f"{LAYER}.self_attn.q_layernorm",
    "blk.*.attn_k_norm": f"{LAYER}.self_attn.k_layernorm",
    "blk.*.shortconv.conv": f"{LAYER}.conv.conv",
    "blk.*.shortconv.in_proj": f"{LAYER}.conv.in_proj",
    "blk.*.shortconv.out_proj": f"{LAYER}.conv.out_proj",
    "blk.*.ffn_gate": f"{LAYER}.feed_forward.w1",
    "blk.*.ffn_down": f"{LAYER}.feed_forward.w2",
    "blk.*.ffn_up": f"{LAYER}.feed_forward.w3",
}

_CONFIG_OF_LFM2: Final = {
    **SIZES,
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "shortconv.l_cache": "conv_L_cache",
}

LFM2: Final = GgufFamily(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    names=_LAYER_OF_LFM2,
    shapes={"blk.*.shortconv.conv.weight": CHANNELS},
    config=_CONFIG_OF_LFM2,
    constants={"block_auto_adjust_ff_dim": False},
    complete=(add_layers_with_attention,),
)

LFM2_MOE: Final = GgufFamily(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    names={
        **_LAYER_OF_LFM2,
        "blk.*.ffn_gate_inp": f"{LAYER}.feed_forward.gate",
        "blk.*.exp_probs_b.bias": f"{LAYER}.feed_forward.expert_bias",
    },
    experts={
        "blk.*.ffn_gate_exps": f"{LAYER}.feed_forward.experts.#.w1",
        "blk.*.ffn_down_exps": f"{LAYER}.feed_forward.experts.#.w2",
        "blk.*.ffn_up_exps": f"{LAYER}.feed_forward.experts.#.w3",
    },
    shapes={"blk.*.shortconv.conv.weight": CHANNELS},
    config={
        **_CONFIG_OF_LFM2,
        **EXPERTS_USED,
        "expert_count": "num_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "leading_dense_block_count": "num_dense_layers",
    },
    shown={"use_expert_bias": "blk.*.exp_probs_b.bias"},
    complete=(add_layers_with_attention,),
)
