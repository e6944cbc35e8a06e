"""Small models of every family, and GGUF files that llama.cpp's converter makes of them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONVERTER = Path(os.environ.get("LLAMA_CPP", "")) / "convert_hf_to_gguf.py"

NEEDS_CONVERTER = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        not CONVERTER.is_file(), reason="make test-others fetches llama.cpp's converter"
    ),
]
"""Marks files of tests that run llama.cpp's converter."""

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
OF_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 256}

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": None},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 32},
    "Qwen2MoeForCausalLM": MIXTURE,
    "Qwen3MoeForCausalLM": {**MIXTURE, "head_dim": 16, "norm_topk_prob": True},
    "GemmaForCausalLM": {"head_dim": 16},
    "Gemma2ForCausalLM": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "Gemma3ForCausalLM": {"head_dim": 16, "query_pre_attn_scalar": 16, "vocab_size": 99},
    "Phi3ForCausalLM": {},
    "GraniteForCausalLM": {"attention_multiplier": 0.25, "logits_scaling": 2.0},
    "CohereForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "Starcoder2ForCausalLM": {},
    "StableLmForCausalLM": {"use_qkv_bias": True},
    "NemotronForCausalLM": {},
    "GPT2LMHeadModel": OF_GPT2,
    "MambaForCausalLM": {"intermediate_size": 128, "state_size": 16, "expand": 2},
}
LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SCALED = {"attention_multiplier": 0.25, "logits_scaling": 2.0}
LINEAR_ATTENTION = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
SLIDING = {"sliding_window": 16, "num_hidden_layers": 4}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
STATES = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "position_embedding_type": None,
    "layer_types": ["mamba", "attention"],
}
T5 = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4, "n_positions": 128}

