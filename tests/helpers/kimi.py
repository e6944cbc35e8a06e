"""Writes checkpoints of Kimi K2.6's layout, of its size or of a small one.

Names, dtypes and shapes are those of the text model: 61 layers, 384 experts in the INT4 of
compressed-tensors, 208,093 tensors. The vision tower is left out.
"""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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


@dataclass(frozen=True)
class Kimi:
    """Sizes of a checkpoint; the defaults are those of the release."""

    layers: int = 61
    experts: int = 384
    files: int = 62
    width: int = 7168
    inner: int = 2048
    words: int = 163_840
    ranks: tuple[int, int, int] = (1536, 576, 512)  # of the queries, and of keys and values
    heads: tuple[int, int] = (12_288, 16_384)  # outputs of q_b_proj and of kv_b_proj

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "dtype": "bfloat16",
            "text_config": {
                "model_type": "kimi_k2",
                "num_hidden_layers": self.layers,
                "n_routed_experts": self.experts,
                "vocab_size": self.words,
                "quantization_config": QUANTIZATION,
            },
            "vision_config": {"vt_hidden_size": 1152},
        }

    def tensors(self) -> Iterator[tuple[str, str, list[int]]]:
        """Yields name, dtype and shape of each tensor."""
        width, inner = self.width, self.inner
        mlp = {"gate_proj": [inner, width], "up_proj": [inner, width], "down_proj": [width, inner]}
        queries, keys, values = self.ranks
        attention = {
            "q_a_proj": [queries, width],
            "q_b_proj": [self.heads[0], queries],
            "kv_a_proj_with_mqa": [keys, width],
            "kv_b_proj": [self.heads[1], values],
            "o_proj": [width, self.heads[1] // 2],
        }
        for name in ("model.embed_tokens", "lm_head"):
            yield f"language_model.{name}.weight", "BF16", [self.words, width]
        yield "language_model.model.norm.weight", "BF16", [width]
        for layer in range(self.layers):
            above = f"language_model.model.layers.{layer}"
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{above}.{name}.weight", "BF16", [width]
            for name, shape in attention.items():
                yield f"{above}.self_attn.{name}.weight", "BF16", shape
            dense = f"{above}.mlp" if layer == 0 else f"{above}.mlp.shared_experts"
            for name, shape in mlp.items():
                yield f"{dense}.{name}.weight", "BF16", shape
            if layer == 0:
                continue
            yield f"{above}.mlp.gate.weight", "BF16", [self.experts, width]
            yield f"{above}.mlp.gate.e_score_correction_bias", "F32", [self.experts]
            for expert in range(self.experts):
                for name, (rows, columns) in mlp.items():
                    path = f"{above}.mlp.experts.{expert}.{name}"
                    yield f"{path}.weight_packed", "I32", [rows, columns // 8]
                    yield f"{path}.weight_scale", "BF16", [rows, columns // 32]
                    yield f"{path}.weight_shape", "I32", [2]

    def write(self, folder: Path, *, has_data: bool) -> int:
        """Writes the checkpoint, and returns its number of tensors."""
        return write_checkpoint(
            folder, list(self.tensors()), self.files, self.config(), has_data=has_data
        )


def write_checkpoint(
    folder: Path,
    tensors: list[tuple[str, str, list[int]]],
    files: int,
    config: dict[str, object],
    *,
    has_data: bool = False,
) -> int:
    """Writes tensors of a name, a dtype and a shape, and returns their number.

    Without data the files have holes where weights would be. A W_shape is that of W_packed.
    """
    size = -(-len(tensors) // files)
    weight_map = {}
    for number, start in enumerate(range(0, len(tensors), size), start=1):
        file = f"model-{number:05d}-of-{files:05d}.safetensors"
        described = tensors[start : start + size]
        _write_file(folder / file, described, seed=number if has_data else None)
        weight_map |= dict.fromkeys((name for name, _, _ in described), file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return len(tensors)


def _write_file(path: Path, described: list[tuple[str, str, list[int]]], seed: int | None) -> None:
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
        if seed is None:
            output.truncate(start + position)
        else:
            output.write(_words(position, seed))
        for place, value in shapes.items():
            output.seek(start + place)
            output.write(value)


def _words(size: int, seed: int) -> bytes:
    """Returns random 16-bit words, none of which is an infinity or NaN of bfloat16."""
    words = np.random.default_rng(seed).integers(0, 2**16, -(-size // 2), dtype=np.uint16)
    words &= 0xBFFF  # exponents below 128
    return words.tobytes()[:size]
