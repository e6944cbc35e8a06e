"""Lists more decoders whose layers are all alike."""

from typing import Final

from nf4conv.sources.gguf.families.dense import GLM4
from nf4conv.sources.gguf.families.family import GgufFamily, Join
from nf4conv.sources.gguf.families.steps.common import (
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
from nf4conv.sources.gguf.families.steps.completing import add_layer_types, add_size_of_heads
from nf4conv.sources.gguf.families.steps.joining import join_apart_halves
from nf4conv.sources.gguf.families.steps.telling import lacks_biases

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

CHATGLM: Final = GgufFamily(
    model_type="chatglm",
    architecture="ChatGLMModel",
    names={},
    marker="blk.*.attn_qkv.weight",
    refusal="is of code that transformers does not have, with names of its own",
)

_QUERIES_AND_KEYS: Final = ("blk.*.attn_q", "blk.*.attn_k")

GLM4V_TEXT: Final = GgufFamily(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    names=GLM4.names,
    joined=tuple(
        Join(f"{GLM4.names[module]}.{ending}", (f"{module}.{ending}",), join_apart_halves)
        for module in _QUERIES_AND_KEYS
        for ending in ("weight", "bias")
    ),
    config=GLM4.config,
    shown=GLM4.shown,
    marker="rope.dimension_sections",
)
"""The text model of GLM-4.1V. It is a GLM-4-0414 in which the converter moved rows of queries and
keys."""

QWEN2_WITHOUT_BIASES: Final = GgufFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=LIKE_LLAMA,
    config={**SIZES, **RMS, **HEAD},
    constants={"attention_bias": False},
    sign=lacks_biases,
)
"""KORMo: Qwen2 without biases is Llama, with rows in the order of transformers."""

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
