"""Writes small GGUF files, good ones and bad ones, without the package `gguf`."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nf4conv.format.gguf import BY_NAME, PLAIN

SCALES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": (),
    "NVFP4": (),
}  # fmt: skip
"""Where a block has numbers in half precision; those of other types have one at its beginning."""

ODD_HALVES = (0, 0x8000, 1, 0x3FF, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00)
"""0, -0, the smallest and largest subnormal, 1, the largest, minus that, infinities, NaN."""

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.dimension_count": 64,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.bos_token_id": 1,
}

SHAPES = {
    "token_embd.weight": (64, 256),
    "blk.0.attn_norm.weight": (256,),
    "blk.0.attn_q.weight": (256, 256),
    "blk.0.attn_k.weight": (128, 256),
    "blk.0.attn_v.weight": (128, 256),
    "blk.0.attn_output.weight": (256, 256),
    "blk.0.ffn_norm.weight": (256,),
    "blk.0.ffn_gate.weight": (512, 256),
    "blk.0.ffn_up.weight": (512, 256),
    "blk.0.ffn_down.weight": (256, 512),
    "output_norm.weight": (256,),
    "output.weight": (64, 256),
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(found: Any) -> bytes:
    """A value of the metadata with its type."""
    if isinstance(found, bool):
        return struct.pack("<IB", 7, found)
    if isinstance(found, int):
        if -(2**31) <= found < 2**31:
            return struct.pack("<Ii", 5, found)
        return struct.pack("<IQ", 10, found)
    if isinstance(found, float):
        return struct.pack("<If", 6, found)
    if isinstance(found, str):
        return struct.pack("<I", 8) + text(found)
    first = value(found[0] if found else 0)
    return (
        struct.pack("<I", 9)
        + first[:4]
        + struct.pack("<Q", len(found))
        + b"".join(value(one)[4:] for one in found)
    )


def stored(shape: tuple[int, ...], block_type: str, generator: torch.Generator) -> bytes:
    """Random values, or blocks of them with small scales."""
    if block_type in PLAIN:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[block_type]
        values = torch.randn(shape, generator=generator).to(dtype)
        return values.contiguous().view(torch.uint8).numpy().tobytes()
    _, _, count, size = BY_NAME[block_type]
    blocks = torch.randint(0, 256, (torch.Size(shape).numel() // count, size), generator=generator)
    blocks = blocks.to(torch.uint8)
    scale = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    for place in SCALES.get(block_type, (0,)):
        blocks[:, place : place + 2] = scale
    if block_type == "MXFP4":
        blocks[:, 0] = 120
    if block_type == "IQ1_M":  # the highest 4 bits of its words are a scale
        blocks[:, 49::2] &= 0x1F
    return blocks.numpy().tobytes()


def blocks_of(block_type: str, rows: int, blocks: int) -> torch.Tensor:
    """Bytes of any value; in the first row, every kind of scale.

    Returns:
        [rows, bytes] uint8.
    """
    size = BY_NAME[block_type].size
    generator = torch.Generator().manual_seed(size)
    found = torch.randint(0, 256, (rows, blocks, size), dtype=torch.uint8, generator=generator)
    odd = torch.tensor(ODD_HALVES, dtype=torch.int32).to(torch.int16).view(torch.uint8)
    pairs = odd.view(-1, 2).repeat(-(-blocks // len(ODD_HALVES)), 1)[:blocks]
    for place in SCALES.get(block_type, (0,)):
        found[0, :, place : place + 2] = pairs
    if block_type == "MXFP4":
        found.view(-1, size)[:256, 0] = torch.arange(256, dtype=torch.uint8)[: rows * blocks]
    if block_type == "NVFP4":
        scales = torch.arange(256, dtype=torch.uint8).view(-1, 4)
        found.view(-1, size)[:64, :4] = scales[: rows * blocks]
    return found.view(rows, -1)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any] | None = None,
    types: Mapping[str, str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    default: str = "BF16",
    claimed: Mapping[str, tuple[int, ...]] | None = None,
    are_alike: bool = False,
) -> Path:
    """Writes a file; vectors are F32 as llama.cpp has them, matrices of the type given.

    Shapes may be claimed that are not those of the data. Tensors of a shape may be alike, which
    makes large files quickly.
    """
    metadata = LLAMA if metadata is None else metadata
    shapes = SHAPES if shapes is None else shapes
    generator = torch.Generator().manual_seed(0)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(metadata))
    for key, found in metadata.items():
        head += text(key) + value(found)
    made: dict[tuple[int, ...], bytes] = {}
    data = []
    place = 0
    for name, shape in shapes.items():
        block_type = (types or {}).get(name, default) if len(shape) > 1 else "F32"
        sizes = (claimed or {}).get(name, shape)
        head += text(name) + struct.pack("<I", len(sizes))
        head += struct.pack(f"<{len(sizes)}Q", *reversed(sizes))
        head += struct.pack("<IQ", BY_NAME[block_type].number, place)
        if shape not in made or not are_alike:
            content = stored(shape, block_type, generator)
            made[shape] = content + b"\0" * (-len(content) % 32)
        data.append(made[shape])
        place += len(made[shape])
    with path.open("wb") as file:
        file.writelines([head + b"\0" * (-len(head) % 32), *data])
    return path
