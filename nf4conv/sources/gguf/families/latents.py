"""Lists models whose keys and values are made of latents, as DeepSeek's and Kimi K2's."""

from typing import Final

from nf4conv.sources.gguf.families.family import GgufFamily, Join
from nf4conv.sources.gguf.families.steps.common import (
    AROUND,
    CORRECTED,
    COUNTS_OF_DEEPSEEK,
    EXPERTS,
    GATED,
    LAYER,
    NEXT_TOKENS,
    NORMS,
    RMS,
    ROUTER,
    SHARED_EXPERTS,
    SIZES,
)
from nf4conv.sources.gguf.families.steps.completing import (
    add_kinds_of_indexers,
    add_sizes_of_latents,
    add_sizes_of_minicpm,
)
from nf4conv.sources.gguf.families.steps.joining import join_latent_heads

_NAMES_OF_LATENTS: Final = {
    **AROUND,
    **NORMS,
    **GATED,
    **ROUTER,
    **SHARED_EXPERTS,
    "blk.*.attn_q": f"{LAYER}.self_attn.q_proj",
    "blk.*.attn_q_a": f"{LAYER}.self_attn.q_a_proj",
    "blk.*.attn_q_b": f"{LAYER}.self_attn.q_b_proj",
    "blk.*.attn_q_a_norm": f"{LAYER}.self_attn.q_a_layernorm",
    "blk.*.attn_kv_a_mqa": f"{LAYER}.self_attn.kv_a_proj_with_mqa",
    "blk.*.attn_kv_a_norm": f"{LAYER}.self_attn.kv_a_layernorm",
    "blk.*.attn_kv_b": f"{LAYER}.self_attn.kv_b_proj",  # of files before April 2025
    "blk.*.attn_output": f"{LAYER}.self_attn.o_proj",
}

_LATENT_HEADS: Final = Join(
    f"{LAYER}.self_attn.kv_b_proj.weight",
    ("blk.*.attn_k_b.weight", "blk.*.attn_v_b.weight"),
    join_latent_heads,
)

_CONFIG_OF_LATENTS: Final = {
    **SIZES,
    **RMS,
    **COUNTS_OF_DEEPSEEK,
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}

DEEPSEEK_V2: Final = GgufFamily(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    names=_NAMES_OF_LATENTS,
    experts=EXPERTS,
    joined=(_LATENT_HEADS,),
    config=_CONFIG_OF_LATENTS,
    constants={"topk_method": "greedy"},
    complete=(add_sizes_of_latents,),
    marker="expert_count",
)

DEEPSEEK_V3: Final = GgufFamily(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    names={**_NAMES_OF_LATENTS, **CORRECTED, **NEXT_TOKENS},
    experts=EXPERTS,
    joined=(_LATENT_HEADS,),
    config=_CONFIG_OF_LATENTS,
    complete=(add_sizes_of_latents,),
    marker="blk.*.exp_probs_b.bias",
    also=("kimi_k2", "glm4_moe_lite"),
)

MISTRAL_LARGE_3: Final = GgufFamily(
    model_type="mistral_large_3",
    architecture="MistralLarge3",
    names={},
    marker="attention.temperature_scale",
    refusal="was made of Mistral's own files, and transformers has no such model",
)

_INDEXER: Final = {
    "blk.*.indexer.k_norm": f"{LAYER}.self_attn.indexer.k_norm",
    "blk.*.indexer.proj": f"{LAYER}.self_attn.indexer.weights_proj",
    "blk.*.indexer.attn_k": f"{LAYER}.self_attn.indexer.wk",
    "blk.*.indexer.attn_q_b": f"{LAYER}.self_attn.indexer.wq_b",
}
"""Names in what chooses the tokens that sparse attention sees."""

_CONFIG_OF_INDEXER: Final = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}

GLM_DSA: Final = GgufFamily(
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    names={**DEEPSEEK_V3.names, **_INDEXER},
    experts=EXPERTS,
    joined=(_LATENT_HEADS,),
    config={**_CONFIG_OF_LATENTS, **_CONFIG_OF_INDEXER},
    complete=(add_sizes_of_latents, add_kinds_of_indexers),
)

DEEPSEEK_V32: Final = GgufFamily(
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    names={**DEEPSEEK_V3.names, **_INDEXER},
    experts=EXPERTS,
    joined=(_LATENT_HEADS,),
    config={**_CONFIG_OF_LATENTS, **_CONFIG_OF_INDEXER},
    complete=(add_sizes_of_latents,),
)

YOUTU: Final = GgufFamily(
    model_type="youtu",
    architecture="YoutuForCausalLM",
    names=_NAMES_OF_LATENTS,
    joined=(_LATENT_HEADS,),
    config=_CONFIG_OF_LATENTS,
    complete=(add_sizes_of_latents,),
)

MINICPM3: Final = GgufFamily(
    model_type="minicpm3",
    architecture="MiniCPM3ForCausalLM",
    names=_NAMES_OF_LATENTS,
    config={
        **SIZES,
        **RMS,
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
    },
    constants={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},  # as in llama.cpp
    complete=(add_sizes_of_minicpm,),
)