FAMILIES |= {
    "GptOssForCausalLM": {
        **LOCAL,
        "head_dim": 16,
        "layer_types": ALTERNATING[:2],
        "sliding_window": 16,
    },
    "DeepseekV2ForCausalLM": {
        **LATENT,
        **ROUTED,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "head_dim": 8,
    },
    "DeepseekV3ForCausalLM": {
        **LATENT,
        **ROUTED,
        "first_k_dense_replace": 1,
        "q_lora_rank": 48,
        "n_group": 2,
        "topk_group": 1,
    },
    "Glm4MoeLiteForCausalLM": {**LATENT, **ROUTED, "q_lora_rank": 48},
    "Glm4ForCausalLM": {"head_dim": 16},
    "Glm4MoeForCausalLM": {
        **ROUTED,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "Dots1ForCausalLM": {**ROUTED, "first_k_dense_replace": 1},
    "Llama4ForCausalLM": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "intermediate_size": 64,
        "head_dim": 16,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
    },
    "OlmoForCausalLM": {},
    "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
    "Olmo3ForCausalLM": SLIDING,
    "PhiForCausalLM": {"num_key_value_heads": 4, "intermediate_size": 256},
    "PhimoeForCausalLM": {**LOCAL, "sliding_window": None},
    "MptForCausalLM": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "GPTBigCodeForCausalLM": OF_GPT2,
    "GraniteMoeForCausalLM": {**LOCAL, **SCALED},
    "GraniteMoeSharedForCausalLM": {**LOCAL, **SCALED, "shared_intermediate_size": 48},
    "GraniteMoeHybridForCausalLM": {
        **STATES,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
    },
    "GraniteMoeHybridForCausalLM:experts": {**STATES, **LOCAL, "shared_intermediate_size": 48},
    "Cohere2ForCausalLM": {**SLIDING, "head_dim": 16},
    "Ernie4_5ForCausalLM": {"head_dim": 16},
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "num_hidden_layers": 3,
    },
    "SmolLM3ForCausalLM": {"num_hidden_layers": 4},
    "Exaone4ForCausalLM": SLIDING,
    "SeedOssForCausalLM": {"head_dim": 16},
    "ArceeForCausalLM": {},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "MiniMaxM2ForCausalLM": {**LOCAL, "head_dim": 16, "rotary_dim": 8, "intermediate_size": 32},
    "Gemma3TextModel": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "use_bidirectional_attention": True,
        "sliding_window": 16,
        "vocab_size": 99,
    },
    "Gemma3nForCausalLM": {
        **SLIDING,
        "head_dim": 16,
        "layer_types": ALTERNATING,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
        "laurel_rank": 8,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "intermediate_size": [96] * 4,
    },
    "Gemma4ForCausalLM": {
        **SLIDING,
        "head_dim": 16,
        "global_head_dim": 32,
        "layer_types": ALTERNATING,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "vocab_size": 99,
    },
    "Qwen3NextForCausalLM": {**MIXTURE, **LINEAR_ATTENTION},
    "Qwen3_5ForCausalLM": LINEAR_ATTENTION,
    "Qwen3_5MoeForCausalLM": {**MIXTURE, **LINEAR_ATTENTION},
    "Lfm2ForCausalLM": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
        "block_auto_adjust_ff_dim": False,
    },
    "Lfm2MoeForCausalLM": {
        **MIXTURE,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
    },
    "Mamba2ForCausalLM": {
        "intermediate_size": 128,
        "state_size": 16,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
    },
    "FalconMambaForCausalLM": {"intermediate_size": 128, "state_size": 16, "expand": 2},
    "JambaForCausalLM": {
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "BertModel": {},
    "ModernBertModel": {
        "global_attn_every_n_layers": 2,
        "num_hidden_layers": 4,
        "local_attention": 16,
    },
    "T5ForConditionalGeneration": T5,
    "T5ForConditionalGeneration:gated": {**T5, "feed_forward_proj": "gated-gelu"},
    "UMT5ForConditionalGeneration": T5,
    "T5EncoderModel": T5,
}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OF_INDEXER = {"q_lora_rank": 48, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 16}
FAMILIES |= {
    "GlmForCausalLM": {"head_dim": 16},
    "Jais2ForCausalLM": {"head_dim": 16},
    "GraniteSWAForCausalLM": {**SCALED, "sliding_window": 16},
    "AfmoeForCausalLM": {
        **SLIDING,
        **SPARSE,
        "head_dim": 16,
        "num_dense_layers": 1,
        "num_shared_experts": 1,
        "mup_enabled": True,
    },
    "ExaoneMoeForCausalLM": {
        **SLIDING,
        **SPARSE,
        "head_dim": 16,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "HunYuanMoEV1ForCausalLM": {
        "head_dim": 16,
        "num_experts": 4,
        "moe_topk": [2, 2],
        "moe_intermediate_size": [96, 96],
        "num_shared_expert": [1, 1],
    },
    "HYV3ForCausalLM": {**SPARSE, "head_dim": 16, "num_shared_experts": 1},
    "MellumForCausalLM": {
        **SPARSE,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ALTERNATING[:2],
    },
    "Cohere2MoeForCausalLM": {
        **SLIDING,
        **SPARSE,
        "head_dim": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "prefix_dense_intermediate_size": 80,
    },
    "GlmMoeDsaForCausalLM": {
        **LATENT,
        **ROUTED,
        **OF_INDEXER,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
    },
    "DeepseekV32ForCausalLM": {
        **LATENT,
        **ROUTED,
        **OF_INDEXER,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "YoutuForCausalLM": {**LATENT, "q_lora_rank": 48},
    "NemotronHForCausalLM": {
        **ROUTED,
        "head_dim": 16,
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 48,
    },
    "SolarOpenForCausalLM": {**ROUTED, "head_dim": 16},
    "BambaForCausalLM": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "attn_layer_indices": [1],
    },
    "Ministral3ForCausalLM": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "CohereForCausalLM:plus": {"use_qk_norm": True},
    "Gemma4ForCausalLM:experts": {
        **FAMILIES["Gemma4ForCausalLM"],
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "MiniCPM3ForCausalLM": {**LATENT, "v_head_dim": 16, "q_lora_rank": 48},
    "NomicBertModel": {"num_key_value_heads": 4},
    "CamembertModel": {"type_vocab_size": 1},
    "EuroBertModel": {},
    "DistilBertModel": {"dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 96},
}
# what the converter wants in config.json, and transformers does not write any more
FOR_CONVERTER = {
    "GPT2LMHeadModel": {"n_ctx": 128},
    "PhimoeForCausalLM": {
        "architectures": ["PhiMoEForCausalLM"],
        "original_max_position_embeddings": 128,
    },
    "MptForCausalLM": {"architectures": ["MPTForCausalLM"]},
    "Cohere2ForCausalLM": {"rotary_pct": 1.0},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "GraniteMoeHybridForCausalLM:experts": {"layer_types": ["mamba", "attention"]},
    "T5ForConditionalGeneration": {"decoder_start_token_id": 0},
    "T5ForConditionalGeneration:gated": {"decoder_start_token_id": 0},
    "UMT5ForConditionalGeneration": {"decoder_start_token_id": 0},
}
FOR_CONVERTER |= {
    "GlmForCausalLM": {"seq_length": 128, "layernorm_epsilon": 0.00000015625},
    "EuroBertModel": {"classifier_pooling": "mean"},
    "NomicBertModel": {
        "n_positions": 2048,
        "max_trained_positions": 2048,
        "activation_function": "swiglu",
        "causal": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "prenorm": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
    },
}
OF_SENTENCEPIECE = (
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Phi3ForCausalLM",
    "NemotronForCausalLM",
    "MiniCPM3ForCausalLM",
)
TIED = (
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "CohereForCausalLM",
    "CohereForCausalLM:plus",
    "GPT2LMHeadModel",
    "Starcoder2ForCausalLM",
    "MambaForCausalLM",
    "Cohere2ForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "T5ForConditionalGeneration",
    "T5ForConditionalGeneration:gated",
)
# seeds of models in which a weight of a norm is so small that adding 1 rounds it
SEEDS = {"Gemma3TextModel": 1}


def class_of(family: str) -> Any:
    """The class in transformers."""
    return getattr(transformers, family.partition(":")[0])


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE with one merge, as most models have it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:93]
    tokens = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    merge = (alphabet[0], alphabet[1])
    tokens["".join(merge)] = len(tokens)
    tokenizer = Tokenizer(models.BPE(tokens, [merge]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
        folder
    )


def write_words(folder: Path) -> None:
    """A vocabulary whose words begin with the sign of a space, as that of CamemBERT."""
    words = ["<pad>", "<s>", "</s>", *(f"▁{letter}" for letter in map(chr, range(97, 123)))]
    tokens = {word: number for number, word in enumerate(words)}
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(tokens, [])), **special
    ).save_pretrained(folder)


def write_sentencepiece(folder: Path) -> None:
    """A model of SentencePiece, which the converter wants of some families."""
    import sentencepiece

    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    text.unlink()
    (folder / "tokenizer.vocab").unlink()


def write_model(folder: Path, architecture: str, dtype: torch.dtype) -> Path:
    """A tiny model of random weights, norms and biases included."""
    kind = class_of(architecture)
    config = kind.config_class(
        **{**SMALL, **FAMILIES[architecture], "tie_word_embeddings": architecture in TIED}
    )
    torch.manual_seed(SEEDS.get(architecture, len(architecture)))
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("A_log"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | FOR_CONVERTER.get(architecture, {})))
    write_tokenizer(folder)
    if architecture == "CamembertModel":
        write_words(folder)
    if architecture in OF_SENTENCEPIECE:
        write_sentencepiece(folder)
    return folder


