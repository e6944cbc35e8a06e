"""Lists decoders whose layers are all alike: attention, and a network of two or three matrices."""

from typing import Final

from nf4conv.format.gguf import PLUS_ONE
from nf4conv.sources.gguf.families.family import GgufFamily, Join
from nf4conv.sources.gguf.families.steps.common import (
    AROUND,
    ATTENTION,
    BIASES_OF_LLAMA,
    GATED,
    HEAD,
    LAYER,
    LIKE_LLAMA,
    MULTIPLIERS,
    NORMS,
    NORMS_BEHIND,
    NOT_GATED,
    RMS,
    ROTARY_QK,
    SIZES,
    WINDOW,
)
from nf4conv.sources.gguf.families.steps.completing import (
    add_layer_types,
    add_no_window,
    add_scaling_of_ministral,
)
from nf4conv.sources.gguf.families.steps.joining import join_grouped_queries

LLAMA: Final = GgufFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=LIKE_LLAMA,
    changed=ROTARY_QK,
    config={**SIZES, **RMS, **HEAD},
    shown=BIASES_OF_LLAMA,
    also=("mistral", "smollm3", "internlm3", "iquestcoder"),
)

MINISTRAL3: Final = GgufFamily(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    names=LIKE_LLAMA,
    changed=ROTARY_QK,
    config={**SIZES, **RMS, **HEAD},
    complete=(add_scaling_of_ministral,),
    marker="attention.temperature_scale",
)

MISTRAL: Final = GgufFamily(
    model_type="mistral",
    architecture="MistralForCausalLM",
    names=LIKE_LLAMA,
    changed=ROTARY_QK,
    config={**SIZES, **RMS, **HEAD},
    complete=(add_no_window,),
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
    shown={"attention_bias": "blk.*.attn_q.bias"},
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
    shown={
        "attention_bias": "blk.*.attn_q.bias",
        "use_qk_norm": "blk.*.attn_q_norm.weight",
    },
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
    experts={
        "blk.*.attn_q_norm": f"{LAYER}.self_attn.q_layernorm.norms.#",
        "blk.*.attn_k_norm": f"{LAYER}.self_attn.k_layernorm.norms.#",
    },
    config={
        **SIZES,
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "use_parallel_residual": "use_parallel_residual",
    },
    shown={
        "use_qkv_bias": "blk.*.attn_q.bias",
        "qk_layernorm": "blk.*.attn_q_norm.weight",
    },
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
