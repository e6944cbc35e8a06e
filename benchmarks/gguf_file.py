"""Writes GGUF files of realistic shape and random content, for measuring."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.synthetic import Llama
from nf4conv.format.gguf import BY_NAME, NUMBERS, PLAIN

MERGES: Final = 280_147
"""How many pairs the tokenizer of Llama 3 joins."""

SCALES: Final = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block has numbers in half precision; those of other types have one at its beginning."""

NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "self_attn.k_proj": "attn_k",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_proj": "attn_q",
    "self_attn.v_proj": "attn_v",
}
"""The names of modules in the file, by the names that transformers has."""


def write_gguf(shape: Llama, block_type: str, folder: Path) -> None:
    """Writes a model whose matrices are of one type and whose vectors are float32, as llama.cpp has
    them, with a vocabulary as large as Llama 3's. All layers hold the same bytes.
    """
    folder.mkdir(parents=True)
    tensors = [(name_in_file(name), sizes) for name, sizes in shape.tensors()]
    metadata = metadata_of(shape)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, found in metadata.items():
        head += text(key) + value(found)
    place = 0
    for name, sizes in tensors:
        stored_type = block_type if len(sizes) > 1 else "F32"
        head += text(name) + struct.pack("<I", len(sizes))
        head += struct.pack(f"<{len(sizes)}Q", *reversed(sizes))
        head += struct.pack("<IQ", NUMBERS[stored_type], place)
        size = stored_bytes(sizes, stored_type)
        place += size + -size % 32
    made: dict[tuple[int, ...], bytes] = {}
    with (folder / "model.gguf").open("wb") as file:
        file.write(head + bytes(-len(head) % 32))
        for _, sizes in tensors:
            if sizes not in made:
                content = random_blocks(sizes, block_type if len(sizes) > 1 else "F32")
                made[sizes] = content + bytes(-len(content) % 32)
            file.write(made[sizes])
    (folder / "config.json").write_text(json.dumps(shape.config()))


def name_in_file(name: str) -> str:
    """Returns the name that llama.cpp gives a tensor."""
    module, _, ending = name.rpartition(".")
    parts = module.split(".", 3)
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{NAMES[parts[3]]}.{ending}"
    return f"{NAMES[module]}.{ending}"


def metadata_of(shape: Llama) -> dict[str, Any]:
    """Returns metadata of the size that a file of Llama 3 has."""
    tokens = [f"token{number}" for number in range(shape.vocabulary)]
    return {
        "general.architecture": "llama",
        "llama.block_count": shape.layers,
        "llama.context_length": 8192,
        "llama.embedding_length": shape.hidden,
        "llama.feed_forward_length": shape.intermediate,
        "llama.attention.head_count": shape.hidden // 128,
        "llama.attention.head_count_kv": shape.key_value // 128,
        "llama.rope.freq_base": 500000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [f"to ken{number}" for number in range(MERGES)],
        "tokenizer.ggml.bos_token_id": 0,
    }


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


def value(found: Any) -> bytes:
    """Returns a value of the metadata with its type."""
    if isinstance(found, int):
        return struct.pack("<II", 4, found)
    if isinstance(found, float):
        return struct.pack("<If", 6, found)
    if isinstance(found, str):
        return struct.pack("<I", 8) + text(found)
    return struct.pack("<I", 9) + b"".join(elements(found))


def elements(array: list[Any]) -> Iterator[bytes]:
    yield value(array[0])[:4]
    yield struct.pack("<Q", len(array))
    for element in array:
        yield value(element)[4:]


def stored_bytes(sizes: tuple[int, ...], block_type: str) -> int:
    _, values, size = BY_NAME[block_type]
    return torch.Size(sizes).numel() // values * size


def random_blocks(sizes: tuple[int, ...], block_type: str) -> bytes:
    """Returns ones, or random blocks whose scales are small and finite."""
    if block_type == "F32":
        return torch.ones(sizes).numpy().tobytes()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if block_type in PLAIN:
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[block_type]
        values = torch.randn(sizes, dtype=dtype, device=device)
        return values.view(torch.uint8).cpu().numpy().tobytes()
    shape = (stored_bytes(sizes, block_type) // BY_NAME[block_type].size, BY_NAME[block_type].size)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    scale = torch.tensor([0.01], dtype=torch.float16, device=device).view(torch.uint8)
    for place in SCALES.get(block_type, (0,)):
        blocks[:, place : place + 2] = scale
    return blocks.cpu().numpy().tobytes()
