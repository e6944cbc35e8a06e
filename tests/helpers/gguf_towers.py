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
from gguf_families import (
    CONVERTER,
    LINEAR_ATTENTION,
    MIXTURE,
    OTHER_VOCABULARIES,
    ROUTED,
    SMALL,
    class_of,
    write_tokenizer,
)
from gguf_families import FAMILIES as TEXT_FAMILIES
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

_GLM_SECTIONS = {**_SECTIONS, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
_OF_GLM = {
    "depth": 4,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "image_size": 16,
    "out_hidden_size": 64,
    "intermediate_size": 48,
}
_GLM_TOKENS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "image_start_token_id": 92,
    "image_end_token_id": 93,
    "video_start_token_id": 88,
    "video_end_token_id": 89,
}
_GLM_TEXT = {
    **_TEXT,
    "head_dim": 16,
    "attention_bias": True,
    "rope_parameters": _GLM_SECTIONS,
}
_WHISPER = {"num_mel_bins": 8, "max_source_positions": 16}
FAMILIES |= {
    "Qwen3VLMoeForConditionalGeneration": {
        **_QWEN_TOKENS,
        "text_config": {**_TEXT, **MIXTURE, "head_dim": 16, "rope_parameters": _SECTIONS},
        "vision_config": FAMILIES["Qwen3VLForConditionalGeneration"]["vision_config"],
    },
    "Qwen3_5MoeForConditionalGeneration": {
        **_QWEN_TOKENS,
        "text_config": {**_TEXT, **MIXTURE, **LINEAR_ATTENTION},
        "vision_config": FAMILIES["Qwen3_5ForConditionalGeneration"]["vision_config"],
    },
    "Glm4vForConditionalGeneration": {
        **_GLM_TOKENS,
        "text_config": _GLM_TEXT,
        "vision_config": _OF_GLM,
    },
    "Glm4vMoeForConditionalGeneration": {
        **_GLM_TOKENS,
        "text_config": {**_GLM_TEXT, **ROUTED, "first_k_dense_replace": 1},
        "vision_config": _OF_GLM,
    },
    "Gemma4ForConditionalGeneration": {
        "text_config": {**SMALL, **TEXT_FAMILIES["Gemma4ForCausalLM:experts"]},
        "vision_config": {**_VISION, "head_dim": 16, "patch_size": 4, "num_key_value_heads": 2}
        | {"standardize": True, "use_clipped_linears": True, "position_embedding_size": 16},
        "audio_config": None,
        "image_token_id": 90,
        "tie_word_embeddings": True,
    },
    "Llama4ForConditionalGeneration": {
        "image_token_index": 90,
        "text_config": {**_TEXT, **TEXT_FAMILIES["Llama4ForCausalLM"]},
        "vision_config": {**_VISION, "intermediate_size": 128, "vision_output_dim": 48}
        | {"projector_input_dim": 48, "projector_output_dim": 48, "pixel_shuffle_ratio": 0.5},
    },
    "Qwen2AudioForConditionalGeneration": {
        "audio_token_index": 90,
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "audio_config": {**_WHISPER, "d_model": 32, "encoder_layers": 4}
        | {"encoder_attention_heads": 2, "encoder_ffn_dim": 48},
    },
    "VoxtralForConditionalGeneration": {
        "audio_token_id": 90,
        "text_config": {**_TEXT, "model_type": "llama", "head_dim": 16},
        "audio_config": {**_VISION, **_WHISPER, "intermediate_size": 128},
    },
}
HEARING = ("Qwen2AudioForConditionalGeneration", "VoxtralForConditionalGeneration")

OF_CLIP = {
    "text_config": {**_TEXT, "model_type": "llama"},
    "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    "image_token_index": 90,
    "image_token_id": 90,
    "image_grid_pinpoints": [[28, 28]],  # of LLaVA-NeXT
}
"""LLaVA 1.5 and LLaVA-NeXT, whose towers today's converter does not convert."""

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
    "Qwen2AudioForConditionalGeneration": "Qwen2ForCausalLM",
    "VoxtralForConditionalGeneration": "LlamaForCausalLM",
    "LlavaNextForConditionalGeneration": "LlamaForCausalLM",
}
# seeds of models in which a weight of a norm is so small that adding 1 rounds it
SEEDS = {"Qwen3_5ForConditionalGeneration": 1}

