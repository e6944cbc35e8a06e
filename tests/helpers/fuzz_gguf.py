"""Mutates GGUF files: bytes of their headers and data, and what their metadata and records say."""

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from fuzz_templates import Case, passes_verify
from gguf_files import LLAMA, SHAPES, write_gguf
from inputs import FAMILIES

FILES = {"llama": (LLAMA, SHAPES), **FAMILIES}
"""Metadata and shapes of files whose tensors are put together or taken apart in different ways."""

_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_1")
_STRANGE: tuple[Any, ...] = (
    0, 1, -1, 3, 2**16, 2**31 - 1, 2**40, 2**63, 0.0, -1.5, float("nan"), float("inf"), True, "",
    "llama", "mamba", "x" * 5000, [], [0], [2**31 - 1], [1.5, float("inf")], ["a", "a"], [True] * 9,
)  # fmt: skip


def write_files(folder: Path) -> None:
    """Writes a file of each sort, a split one, and a folder with a config."""
    folder.mkdir(parents=True)
    for name, (metadata, shapes) in FILES.items():
        types = {tensor: _TYPES[number % 6] for number, tensor in enumerate(shapes)}
        write_gguf(folder / f"{name}.gguf", metadata, types, shapes)
    names = list(SHAPES)
    for number, part in ((1, names[:5]), (2, names[5:])):
        metadata = {**LLAMA, "split.count": 2, "split.tensors.count": len(SHAPES)}
        shapes = {name: SHAPES[name] for name in part}
        write_gguf(folder / f"split-0000{number}-of-00002.gguf", metadata, shapes=shapes)
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "float16"}')


def bytes_case(chosen: random.Random, whole: Path, work: Path) -> Case:
    """Changes bytes, mostly of the header, or cuts a file off."""
    source = work / "source"
    shutil.copytree(whole, source)
    path = chosen.choice(sorted(source.glob("*.gguf")))
    _change_bytes(chosen, path)
    return _command(chosen, path, work, whole)


def _change_bytes(chosen: random.Random, path: Path) -> None:
    """Changes bytes of a file, mostly of its header, or cuts it off."""
    content = bytearray(path.read_bytes())
    end = min(len(content), 3000) if chosen.random() < 0.8 else len(content)
    for _ in range(chosen.choice((1, 1, 2, 8))):
        place = chosen.randrange(end)
        size = chosen.choice((1, 2, 4, 8))
        numbers = (0, 2**32 - 1, 2**62, 10**9, 2**64 - 1, chosen.getrandbits(64))
        content[place : place + size] = chosen.choice(numbers).to_bytes(8, "little")[:size]
    if chosen.random() < 0.2:
        del content[chosen.randrange(len(content)) :]
    path.write_bytes(content)


def words_case(chosen: random.Random, whole: Path, work: Path) -> Case:
    """Writes a file whose metadata, names, types or shapes do not fit together."""
    (work / "source").mkdir()
    metadata, shapes = FILES[chosen.choice(sorted(FILES))]
    metadata, shapes = dict(metadata), dict(shapes)
    types = {tensor: _TYPES[number % 6] for number, tensor in enumerate(shapes)}
    claimed = {}
    for _ in range(chosen.choice((1, 1, 2, 4))):
        key = chosen.choice(sorted(metadata))
        name = chosen.choice(sorted(shapes))
        match chosen.randrange(7):
            case 0 | 1:
                metadata[key] = chosen.choice(_STRANGE)
            case 2:
                del metadata[key]
            case 3:
                del shapes[name]
            case 4:
                shapes[chosen.choice((f"{name}.x", "blk.1.attn_q.weight", "x"))] = shapes[name]
            case 5:
                sizes = list(shapes[name])
                sizes[chosen.randrange(len(sizes))] = chosen.choice((0, 1, 32, 2**16, 2**40))
                claimed[name] = tuple(sizes)
            case 6:
                claimed[name] = chosen.choice(((), (32,), (1, 2, 32), (0, 32), (2**33, 0, 32)))
    path = work / "source/model.gguf"
    write_gguf(path, metadata, types, shapes, claimed=claimed)
    return _command(chosen, path, work, whole)


def _command(chosen: random.Random, path: Path, work: Path, whole: Path) -> Case:
    """Runs any command on a file."""
    out = work / "out"
    more = ["--config-from", whole] if chosen.random() < 0.2 else []
    commands: list[list[object]] = [
        ["quantize", path, out, *more],
        ["quantize", path, out, "--verify", *more],
        ["quantize", path, out, "--dry-run", *more],
        ["dequantize", path, out, *more],
        ["dequantize", path, out, *more],
        ["inspect", path, *more],
        ["verify", path, "--source", whole / "llama.gguf", "--tolerance", "0.5"],
    ]
    words = chosen.choice(commands)
    return Case(words, out, partial(passes_verify, words, out))
