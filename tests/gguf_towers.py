"""Small models that see, and the two GGUF files that llama.cpp's converter makes of each."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gguf_families import CONVERTER, LINEAR_ATTENTION, SMALL, class_of, write_tokenizer
from safetensors.torch import load_file, save_file

_TEXT = {**SMALL, "tie_word_embeddings": False}
_SECTIONS = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,  # more than the converter counts matrices of a projector
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
_PIXTRAL = {**_VISION, "head_dim": 16, "model_type": "pixtral"}
_OF_QWEN = {"num_heads": 2, "patch_size": 4, "intermediate_size": 48}
_QWEN_TOKENS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2VLForConditionalGeneration": {
        **_QWEN_TOKENS,
        "text_config": {**_TEXT, "rope_parameters": _SECTIONS},
        "vision_config": {**_OF_QWEN, "depth": 4, "embed_dim": 32, "hidden_size": 64}
        | {"mlp_ratio": 2},
    },
    "Qwen2_5_VLForConditionalGeneration": {
        **_QWEN_TOKENS,
        "text_config": {**_TEXT, "rope_parameters": _SECTIONS},
        "vision_config": {**_OF_QWEN, "depth": 4, "hidden_size": 32, "out_hidden_size": 64}
        | {"window_size": 16, "fullatt_block_indexes": [1]},
    },
    "Gemma3ForConditionalGeneration": {
        "text_config": {**SMALL, "head_dim": 16, "query_pre_attn_scalar": 16},
        "vision_config": {**_VISION, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_id": 127,  # behind the last token of the tokenizer
        "tie_word_embeddings": True,
    },
    "Qwen3VLForConditionalGeneration": {
        **_QWEN_TOKENS,
        "text_config": {**_TEXT, "head_dim": 16, "rope_parameters": _SECTIONS},
        "vision_config": {**_OF_QWEN, "depth": 4, "hidden_size": 32, "out_hidden_size": 64}
        | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
    },
    "Qwen3_5ForConditionalGeneration": {
        **_QWEN_TOKENS,
        "text_config": {**_TEXT, **LINEAR_ATTENTION},
        "vision_config": {**_OF_QWEN, "depth": 4, "hidden_size": 32, "out_hidden_size": 64}
        | {"num_position_embeddings": 16},
    },
    "Mistral3ForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": _PIXTRAL,
        "image_token_id": 90,
        "tie_word_embeddings": False,
    },
    "LlavaForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": _PIXTRAL,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "image_token_index": 90,
        "image_token_id": 90,
    },
    "Idefics3ForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": _VISION,
        "scale_factor": 2,
        "image_token_id": 90,
    },
    "SmolVLMForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": _VISION,
        "scale_factor": 2,
        "image_token_id": 90,
    },
    "InternVLForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [7, 7]}
        | {"use_qk_norm": True, "attention_bias": True, "architectures": ["InternVisionModel"]},
        "image_token_id": 90,
        "tie_word_embeddings": False,
    },
}

OF_CLIP = {
    "text_config": {**_TEXT, "model_type": "llama"},
    "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    "image_token_index": 90,
    "image_token_id": 90,
}
"""LLaVA 1.5, whose tower today's converter does not convert."""

# names that the converter knows, by what transformers 5.23 begins them with
_HUB = {
    "vision_tower.embeddings": "vision_tower.vision_model.embeddings",
    "vision_tower.encoder": "vision_tower.vision_model.encoder",
    "vision_tower.post_layernorm": "vision_tower.vision_model.post_layernorm",
}
OLDER_NAMES = {"Gemma3ForConditionalGeneration": _HUB}
# what the converter's own check of names wants before them
FOR_CONVERTER = {
    "InternVLForConditionalGeneration": {
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    }
}

# the class of the text model, by which the converter finds its own
TEXTS = {
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "LlavaForConditionalGeneration": "MistralForCausalLM",
    "Idefics3ForConditionalGeneration": "LlamaForCausalLM",
    "SmolVLMForConditionalGeneration": "LlamaForCausalLM",
    "InternVLForConditionalGeneration": "Qwen2ForCausalLM",
}
# seeds of models in which a weight of a norm is so small that adding 1 rounds it
SEEDS = {"Qwen3_5ForConditionalGeneration": 1}

_PREPROCESSOR = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_seq_length": 4}
_BREAK = {"content": "[IMG_BREAK]", "special": True}


def write_model(folder: Path, architecture: str, dtype: torch.dtype) -> Path:
    """A tiny model of random weights, under the names that models on the Hub have."""
    return _write(folder, architecture, FAMILIES[architecture], dtype)


def write_llava(folder: Path) -> Path:
    """A tiny LLaVA 1.5 of random weights that float16 holds, under the names of the Hub."""
    folder = _write(folder, "LlavaForConditionalGeneration", OF_CLIP, torch.bfloat16)
    _rename(folder, {**_HUB, "vision_tower.pre_layrnorm": "vision_tower.vision_model.pre_layrnorm"})
    path = folder / "model.safetensors"
    state = {name: values.half().bfloat16() for name, values in load_file(path).items()}
    save_file(state, path, {"format": "pt"})
    return folder