_PREPROCESSOR = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_seq_length": 4}
_BREAK = {"content": "[IMG_BREAK]", "special": True}


def write_model(folder: Path, architecture: str, dtype: torch.dtype) -> Path:
    """A tiny model of random weights, under the names that models on the Hub have."""
    return _write(folder, architecture, FAMILIES[architecture], dtype)


def write_llava(folder: Path, architecture: str = "LlavaForConditionalGeneration") -> Path:
    """A tiny LLaVA 1.5, or LLaVA-NeXT, of random values in float16, under the names of the Hub."""
    folder = _write(folder, architecture, OF_CLIP, torch.bfloat16)
    _rename(folder, {**_HUB, "vision_tower.pre_layrnorm": "vision_tower.vision_model.pre_layrnorm"})
    _round_to_float16(folder)
    return folder


def _round_to_float16(folder: Path) -> None:
    """Rounds values to what float16 holds, in which the converter writes some tensors."""
    path = folder / "model.safetensors"
    state = {name: values.half().bfloat16() for name, values in load_file(path).items()}
    save_file(state, path, {"format": "pt"})


def _leave_out_line_ends(folder: Path) -> None:
    """Removes image_newline of LLaVA-NeXT, which its text model does not have."""
    path = folder / "model.safetensors"
    state = load_file(path)
    if state.pop("image_newline", None) is not None:
        save_file(state, path, {"format": "pt"})


def _stack_experts(folder: Path) -> None:
    """Stacks experts as models on the Hub have them; transformers 5 writes single ones."""
    path = folder / "model.safetensors"
    state = load_file(path)
    single = sorted(name for name in state if ".experts.0.gate_proj." in name)
    for name in single:
        stem = name.partition(".experts.0.")[0]
        for matrices, stack in ((("gate", "up"), "gate_up_proj"), (("down",), "down_proj")):
            experts = []
            for expert in range(MIXTURE["num_experts"]):
                names = [f"{stem}.experts.{expert}.{kind}_proj.weight" for kind in matrices]
                experts.append(torch.cat([state.pop(name) for name in names]))
            state[f"{stem}.experts.{stack}"] = torch.stack(experts)
    save_file(state, path, {"format": "pt"})


def _turn_experts(folder: Path) -> None:
    """Turns experts as models on the Hub have them; transformers 5 turns them when it loads."""
    path = folder / "model.safetensors"
    state = load_file(path)
    for name, values in state.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            state[name] = values.transpose(1, 2).contiguous()
    save_file(state, path, {"format": "pt"})


def _write(folder: Path, architecture: str, config: dict[str, Any], dtype: torch.dtype) -> Path:
    """Writes a model of random weights and what is beside it."""
    kind = class_of(architecture)
    torch.manual_seed(SEEDS.get(architecture, len(architecture)))
    model = kind(kind.config_class(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(("_min", "_max")):  # of what Gemma 4 clips
                buffer.fill_(-1.5 if name.endswith("_min") else 1.5)
            if "std_" in name:
                buffer.normal_()
    model.to(dtype).save_pretrained(folder)
    _rename(folder, OLDER_NAMES.get(architecture, {}))
    if architecture == "Qwen3VLMoeForConditionalGeneration":
        _turn_experts(folder)
    if architecture == "Qwen3_5MoeForConditionalGeneration":
        _stack_experts(folder)
    if architecture in HEARING:
        _round_to_float16(folder)
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
    _leave_out_line_ends(copy)
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
for module, kind in json.loads(os.environ["OTHER_VOCABULARIES"]):
    classes = vars(importlib.import_module(f"conversion.{module}"))
    classes[kind].set_vocab = TextModel._set_vocab_gpt2
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
    ("image_newline", "model.image_newline"),
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
    variables = {
        **os.environ,
        "OTHER_VOCABULARIES": json.dumps(OTHER_VOCABULARIES),
        "OUT_TYPE": out_type,
    }
    subprocess.run(command, check=True, env=variables)
    return pairs
