"""Writes checkpoints of Kimi K2.6's layout and size, whose files have holes for data.

Names, dtypes and shapes are those of the text model: 61 layers, 384 experts in the INT4 of
compressed-tensors, 208,093 tensors. The vision tower is left out.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

BYTES = {"BF16": 2, "F32": 4, "I32": 4}

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                "group_size": 32, "dynamic": False,
            },
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
}  # fmt: skip


LAYERS, EXPERTS, WIDTH, INNER, WORDS = 61, 384, 7168, 2048, 163_840

CONFIG = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "kimi_k2",
        "num_hidden_layers": LAYERS,
        "n_routed_experts": EXPERTS,
        "vocab_size": WORDS,
        "quantization_config": QUANTIZATION,
    },
    "vision_config": {"vt_hidden_size": 1152},
}


def tensors() -> Iterator[tuple[str, str, list[int]]]:
    """Yields name, dtype and shape of each tensor."""
    mlp = {"gate_proj": [INNER, WIDTH], "up_proj": [INNER, WIDTH], "down_proj": [WIDTH, INNER]}
    attention = {
        "q_a_proj": [1536, WIDTH],
        "q_b_proj": [12_288, 1536],
        "kv_a_proj_with_mqa": [576, WIDTH],
        "kv_b_proj": [16_384, 512],
        "o_proj": [WIDTH, 8192],
    }
    for name in ("model.embed_tokens", "lm_head"):
        yield f"language_model.{name}.weight", "BF16", [WORDS, WIDTH]
    yield "language_model.model.norm.weight", "BF16", [WIDTH]
    for layer in range(LAYERS):
        above = f"language_model.model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{above}.{name}.weight", "BF16", [WIDTH]
        for name, shape in attention.items():
            yield f"{above}.self_attn.{name}.weight", "BF16", shape
        dense = f"{above}.mlp" if layer == 0 else f"{above}.mlp.shared_experts"
        for name, shape in mlp.items():
            yield f"{dense}.{name}.weight", "BF16", shape
        if layer == 0:
            continue
        yield f"{above}.mlp.gate.weight", "BF16", [EXPERTS, WIDTH]
        yield f"{above}.mlp.gate.e_score_correction_bias", "F32", [EXPERTS]
        for expert in range(EXPERTS):
            for name, (rows, columns) in mlp.items():
                path = f"{above}.mlp.experts.{expert}.{name}"
                yield f"{path}.weight_packed", "I32", [rows, columns // 8]
                yield f"{path}.weight_scale", "BF16", [rows, columns // 32]
                yield f"{path}.weight_shape", "I32", [2]


def write_kimi(folder: Path) -> int:
    """Writes the checkpoint, and returns its number of tensors."""
    return write_checkpoint(folder, list(tensors()), LAYERS + 1, CONFIG)


def write_checkpoint(
    folder: Path,
    tensors: list[tuple[str, str, list[int]]],
    files: int,
    config: Mapping[str, object],
) -> int:
    """Writes tensors of a name, a dtype and a shape, and returns their number.

    The files have holes where weights would be. A W_shape is that of W_packed.
    """
    size = -(-len(tensors) // files)
    weight_map = {}
    for number, start in enumerate(range(0, len(tensors), size), start=1):
        file = f"model-{number:05d}-of-{files:05d}.safetensors"
        described = tensors[start : start + size]
        _write_file(folder / file, described)
        weight_map |= dict.fromkeys((name for name, _, _ in described), file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return len(tensors)


def _write_file(path: Path, described: list[tuple[str, str, list[int]]]) -> None:
    entries, position, shapes = {}, 0, {}
    by_name = {name: shape for name, _, shape in described}
    for name, dtype, shape in described:
        size = BYTES[dtype] * math.prod(shape)
        offsets = [position, position + size]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        packed = by_name.get(name.removesuffix("_shape") + "_packed")
        if name.endswith("_shape") and packed is not None:
            shapes[position] = struct.pack("<2i", packed[0], 8 * packed[1])
        position += size
    header = json.dumps(entries).encode()
    start = 8 + len(header)
    with path.open("wb") as output:
        output.write(len(header).to_bytes(8, "little") + header)
        output.truncate(start + position)
        for place, value in shapes.items():
            output.seek(start + place)
            output.write(value)
