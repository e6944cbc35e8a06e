"""Lists more decoders whose layers are all alike."""

from typing import Final

from nf4conv.sources.gguf.families.common import (
    AROUND,
    ATTENTION,
    BIASES_OF_LLAMA,
    HEAD,
    LAYER,
    LIKE_LLAMA,
    MULTIPLIERS,
    NORMS,
    NOT_GATED,
    RMS,
    ROTARY_QK,
    SIZES,
    WINDOW,
)
from nf4conv.sources.gguf.families.completing import add_layer_types, add_size_of_heads
from nf4conv.sources.gguf.families.family import GgufFamily

GLM: Final = GgufFamily(
    model_type="glm",
    architecture="GlmForCausalLM",
    names={
        **AROUND,
        **ATTENTION,
        **NORMS,
        "blk.*.ffn_up": f"{LAYER}.mlp.gate_up_proj",
        "blk.*.ffn_down": f"{LAYER}.mlp.down_proj",
    },
    config={**SIZES, **RMS},
    shown={"attention_bias": "blk.*.attn_q.bias"},
    complete=(add_size_of_heads,),
)

JAIS2: Final = GgufFamily(
    model_type="jais2",
    architecture="Jais2ForCausalLM",
    names={**AROUND, **ATTENTION, **NORMS, **NOT_GATED},
    config={**SIZES, **HEAD, "attention.layer_norm_epsilon": "layer_norm_eps"},
    shown={"attention_bias": "blk.*.attn_q.bias", "mlp_bias": "blk.*.ffn_up.bias"},
)

GRANITE_SWA: Final = GgufFamily(
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    names={**LIKE_LLAMA, "blk.*.attn_sinks.weight": f"{LAYER}.self_attn.sinks"},
    changed=ROTARY_QK,
    config={**SIZES, **RMS, **MULTIPLIERS, **WINDOW},
    shown=BIASES_OF_LLAMA,
    complete=(add_layer_types,),
)
