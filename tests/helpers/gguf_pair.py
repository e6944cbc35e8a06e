"""Writes a small Qwen2-VL as two GGUF files, without the package `gguf`."""

import json
from pathlib import Path
from typing import Any

from gguf_files import write_gguf

TEXT: dict[str, Any] = {
    "general.architecture": "qwen2vl",
    "qwen2vl.block_count": 1,
    "qwen2vl.embedding_length": 64,
    "qwen2vl.attention.head_count": 4,
    "qwen2vl.attention.head_count_kv": 2,
}
TEXT_SHAPES = {
    "token_embd.weight": (128, 64),
    "blk.0.attn_norm.weight": (64,),
    "blk.0.attn_q.weight": (64, 64),
    "blk.0.attn_q.bias": (64,),
    "blk.0.attn_k.weight": (32, 64),
    "blk.0.attn_k.bias": (32,),
    "blk.0.attn_v.weight": (32, 64),
    "blk.0.attn_v.bias": (32,),
    "blk.0.attn_output.weight": (64, 64),
    "blk.0.ffn_norm.weight": (64,),
    "blk.0.ffn_gate.weight": (96, 64),
    "blk.0.ffn_up.weight": (96, 64),
    "blk.0.ffn_down.weight": (64, 96),
    "output_norm.weight": (64,),
    "output.weight": (128, 64),
}
TOWER: dict[str, Any] = {
    "general.architecture": "clip",
    "general.type": "mmproj",
    "clip.has_vision_encoder": True,
    "clip.projector_type": "qwen2vl_merger",
    "clip.vision.projection_dim": 64,
    "clip.vision.block_count": 2,
    "clip.vision.embedding_length": 32,
    "clip.vision.attention.head_count": 2,
}
_OF_LAYER = {
    "ln1": (32,),
    "attn_q": (32, 32),
    "attn_k": (32, 32),
    "attn_v": (32, 32),
    "attn_out": (32, 32),
    "ln2": (32,),
    "ffn_up": (64, 32),
    "ffn_down": (32, 64),
}
TOWER_SHAPES: dict[str, tuple[int, ...]] = {
    "v.patch_embd.weight": (32, 3, 4, 4),
    "v.patch_embd.weight.1": (32, 3, 4, 4),
    "v.post_ln.weight": (32,),
    "v.post_ln.bias": (32,),
    "mm.0.weight": (128, 128),
    "mm.0.bias": (128,),
    "mm.2.weight": (64, 128),
    "mm.2.bias": (64,),
}
for _layer in range(2):
    for _module, _shape in _OF_LAYER.items():
        TOWER_SHAPES[f"v.blk.{_layer}.{_module}.weight"] = _shape
        TOWER_SHAPES[f"v.blk.{_layer}.{_module}.bias"] = _shape[:1]
CONFIG: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen2_vl_text",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "rope_theta": 10000.0,
        },
    },
    "vision_config": {
        "model_type": "qwen2_vl_vision",
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 64,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 4,
    },
}


def write_text(folder: Path) -> Path:
    return write_gguf(folder / "model.gguf", TEXT, shapes=TEXT_SHAPES, default="Q8_0")


def write_tower(
    folder: Path,
    metadata: dict[str, Any] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    default: str = "F16",
) -> Path:
    shapes = TOWER_SHAPES if shapes is None else shapes
    return write_gguf(folder / "mmproj.gguf", metadata or TOWER, shapes=shapes, default=default)


def write_original(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


def write_all(folder: Path) -> tuple[Path, tuple[object, ...]]:
    """Returns the text model's file, and the words that name the tower and the original."""
    text, tower = write_text(folder), write_tower(folder)
    original = write_original(folder / "original")
    return text, ("--mmproj", tower, "--config-from", original)
