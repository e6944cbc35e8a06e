"""GGUF files come back as the checkpoints that llama.cpp's converter made them from.

Hugging Face → GGUF → Hugging Face, for every family (`make test-gguf`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nf4conv.commands.dequantize import dequantize_checkpoint
from nf4conv.options import DequantizeOptions, RunOptions, SourceOptions

CONVERTER = Path(os.environ.get("LLAMA_CPP", "")) / "convert_hf_to_gguf.py"
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        not CONVERTER.is_file(), reason="make test-gguf fetches llama.cpp's converter"
    ),
]
CPU = RunOptions(device="cpu")

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
    "GPTNeoXForCausalLM": {},
    "BloomForCausalLM": {"n_head": 4, "n_layer": 2},
    "FalconForCausalLM": {"new_decoder_architecture": False, "multi_query": True, "bias": False},
    "MambaForCausalLM": {"intermediate_size": 128, "state_size": 16, "expand": 2},
}
# what the converter wants in config.json, and transformers does not write any more
FOR_CONVERTER = {
    "GPT2LMHeadModel": {"n_ctx": 128},
    "GPTNeoXForCausalLM": {"rotary_pct": 0.25},
    "FalconForCausalLM": {"num_kv_heads": 1},
}
OF_SENTENCEPIECE = (
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Phi3ForCausalLM",
    "NemotronForCausalLM",
)
TIED = (
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "CohereForCausalLM",
    "GPT2LMHeadModel",
    "BloomForCausalLM",
    "FalconForCausalLM",
    "Starcoder2ForCausalLM",
    "MambaForCausalLM",
)


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE, as most models have it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:93]
    tokens = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(tokens, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
        folder
    )


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
    kind = getattr(transformers, architecture)
    config = kind.config_class(
        **{**SMALL, **FAMILIES[architecture], "tie_word_embeddings": architecture in TIED}
    )
    torch.manual_seed(len(architecture))
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("A_log"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | FOR_CONVERTER.get(architecture, {})))
    write_tokenizer(folder)
    if architecture in OF_SENTENCEPIECE:
        write_sentencepiece(folder)
    return folder


# Runs the converter. The hash of a tokenizer need not be one that it knows, and its parameters are
# those of config.json too, of which transformers 5 leaves out some.
_PROGRAM = """
import json, os, runpy, sys
from pathlib import Path
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
from conversion.base import ModelBase, TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: os.environ.get("PRE_TOKENIZER", "gpt-2")
parameters = ModelBase.load_hparams
def load(folder, is_mistral_format=False):
    written = json.loads((Path(folder) / "config.json").read_text())
    return parameters(folder, is_mistral_format) | written
ModelBase.load_hparams = staticmethod(load)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def convert(folder: Path, out_type: str) -> Path:
    """Converts with llama.cpp; the hash of the tokenizer need not be one that it knows."""
    out = folder.with_name(f"{folder.name}-{out_type}.gguf")
    command = [sys.executable, "-c", _PROGRAM, str(CONVERTER), str(folder)]
    command += ["--outfile", str(out), "--outtype", out_type]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    state = {}
    for path in folder.glob("*.safetensors"):
        state |= load_file(path)
    return state


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_comes_back(tmp_path: Path, architecture: str):
    """bf16 bit for bit, with the config of the original and with that of the metadata."""
    source = write_model(tmp_path / "source", architecture, torch.bfloat16)
    gguf = convert(source, "bf16")
    where = SourceOptions(config_from=str(source))
    dequantize_checkpoint(gguf, tmp_path / "back", run=CPU, where=where)
    expected, found = state_of(source), state_of(tmp_path / "back")
    assert found.keys() == expected.keys()
    different = {}
    for name in found.keys() & expected.keys():
        assert found[name].shape == expected[name].shape, name
        assert found[name].dtype == torch.bfloat16, name
        unequal = int((found[name] != expected[name]).sum())
        if unequal:
            different[name] = unequal
    assert not different
    dequantize_checkpoint(gguf, tmp_path / "alone", run=CPU)
    kind = getattr(transformers, architecture)
    tokens = torch.arange(3, 40).view(1, -1)
    with torch.no_grad():
        original = kind.from_pretrained(source, dtype=torch.float32)(tokens).logits
        alone = kind.from_pretrained(tmp_path / "alone", dtype=torch.float32)(tokens).logits
    assert torch.equal(original, alone), (original - alone).abs().max()


@pytest.mark.parametrize("out_type", ["f32", "f16", "q8_0"])
def test_values_are_those_that_the_file_holds(tmp_path: Path, out_type: str):
    """f32 bit for bit, f16 equal to the cast, Q8_0 equal to gguf's own decoding."""
    import gguf

    source = write_model(tmp_path / "source", "Qwen3ForCausalLM", torch.float32)
    path = convert(source, out_type)
    options = DequantizeOptions(dtype="float16" if out_type == "f16" else "float32")
    where = SourceOptions(config_from=str(source))
    dequantize_checkpoint(path, tmp_path / "back", options, CPU, where=where)
    expected, found = state_of(source), state_of(tmp_path / "back")
    assert found.keys() == expected.keys()
    if out_type == "f16":
        expected = {name: values.half() for name, values in expected.items()}
    if out_type == "q8_0":
        decoded = {}
        for tensor in gguf.GGUFReader(path).tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            decoded[tensor.name] = torch.from_numpy(np.array(values))
        name = "model.layers.1.mlp.down_proj.weight"
        assert not torch.equal(expected[name], decoded["blk.1.ffn_down.weight"])
        expected = {name: decoded["blk.1.ffn_down.weight"]}
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


TEXTS = [
    "The quick brown fox's 12345 jumps, over   the lazy dog!\n\n  Ends\there.",
    "naïve café – 你好, мир 😀",
    " leading <s>special</s> and trailing ",
]


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "gpt-2"])
def test_a_byte_level_tokenizer_comes_back(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    from tokenizers import trainers

    from nf4conv.sources.gguf.tokenizing import tokenizer_files

    source = write_model(tmp_path / "source", "LlamaForCausalLM", torch.bfloat16)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    like = tokenizer_files(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": kind,
            "tokenizer.ggml.tokens": ["a"],
            "tokenizer.ggml.merges": [],
        }
    )["tokenizer.json"]
    whole = json.loads(tokenizer.to_str()) | {
        key: like[key] for key in ("normalizer", "pre_tokenizer", "decoder")
    }
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    tokenizer.save(str(source / "tokenizer.json"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": 400}))
    monkeypatch.setenv("PRE_TOKENIZER", kind)
    dequantize_checkpoint(convert(source, "bf16"), tmp_path / "back", run=CPU)
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in TEXTS:
        assert made.encode(text, add_special_tokens=False) == tokenizer.encode(text).ids
        assert made.decode(tokenizer.encode(text).ids) == text
    assert (made.bos_token, made.eos_token, made.pad_token) == ("<s>", "</s>", "<pad>")


def test_a_tokenizer_of_sentencepiece_comes_back(tmp_path: Path):
    import sentencepiece

    source = write_model(tmp_path / "source", "LlamaForCausalLM", torch.bfloat16)
    (source / "tokenizer.json").unlink()
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS * 50))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(source / "tokenizer"),
        model_type="bpe",
        vocab_size=380,
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=2,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": 380}))
    processor = sentencepiece.SentencePieceProcessor(str(source / "tokenizer.model"))
    dequantize_checkpoint(convert(source, "bf16"), tmp_path / "back", run=CPU)
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in TEXTS[:2]:
        assert made.encode(text) == [processor.bos_id(), *processor.encode(text)]
        assert made.decode(processor.encode(text)) == text
