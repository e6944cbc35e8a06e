"""Tiny models and adapters trained on them by PEFT, the oracle of everything that merges."""

import warnings
from pathlib import Path
from typing import Any

import bitsandbytes.nn.modules
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

# for CPUs with AVX512-BF16 it has a product that rounds scales, and fails where rows are no
# multiples of the blocksize
bitsandbytes.nn.modules.has_avx512bf16 = lambda: False

SIZES = {
    "llama": {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "vocab_size": 96,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "n_inner": 160,
    },
    "qwen3_moe": {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "bert": {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "num_labels": 3,
    },
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "bert": "BertForSequenceClassification",
}
LINEAR = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "qwen3_moe": ["q_proj", "o_proj"],
    "bert": ["query", "value", "dense"],
}
INPUT = torch.arange(24).view(2, 12) % 96


def make_model(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A random model, saved."""
    torch.manual_seed(1)
    model_class = getattr(transformers, CLASSES.get(kind, kind))
    config = model_class.config_class(**{**SIZES.get(kind, {}), **changes})
    model_class(config).to(dtype).save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    return model_class.from_pretrained(folder, **options).eval()


def train(model: Any, folder: Path, steps: int = 4, **config: Any) -> Any:
    """The trained model of PEFT; its adapter is saved in the folder. B is no longer zero, nor
    anything else as made.
    """
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 10, **config}))
        optimizer = torch.optim.AdamW(
            [part for part in adapted.parameters() if part.requires_grad], lr=0.02
        )
        for _ in range(steps):
            optimizer.zero_grad()
            loss(adapted).backward()
            optimizer.step()
        adapted.save_pretrained(folder)
    return adapted.eval()


def loss(model: Any) -> torch.Tensor:
    kind = type(model.get_base_model()).__name__
    if kind.endswith("ForSequenceClassification"):
        return model(INPUT, labels=torch.tensor([0, 2])).loss
    return model(INPUT, labels=INPUT).loss


def merged_by_peft(base: Any, *adapters: Path) -> Any:
    """Returns a loaded model with some adapters, as PEFT merges them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = PeftModel.from_pretrained(base, adapters[0], adapter_name="0")
        for number, adapter in enumerate(adapters[1:], start=1):
            adapted.load_adapter(adapter, adapter_name=str(number))
        if len(adapters) > 1:
            adapted.base_model.set_adapter([str(number) for number in range(len(adapters))])
        return adapted.merge_and_unload().eval()