# classes of the converter that want a tokenizer of their own kind, which these models do not have
OTHER_VOCABULARIES = (
    ("glm", "Glm4Model"),
    ("glm", "Glm4MoeModel"),
    ("glm", "SolarOpenModel"),
    ("ernie", "Ernie4_5Model"),
    ("jamba", "JambaModel"),
    ("t5", "T5Model"),
    ("t5", "T5EncoderModel"),
    ("phi", "Phi3MiniModel"),
    ("internlm", "InternLM2Model"),
    ("gemma", "Gemma4Model"),
    ("glm", "Glm4MoeLiteModel"),
    ("glm", "GlmMoeDsaModel"),
    ("chatglm", "ChatGLMModel"),
    ("hunyuan", "HunYuanMoEModel"),
    ("nemotron", "NemotronHModel"),
    ("deepseek", "DeepseekV32Model"),
    ("bert", "XLMRobertaModel"),
)

# Runs the converter on several models. The hash of a tokenizer need not be one that it knows, and
# its parameters are those of config.json too, of which transformers 5 leaves out some.
_PROGRAM = """
import importlib, json, os, sys
from pathlib import Path
script, *pairs = sys.argv[1:]
sys.path.insert(0, str(Path(script).parent))
from conversion.base import ModelBase, TextModel
from conversion.bert import NomicBertModel
NomicBertModel._is_tokenizer_xlmroberta = lambda self: False
TextModel.get_vocab_base_pre = lambda self, tokenizer: os.environ.get("PRE_TOKENIZER", "gpt-2")
for module, kind in json.loads(os.environ["OTHER_VOCABULARIES"]):
    classes = vars(importlib.import_module(f"conversion.{module}"))
    classes[kind].set_vocab = TextModel._set_vocab_gpt2
parameters = ModelBase.load_hparams
def load(folder, is_mistral_format=False):
    written = json.loads((Path(folder) / "config.json").read_text())
    return parameters(folder, is_mistral_format) | written
ModelBase.load_hparams = staticmethod(load)
ModelBase.no_mtp = "MTP" not in os.environ
import convert_hf_to_gguf
for folder, out in zip(pairs[::2], pairs[1::2]):
    kind = os.environ["OUT_TYPE"]
    sys.argv = [script, folder, "--outfile", out, "--outtype", kind]
    try:
        convert_hf_to_gguf.main()
    except (Exception, SystemExit) as error:
        print("FAILED", folder, repr(error), file=sys.stderr)
"""


