"""Lists models most of whose layers have linear attention: Qwen3-Next and Qwen3.5."""

from typing import Final

from nf4conv.format.gguf import NEGATIVE_EXP
from nf4conv.sources.gguf.families.family import CHANNELS, GgufFamily, Join
from nf4conv.sources.gguf.families.steps.common import (
    ALL_NORMS_PLUS_ONE,
    AROUND,
    ATTENTION,
    EXPERT_COUNTS,
    EXPERTS,
    GATED,
    HEAD,
    LAYER,
    RMS,
    ROUTER,
    SHARED_EXPERT,
    SIZES,
)
from nf4conv.sources.gguf.families.steps.completing import add_linear_attention
from nf4conv.sources.gguf.families.steps.joining import (
    join_linear_attention,
    join_tiled_channels,
    join_tiled_columns,
    join_tiled_heads,
    join_tiled_states,
)

_LINEAR: Final = f"{LAYER}.linear_attn"

_AROUND_LAYERS: Final = {
    **AROUND,
    **ATTENTION,
    "blk.*.attn_norm": f"{LAYER}.input_layernorm",
    "blk.*.post_attention_norm": f"{LAYER}.post_attention_layernorm",
    "blk.*.ssm_norm": f"{_LINEAR}.norm",
}

_NAMES_OF_MIXTURE: Final = {**_AROUND_LAYERS, **ROUTER, **SHARED_EXPERT}

_CONFIG: Final = {
    **SIZES,
    **RMS,
    **HEAD,
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}

_CONFIG_OF_MIXTURE: Final = {
    **_CONFIG,
    **EXPERT_COUNTS,
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}

QWEN3_NEXT: Final = GgufFamily(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    names={
        **_NAMES_OF_MIXTURE,
        "blk.*.ssm_in": f"{_LINEAR}.in_proj_qkvz",  # of the first files
        "blk.*.ssm_ba": f"{_LINEAR}.in_proj_ba",
        "blk.*.ssm_conv1d": f"{_LINEAR}.conv1d",
        "blk.*.ssm_a": f"{_LINEAR}.A_log",
        "blk.*.ssm_dt.bias": f"{_LINEAR}.dt_bias",
        "blk.*.ssm_out": f"{_LINEAR}.out_proj",
    },
    experts=EXPERTS,
    joined=(
        Join(
            f"{_LINEAR}.in_proj_qkvz.weight",
            ("blk.*.attn_qkv.weight", "blk.*.attn_gate.weight"),
            join_linear_attention,
        ),
    ),
    changed={**ALL_NORMS_PLUS_ONE, "blk.*.ssm_a": NEGATIVE_EXP},
    shapes={"blk.*.ssm_conv1d.weight": CHANNELS},
    config=_CONFIG_OF_MIXTURE,
    complete=(add_linear_attention,),
)

_TILED: Final = (
    Join(f"{_LINEAR}.in_proj_qkv.weight", ("blk.*.attn_qkv.weight",), join_tiled_heads),
    Join(f"{_LINEAR}.in_proj_z.weight", ("blk.*.attn_gate.weight",), join_tiled_heads),
    Join(f"{_LINEAR}.in_proj_a.weight", ("blk.*.ssm_alpha.weight",), join_tiled_heads),
    Join(f"{_LINEAR}.in_proj_b.weight", ("blk.*.ssm_beta.weight",), join_tiled_heads),
    Join(f"{_LINEAR}.dt_bias", ("blk.*.ssm_dt.bias",), join_tiled_heads),
    Join(f"{_LINEAR}.A_log", ("blk.*.ssm_a",), join_tiled_states),
    Join(f"{_LINEAR}.conv1d.weight", ("blk.*.ssm_conv1d.weight",), join_tiled_channels),
    Join(f"{_LINEAR}.out_proj.weight", ("blk.*.ssm_out.weight",), join_tiled_columns),
)

QWEN3_5: Final = GgufFamily(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    names={**_AROUND_LAYERS, **GATED},
    joined=_TILED,
    changed=ALL_NORMS_PLUS_ONE,
    config=_CONFIG,
    complete=(add_linear_attention,),
    also=("qwen3_5",),
)

QWEN3_5_MOE: Final = GgufFamily(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    names=_NAMES_OF_MIXTURE,
    experts=EXPERTS,
    joined=_TILED,
    changed=ALL_NORMS_PLUS_ONE,
    config=_CONFIG_OF_MIXTURE,
    complete=(add_linear_attention,),
    also=("qwen3_5_moe",),
)
