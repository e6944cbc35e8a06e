"""Calibration by the command: encoders, text parts of models that see, results on the Hub.

The models are tiny and random; transformers makes them, and runs what comes of them.
"""

import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from calibrations import (
    LENGTH,
    VOCABULARY,
    gains_of,
    record_of,
    save,
    weights_in,
)
from click.testing import CliRunner

from nf4conv.cli import main

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 16,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 14,
}
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *string.ascii_lowercase)


def run(*words: object) -> str:
    """Runs nf4conv; returns what it says."""
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def calibrate(source: Path, out: Path, text: Path, *options: str) -> dict[str, Any]:
    asked = ("--calibrate", text, "--calibration-tokens", 1024, "--device", "cpu")
    run("quantize", source, out, *asked, *options)
    return record_of(out)


def by_scales(record: dict[str, Any]) -> dict[str, int]:
    return {group["scales"]: group["count"] for group in record["weights"]}


ENCODERS = {
    "bert": ({}, 12),
    "roberta": ({"max_position_embeddings": LENGTH + 1}, 12),
    "modernbert": (
        {"local_attention": 16, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2},
        8,
    ),
}


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_read_text_between_their_marks(kind: str, tmp_path: Path):
    changes, weights = ENCODERS[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **changes, "eos_token_id": 3})
    source = save(transformers.AutoModel.from_config(config), tmp_path / "source")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        sep_token="[SEP]",
        **names,
    )
    fast.save_pretrained(source)
    text = tmp_path / "text.txt"
    generator = np.random.default_rng(0)
    letters = (generator.random(6000) ** 2 * 26).astype(int)
    text.write_text("".join(string.ascii_lowercase[letter] for letter in letters))

    found = calibrate(source, tmp_path / "out", text, "--verify")
    assert by_scales(found)["calibrated"] == weights
    run("quantize", source, tmp_path / "searched", "--scales", "search", "--device", "cpu")
    encoded = fast(text.read_text()[-200:], return_tensors="pt", truncation=True, max_length=28)
    model = transformers.AutoModel.from_pretrained(source, dtype=torch.float32).eval()
    errors = []
    with torch.no_grad():
        expected = model(**encoded).last_hidden_state
        for folder in ("out", "searched"):
            model.load_state_dict(weights_in(tmp_path / folder), strict=False)
            errors.append(float((model(**encoded).last_hidden_state - expected).norm()))
    assert errors[0] < 0.8 * errors[1]


def vision_models() -> dict[str, Any]:
    """Returns configs of models that see."""
    rope = {"rope_type": "default", "mrope_section": [2, 2, 4]}
    marks = {
        "image_token_id": 90,
        "video_token_id": 91,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
    }
    text = {**DECODER, "rope_scaling": rope}
    seeing = {**QWEN_VISION, "deepstack_visual_indexes": [0]}
    gemma = transformers.Gemma3TextConfig(**DECODER, sliding_window=8)
    return {
        "gemma3": transformers.Gemma3Config(
            text_config=gemma.to_dict(),
            vision_config=transformers.SiglipVisionConfig(**VISION).to_dict(),
            mm_tokens_per_image=4,
            image_token_index=90,
        ),
        "qwen3_vl": transformers.Qwen3VLConfig(text_config=text, vision_config=seeing, **marks),
    }


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_text_parts_of_models_that_see(kind: str, text: Path, tmp_path: Path):
    torch.manual_seed(0)
    config = vision_models()[kind]
    source = save(transformers.AutoModelForImageTextToText.from_config(config), tmp_path / "source")
    found = calibrate(source, tmp_path / "out", text, "--verify")
    assert by_scales(found) == {"calibrated": 14}
    gains = gains_of(tmp_path / "out")
    assert sum(gains) / len(gains) < 0.8
    run("quantize", source, tmp_path / "searched", "--scales", "search", "--device", "cpu")
    model = transformers.AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    read = torch.from_numpy(np.load(text)[-8 * LENGTH :].astype(np.int64)).view(8, LENGTH)
    read = read.where(read < 90, 0)  # no marks of images
    divergences = []
    with torch.no_grad():
        before = model(input_ids=read).logits.log_softmax(-1)
        original = {name: value.clone() for name, value in model.state_dict().items()}
        for folder in ("out", "searched"):
            changed = dict(original)
            for name, weight in weights_in(tmp_path / folder).items():
                changed[_in_model(name, original)] = weight
            model.load_state_dict(changed)
            after = model(input_ids=read).logits.log_softmax(-1)
            divergences.append(float((before.exp() * (before - after)).sum(-1).mean()))
    assert divergences[0] < 0.8 * divergences[1]


def _in_model(name: str, known: dict[str, Any]) -> str:
    """Returns the name that a tensor of a file has in the model."""
    tail = name.partition("layers.")[2]
    [found] = [other for other in known if other.endswith(f"language_model.layers.{tail}")]
    return found
