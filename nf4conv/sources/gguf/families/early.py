"""Lists decoders of 2019 to 2023, each with names of its own."""

from typing import Final

from nf4conv.format.gguf import FUSED, TRANSPOSED
from nf4conv.sources.gguf.families.family import GgufFamily
from nf4conv.sources.gguf.families.steps.common import BASIC_SIZES, LAYER, SIZES

GPT2: Final = GgufFamily(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    names={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "blk.*.attn_norm": "transformer.h.*.ln_1",
        "blk.*.ffn_norm": "transformer.h.*.ln_2",
        "blk.*.attn_qkv": "transformer.h.*.attn.c_attn",
        "blk.*.attn_output": "transformer.h.*.attn.c_proj",
        "blk.*.ffn_up": "transformer.h.*.mlp.c_fc",
        "blk.*.ffn_down": "transformer.h.*.mlp.c_proj",
    },
    changed=dict.fromkeys(
        ("blk.*.attn_qkv", "blk.*.attn_output", "blk.*.ffn_up", "blk.*.ffn_down"), TRANSPOSED
    ),
    config={
        "block_count": "n_layer",
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
)

GPTNEOX: Final = GgufFamily(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    names={
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
        "blk.*.attn_norm": "gpt_neox.layers.*.input_layernorm",
        "blk.*.ffn_norm": "gpt_neox.layers.*.post_attention_layernorm",
        "blk.*.attn_qkv": "gpt_neox.layers.*.attention.query_key_value",
        "blk.*.attn_output": "gpt_neox.layers.*.attention.dense",
        "blk.*.ffn_up": "gpt_neox.layers.*.mlp.dense_h_to_4h",
        "blk.*.ffn_down": "gpt_neox.layers.*.mlp.dense_4h_to_h",
    },
    changed={"blk.*.attn_qkv": FUSED},
    config={
        **BASIC_SIZES,
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "use_parallel_residual": "use_parallel_residual",
    },
)

BLOOM: Final = GgufFamily(
    model_type="bloom",
    architecture="BloomForCausalLM",
    names={
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "blk.*.attn_norm": "transformer.h.*.input_layernorm",
        "blk.*.ffn_norm": "transformer.h.*.post_attention_layernorm",
        "blk.*.attn_qkv": "transformer.h.*.self_attention.query_key_value",
        "blk.*.attn_output": "transformer.h.*.self_attention.dense",
        "blk.*.ffn_up": "transformer.h.*.mlp.dense_h_to_4h",
        "blk.*.ffn_down": "transformer.h.*.mlp.dense_4h_to_h",
    },
    changed={"blk.*.attn_qkv": FUSED},
    config={
        "block_count": "n_layer",
        "embedding_length": "hidden_size",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
)

FALCON: Final = GgufFamily(
    model_type="falcon",
    architecture="FalconForCausalLM",
    names={
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "blk.*.attn_norm": "transformer.h.*.input_layernorm",
        "blk.*.attn_qkv": "transformer.h.*.self_attention.query_key_value",
        "blk.*.attn_output": "transformer.h.*.self_attention.dense",
        "blk.*.ffn_up": "transformer.h.*.mlp.dense_h_to_4h",
        "blk.*.ffn_down": "transformer.h.*.mlp.dense_4h_to_h",
    },
    changed={"blk.*.attn_qkv": FUSED},
    config={
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_kv_heads",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
)

FALCON_40B: Final = GgufFamily(
    model_type="falcon",
    architecture="FalconForCausalLM",
    names={
        **FALCON.names,
        "blk.*.attn_norm": "transformer.h.*.ln_mlp",
        "blk.*.attn_norm_2": "transformer.h.*.ln_attn",
    },
    changed=FALCON.changed,
    config=FALCON.config,
    constants={"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2},
    marker="blk.*.attn_norm_2.weight",
)

PHI2: Final = GgufFamily(
    model_type="phi",
    architecture="PhiForCausalLM",
    names={
        "token_embd": "model.embed_tokens",
        "output_norm": "model.final_layernorm",
        "output": "lm_head",
        "blk.*.attn_norm": f"{LAYER}.input_layernorm",
        "blk.*.attn_q": f"{LAYER}.self_attn.q_proj",
        "blk.*.attn_k": f"{LAYER}.self_attn.k_proj",
        "blk.*.attn_v": f"{LAYER}.self_attn.v_proj",
        "blk.*.attn_output": f"{LAYER}.self_attn.dense",
        "blk.*.ffn_up": f"{LAYER}.mlp.fc1",
        "blk.*.ffn_down": f"{LAYER}.mlp.fc2",
    },
    config={**SIZES, "attention.layer_norm_epsilon": "layer_norm_eps"},
)

STARCODER: Final = GgufFamily(
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    names=GPT2.names,
    config=GPT2.config,
    constants={"multi_query": True},
)

MPT: Final = GgufFamily(
    model_type="mpt",
    architecture="MptForCausalLM",
    names={
        "token_embd": "transformer.wte",
        "output_norm": "transformer.norm_f",
        "output": "lm_head",
        "blk.*.attn_norm": "transformer.blocks.*.norm_1",
        "blk.*.ffn_norm": "transformer.blocks.*.norm_2",
        "blk.*.attn_qkv": "transformer.blocks.*.attn.Wqkv",
        "blk.*.attn_output": "transformer.blocks.*.attn.out_proj",
        "blk.*.ffn_up": "transformer.blocks.*.ffn.up_proj",
        "blk.*.ffn_down": "transformer.blocks.*.ffn.down_proj",
    },
    config={
        "block_count": "n_layers",
        "context_length": "max_seq_len",
        "embedding_length": "d_model",
        "attention.head_count": "n_heads",
    },
)