def _write(folder: Path, architecture: str, config: dict[str, Any], dtype: torch.dtype) -> Path:
    """Writes a model of random weights and what is beside it."""
    kind = class_of(architecture)
    torch.manual_seed(SEEDS.get(architecture, len(architecture)))
    model = kind(kind.config_class(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(folder)
    _rename(folder, OLDER_NAMES.get(architecture, {}))
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR))
    path = folder / "tokenizer_config.json"
    described = json.loads(path.read_text()) | {"added_tokens_decoder": {"94": _BREAK}}
    path.write_text(json.dumps(described))
    return folder


def _rename(folder: Path, names: dict[str, str]) -> None:
    """Renames tensors, by how their names begin."""
    path = folder / "model.safetensors"
    state = {}
    for name, values in load_file(path).items():
        for old, new in names.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        state[name] = values
    save_file(state, path, {"format": "pt"})


def _for_converter(folder: Path) -> Path:
    """Returns a copy of a model in which the converter finds what it looks for."""
    config = json.loads((folder / "config.json").read_text())
    architecture = config["architectures"][0]
    copy = folder.with_name(f"{folder.name}-for-converter")
    shutil.copytree(folder, copy)
    _rename(copy, FOR_CONVERTER.get(architecture, {}))
    config["text_config"]["architectures"] = [TEXTS.get(architecture, architecture)]
    (copy / "config.json").write_text(json.dumps(config))
    return copy


# Runs the converter for the text model and the tower of several models. The hash of a tokenizer
# need not be one that it knows, and its parameters are those of config.json, of which transformers
# 5 leaves out some.
_PROGRAM = """
import importlib, json, os, sys
from pathlib import Path
script, *triples = sys.argv[1:]
sys.path.insert(0, str(Path(script).parent))
from conversion.base import ModelBase, TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
parameters = ModelBase.load_hparams
def load(folder, is_mistral_format=False):
    written = json.loads((Path(folder) / "config.json").read_text())
    return parameters(folder, is_mistral_format) | written
ModelBase.load_hparams = staticmethod(load)
ModelBase.no_mtp = True
import convert_hf_to_gguf
for folder, text, tower in zip(triples[::3], triples[1::3], triples[2::3]):
    for out, *more in ((text,), (tower, "--mmproj")):
        sys.argv = [script, folder, "--outfile", out, "--outtype", os.environ["OUT_TYPE"], *more]
        try:
            convert_hf_to_gguf.main()
        except (Exception, SystemExit) as error:
            print("FAILED", folder, repr(error), file=sys.stderr)
"""


_OF_LEGACY = (
    ("vision_tower.vision_model.", "v."),
    ("multi_modal_projector.linear_1", "mm.0"),
    ("multi_modal_projector.linear_2", "mm.2"),
    ("encoder.layers", "blk"),
    ("embeddings.", ""),
    ("self_attn.", "attn_"),
    ("_proj", ""),
    ("layer_norm", "ln"),
    ("layernorm", "ln"),
    ("layrnorm", "ln"),
    ("mlp.fc1", "ffn_down"),
    ("mlp.fc2", "ffn_up"),
    ("embedding", "embd"),
)


def convert_llava(folder: Path) -> Path:
    """Writes the tower of LLaVA 1.5 as llama.cpp's script for legacy models does.

    It leaves out the last layer and the norm behind it. Source: get_tensor_name, should_skip_tensor
    and what follows in tools/mtmd/legacy-models/convert_image_encoder_to_gguf.py at 51eff66.
    """
    from gguf import GGUFWriter

    path = folder.with_name("mmproj-llava.gguf")
    writer = GGUFWriter(path, "clip")
    writer.add_bool("clip.has_llava_projector", True)
    writer.add_string("clip.projector_type", "mlp")
    layers = OF_CLIP["vision_config"]["num_hidden_layers"] - 1
    writer.add_uint32("clip.vision.block_count", layers)
    writer.add_uint32("clip.vision.projection_dim", 16)
    for name, values in load_file(folder / "model.safetensors").items():
        if "language_model" in name or "post_layernorm" in name or f"layers.{layers}." in name:
            continue
        for old, new in _OF_LEGACY:
            name = name.replace(old, new)
        kind = torch.float16 if values.dim() in (2, 4) else torch.float32
        writer.add_tensor(name, values.to(kind).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert_all(folders: Sequence[Path], out_type: str) -> list[tuple[Path, Path]]:
    """Converts models with llama.cpp, in one process: the text model and the tower of each."""
    pairs = []
    words: list[str] = []
    for folder in folders:
        text = folder.with_name(f"{folder.name}-{out_type}.gguf")
        tower = folder.with_name(f"mmproj-{folder.name}-{out_type}.gguf")
        pairs.append((text, tower))
        words += [str(_for_converter(folder)), str(text), str(tower)]
    command = [sys.executable, "-c", _PROGRAM, str(CONVERTER), *words]
    subprocess.run(command, check=True, env={**os.environ, "OUT_TYPE": out_type})
    return pairs
