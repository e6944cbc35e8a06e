"""A GGUF file with a vocabulary of 128,256 tokens takes no more than 100 MB beside buffer_size.

That is compared with a checkpoint of one small weight, for which the same libraries are loaded. The
cache is empty, so that the tokenizer is made meanwhile.
"""

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf_files import LLAMA, text, value
from test_memory import LIVE, PROGRAM, write_source

from nf4conv.format.gguf import BY_NAME

TOKENS = 128_256
MERGES = 280_147  # those of Llama 3
SHAPES = {f"blk.{layer}.ffn_up.weight": (4096, 4096) for layer in range(4)}
METADATA: dict[str, Any] = {
    **LLAMA,
    "llama.block_count": 4,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [f"token{number}" for number in range(TOKENS)],
    "tokenizer.ggml.token_type": [1] * TOKENS,
    "tokenizer.ggml.merges": [f"to ken{number}" for number in range(MERGES)],
}


def write_zeros(path: Path, head: bytes, block_type: str) -> Path:
    """A file whose blocks are zero, which take no room on the disk."""
    _, _, values, size = BY_NAME[block_type]
    place = 0
    for name, shape in SHAPES.items():
        head += text(name) + struct.pack("<IQQ", 2, *reversed(shape))
        head += struct.pack("<IQ", BY_NAME[block_type].number, place)
        place += math.prod(shape) // values * size
    head += bytes(-len(head) % 32)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + place)
    return path


@pytest.fixture(scope="module")
def head() -> bytes:
    content = b"GGUF" + struct.pack("<IQQ", 3, len(SHAPES), len(METADATA))
    return content + b"".join(text(key) + value(found) for key, found in METADATA.items())


@pytest.mark.parametrize(
    ("command", "block_type", "megabytes"),
    [("quantize", "Q6_K", 8), ("dequantize", "Q4_K", 8)],
)
def test_a_gguf_file_takes_little_more_than_its_buffers(
    tmp_path: Path, head: bytes, command: str, block_type: str, megabytes: int
):
    small = write_source(tmp_path / "small", 1)
    path = write_zeros(tmp_path / "model.gguf", head, block_type)
    few = {"workers": 1, "buffer_size": 10**6}
    calls = [
        ("quantize", [small, tmp_path / "packed"], few),
        (command, [path, tmp_path / "out"], {"workers": 2, "buffer_size": megabytes * 10**6}),
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(calls, default=str)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **LIVE, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert (tmp_path / "out" / "tokenizer.json").stat().st_size > 8_000_000
    before, peak = json.loads(done.stdout.splitlines()[-1])
    growth = (peak - before) / 1e6
    print(f"{command} {block_type}: {growth:.0f} MB")
    assert growth < megabytes + 100
