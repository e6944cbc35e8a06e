"""Lists encoders, and encoders with a decoder."""

from typing import Final

from nf4conv.sources.gguf.families.family import GgufFamily
from nf4conv.sources.gguf.families.steps.common import BASIC_SIZES, LIKE_LLAMA, RMS, SIZES
from nf4conv.sources.gguf.families.steps.telling import has_words_of_sentencepiece

_CONFIG_OF_BERT: Final = {
    **BASIC_SIZES,
    "attention.layer_norm_epsilon": "layer_norm_eps",
}

_TOKEN_TYPES: Final = {"type_vocab_size": "embeddings.token_type_embeddings.weight"}

BERT: Final = GgufFamily(
    model_type="bert",
    architecture="BertModel",
    names={
        "token_embd": "embeddings.word_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "blk.*.attn_q": "encoder.layer.*.attention.self.query",
        "blk.*.attn_k": "encoder.layer.*.attention.self.key",
        "blk.*.attn_v": "encoder.layer.*.attention.self.value",
        "blk.*.attn_output": "encoder.layer.*.attention.output.dense",
        "blk.*.attn_output_norm": "encoder.layer.*.attention.output.LayerNorm",
        "blk.*.ffn_up": "encoder.layer.*.intermediate.dense",
        "blk.*.ffn_down": "encoder.layer.*.output.dense",
        "blk.*.layer_output_norm": "encoder.layer.*.output.LayerNorm",
    },
    config=_CONFIG_OF_BERT,
    rows=_TOKEN_TYPES,
    marker="token_types.weight",
    is_encoder=True,
)

CAMEMBERT: Final = GgufFamily(
    model_type="camembert",
    architecture="CamembertModel",
    names=BERT.names,
    config=_CONFIG_OF_BERT,
    rows=_TOKEN_TYPES,
    sign=has_words_of_sentencepiece,
    is_encoder=True,
)

DISTIL_BERT: Final = GgufFamily(
    model_type="distilbert",
    architecture="DistilBertModel",
    names={
        "token_embd": "embeddings.word_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "blk.*.attn_q": "transformer.layer.*.attention.q_lin",
        "blk.*.attn_k": "transformer.layer.*.attention.k_lin",
        "blk.*.attn_v": "transformer.layer.*.attention.v_lin",
        "blk.*.attn_output": "transformer.layer.*.attention.out_lin",
        "blk.*.attn_output_norm": "transformer.layer.*.sa_layer_norm",
        "blk.*.ffn_up": "transformer.layer.*.ffn.lin1",
        "blk.*.ffn_down": "transformer.layer.*.ffn.lin2",
        "blk.*.layer_output_norm": "transformer.layer.*.output_layer_norm",
    },
    config={
        "block_count": "n_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "dim",
        "feed_forward_length": "hidden_dim",
        "attention.head_count": "n_heads",
    },
    is_encoder=True,
)

NOMIC_BERT: Final = GgufFamily(
    model_type="nomic_bert",
    architecture="NomicBertModel",
    names={
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
        "blk.*.attn_qkv": "encoder.layers.*.attn.Wqkv",
        "blk.*.attn_output": "encoder.layers.*.attn.out_proj",
        "blk.*.attn_output_norm": "encoder.layers.*.norm1",
        "blk.*.ffn_up": "encoder.layers.*.mlp.fc11",
        "blk.*.ffn_gate": "encoder.layers.*.mlp.fc12",
        "blk.*.ffn_down": "encoder.layers.*.mlp.fc2",
        "blk.*.layer_output_norm": "encoder.layers.*.norm2",
    },
    config={**_CONFIG_OF_BERT, "rope.freq_base": "rope_theta"},
    rows=_TOKEN_TYPES,
    is_encoder=True,
)

_POSITIONS: Final = "lacks the first rows of its position embeddings, which llama.cpp leaves out"

ROBERTA: Final = GgufFamily(
    model_type="roberta",
    architecture="RobertaModel",
    names={},
    marker="tokenizer.ggml.merges",  # BERT has words without merges
    refusal=_POSITIONS,
    is_encoder=True,
)

XLM_ROBERTA: Final = GgufFamily(
    model_type="xlm-roberta",
    architecture="XLMRobertaModel",
    names={},
    marker="tokenizer.ggml.scores",  # nor has BERT scores
    refusal=_POSITIONS,
    is_encoder=True,
)

EUROBERT: Final = GgufFamily(
    model_type="eurobert",
    architecture="EuroBertModel",
    names={name: module.removeprefix("model.") for name, module in LIKE_LLAMA.items()},
    config={**SIZES, **RMS},
    is_encoder=True,
)

MODERN_BERT: Final = GgufFamily(
    model_type="modernbert",
    architecture="ModernBertModel",
    names={
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "output_norm": "final_norm",
        "blk.*.attn_norm": "layers.*.attn_norm",
        "blk.*.attn_qkv": "layers.*.attn.Wqkv",
        "blk.*.attn_output": "layers.*.attn.Wo",
        "blk.*.ffn_norm": "layers.*.mlp_norm",
        "blk.*.ffn_up": "layers.*.mlp.Wi",
        "blk.*.ffn_down": "layers.*.mlp.Wo",
    },
    config={
        **BASIC_SIZES,
        "attention.layer_norm_rms_epsilon": "norm_eps",
        "attention.sliding_window": "local_attention",
        "attention.sliding_window_pattern": "global_attn_every_n_layers",
        "rope.freq_base": "global_rope_theta",
        "rope.freq_base_swa": "local_rope_theta",
    },
    is_encoder=True,
)