def convert(folder: Path, out_type: str) -> Path:
    """Converts a model with llama.cpp."""
    [out] = convert_all([folder], out_type)
    assert out.is_file(), "the converter says why above"
    return out


def convert_all(folders: Sequence[Path], out_type: str) -> list[Path]:
    """Converts models with llama.cpp, in one process; a file is missing if it failed."""
    outs = [folder.with_name(f"{folder.name}-{out_type}.gguf") for folder in folders]
    pairs = [str(path) for pair in zip(folders, outs, strict=True) for path in pair]
    variables = {
        **os.environ,
        "OTHER_VOCABULARIES": json.dumps(OTHER_VOCABULARIES),
        "OUT_TYPE": out_type,
    }
    command = [sys.executable, "-c", _PROGRAM, str(CONVERTER), *pairs]
    subprocess.run(command, check=True, env=variables)
    return outs


def decoded_by_gguf(path: Path) -> dict[str, torch.Tensor]:
    """The values of all tensors of a file, as llama.cpp's package decodes them."""
    import gguf

    decoded = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        decoded[tensor.name] = torch.from_numpy(values.copy())
    return decoded


def assert_equal_in_bfloat16(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    """Checks that tensors are those expected, bit for bit; names are compared before."""
    different = {}
    for name in found:
        assert found[name].shape == expected[name].shape, name
        assert found[name].dtype == torch.bfloat16, name
        unequal = int((found[name] != expected[name]).sum())
        if unequal:
            different[name] = unequal
    assert not different