_ENCODER_OF_T5: Final = {
    "token_embd": "shared",
    "enc.output_norm": "encoder.final_layer_norm",
    "enc.blk.*.attn_norm": "encoder.block.*.layer.0.layer_norm",
    "enc.blk.*.attn_q": "encoder.block.*.layer.0.SelfAttention.q",
    "enc.blk.*.attn_k": "encoder.block.*.layer.0.SelfAttention.k",
    "enc.blk.*.attn_v": "encoder.block.*.layer.0.SelfAttention.v",
    "enc.blk.*.attn_o": "encoder.block.*.layer.0.SelfAttention.o",
    "enc.blk.*.attn_rel_b": "encoder.block.*.layer.0.SelfAttention.relative_attention_bias",
    "enc.blk.*.ffn_norm": "encoder.block.*.layer.1.layer_norm",
    "enc.blk.*.ffn_down": "encoder.block.*.layer.1.DenseReluDense.wo",
}

_DECODER_OF_T5: Final = {
    "output": "lm_head",
    "dec.output_norm": "decoder.final_layer_norm",
    "dec.blk.*.attn_norm": "decoder.block.*.layer.0.layer_norm",
    "dec.blk.*.attn_q": "decoder.block.*.layer.0.SelfAttention.q",
    "dec.blk.*.attn_k": "decoder.block.*.layer.0.SelfAttention.k",
    "dec.blk.*.attn_v": "decoder.block.*.layer.0.SelfAttention.v",
    "dec.blk.*.attn_o": "decoder.block.*.layer.0.SelfAttention.o",
    "dec.blk.*.attn_rel_b": "decoder.block.*.layer.0.SelfAttention.relative_attention_bias",
    "dec.blk.*.cross_attn_norm": "decoder.block.*.layer.1.layer_norm",
    "dec.blk.*.cross_attn_q": "decoder.block.*.layer.1.EncDecAttention.q",
    "dec.blk.*.cross_attn_k": "decoder.block.*.layer.1.EncDecAttention.k",
    "dec.blk.*.cross_attn_v": "decoder.block.*.layer.1.EncDecAttention.v",
    "dec.blk.*.cross_attn_o": "decoder.block.*.layer.1.EncDecAttention.o",
    "dec.blk.*.ffn_norm": "decoder.block.*.layer.2.layer_norm",
    "dec.blk.*.ffn_down": "decoder.block.*.layer.2.DenseReluDense.wo",
}

_NOT_GATED: Final = {
    "enc.blk.*.ffn_up": "encoder.block.*.layer.1.DenseReluDense.wi",
    "dec.blk.*.ffn_up": "decoder.block.*.layer.2.DenseReluDense.wi",
}

_GATED: Final = {
    "enc.blk.*.ffn_gate": "encoder.block.*.layer.1.DenseReluDense.wi_0",
    "enc.blk.*.ffn_up": "encoder.block.*.layer.1.DenseReluDense.wi_1",
    "dec.blk.*.ffn_gate": "decoder.block.*.layer.2.DenseReluDense.wi_0",
    "dec.blk.*.ffn_up": "decoder.block.*.layer.2.DenseReluDense.wi_1",
}

_CONFIG_OF_T5: Final = {
    "block_count": "num_layers",
    "decoder_block_count": "num_decoder_layers",
    "context_length": "n_positions",
    "embedding_length": "d_model",
    "feed_forward_length": "d_ff",
    "attention.head_count": "num_heads",
    "attention.key_length": "d_kv",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.relative_buckets_count": "relative_attention_num_buckets",
    "decoder_start_token_id": "decoder_start_token_id",
}

_IS_GATED: Final = {"feed_forward_proj": "gated-gelu"}

T5: Final = GgufFamily(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    names={**_ENCODER_OF_T5, **_DECODER_OF_T5, **_NOT_GATED},
    config=_CONFIG_OF_T5,
    is_encoder=True,
)

GATED_T5: Final = GgufFamily(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    names={**_ENCODER_OF_T5, **_DECODER_OF_T5, **_GATED},
    config=_CONFIG_OF_T5,
    constants=_IS_GATED,
    marker="enc.blk.*.ffn_gate.weight",
    also=("mt5",),
    is_encoder=True,
)

UMT5: Final = GgufFamily(
    model_type="umt5",
    architecture="UMT5ForConditionalGeneration",
    names=GATED_T5.names,
    config=_CONFIG_OF_T5,
    constants=_IS_GATED,
    marker="enc.blk.1.attn_rel_b.weight",  # which T5 has in the first layer alone
    is_encoder=True,
)

T5_ENCODER: Final = GgufFamily(
    model_type="t5",
    architecture="T5EncoderModel",
    names={**_ENCODER_OF_T5, **_NOT_GATED},
    config=_CONFIG_OF_T5,
    is_encoder=True,
)

GATED_T5_ENCODER: Final = GgufFamily(
    model_type="t5",
    architecture="T5EncoderModel",
    names={**_ENCODER_OF_T5, **_GATED},
    config=_CONFIG_OF_T5,
    constants=_IS_GATED,
    marker="enc.blk.*.ffn_gate.weight",
    also=("mt5",),
    is_encoder=True,
)
