"""Keeps digests of what commit cd7b292 writes: frozen.json beside this file.

    PYTHONPATH=. python tests/golden/frozen.py    in a worktree whose package is that of cd7b292

The digests are never made anew. tests/test_frozen.py holds the package against them, and has the
list of the intended differences.
"""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from inputs import BLOCKS, ENCODED, FAMILIES, SOURCES

import nf4conv

FROZEN = Path(__file__).with_name("frozen.json")
RECORD = "nf4conv.json"


class Case(NamedTuple):
    """A command: "quantize" or "dequantize", the name of a source or of a case, and options.

    The adapters among the options are names of sources.
    """

    command: str
    source: str
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        words = [f"{key}={value}" for key, value in self.options.items()]
        return f"{self.command} {self.source}: {', '.join(words)}"


QUANTIZE: dict[str, tuple[dict[str, Any], ...]] = {
    "plain": (
        {},
        {"quant_type": "fp4"},
        {"double_quant": False},
        *({"blocksize": 32 * 2**power} for power in (0, 2, 4, 7)),
        {"quant_type": "fp4", "blocksize": 256, "double_quant": False},
        {"quant_storage": "bfloat16"},
        {"quant_storage": "float32", "double_quant": False},
        {"dtype": "float16"},
        {"dtype": "float32"},
        {"compute_dtype": "float16"},
        {"scales": "search"},
        {"scales": "search", "quant_type": "fp4", "blocksize": 128},
        {"scales": "search", "double_quant": False, "dtype": "float16"},
        {"max_shard_size": 60_000},
        {"max_shard_size": 100_000, "quant_storage": "float16"},
        {"include": ("*.mlp.*", "lm_head.weight")},
        {"exclude": ("*.layers.1.*", "*k_proj*")},
        {"base_model": "somebody/model"},
        {"verify": True},
    ),
    "float16": ({}, {"dtype": "bfloat16"}, {"scales": "search"}, {"quant_type": "fp4"}),
    "float32": ({}, {"dtype": "bfloat16"}, {"scales": "search"}, {"quant_type": "fp4"}),
    "odd": ({}, {"double_quant": False, "blocksize": 32}, {"scales": "search"}),
    "gpt2": ({},),
    "vision": ({},),
    "bert": ({},),
    "pickle": ({},),
    "pickles": ({},),
    **dict.fromkeys(
        ("nf4", "fp4", "fsdp", "two block sizes"),
        (
            {},
            {"quant_type": "nf4"},
            {"quant_type": "fp4"},
            {"blocksize": 64},
            {"blocksize": 128},
            {"double_quant": True},
            {"double_quant": False},
            {"quant_storage": "uint8"},
            {"quant_storage": "bfloat16"},
            {"dtype": "float16"},
            {"exclude": ("*.layers.0.*",)},
            {"max_shard_size": 40_000},
        ),
    ),
    "deepseek-v4": ({}, {"moe": "packed"}, {"moe": "portable"}),
    "kimi": ({}, {"moe": "packed"}, {"moe": "portable"}),
    **dict.fromkeys(
        ("qwen3_moe", "mixtral", "granite", "llama4", "gpt-oss"),
        ({}, {"moe": "packed"}, {"moe": "portable"}, {"moe": "packed", "scales": "search"}),
    ),
    "coarse": ({"lora": ("adapter",)}, {"lora": ("dora",)}, {"lora": ("adapter", "dora")}),
    "coarse mixture": ({"lora": ("adapter of experts",), "moe": "packed"},),
    "pipeline": ({}, {"quant_type": "fp4", "max_shard_size": 10_000}),
    **dict.fromkeys(ENCODED, ({},)),
    "gguf Q4_0": ({},),
    "gguf Q6_K": ({"scales": "search"},),
    **{f"gguf {family}": ({},) for family in FAMILIES},
}
DEQUANTIZE: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(
        ("nf4", "fp4", "fsdp", "two block sizes"),
        ({}, {"dtype": "float16"}, {"dtype": "float32"}, {"max_shard_size": 100_000}),
    ),
    "coarse": ({"lora": ("adapter",)},),
    "coarse mixture": ({"lora": ("adapter of experts",)},),
    **dict.fromkeys(ENCODED, ({}, {"dtype": "float32"})),
    "deepseek-v4": ({}, {"dtype": "float32"}),
    "kimi": ({}, {"dtype": "float16"}),
    "gpt-oss": ({}, {"dtype": "float32"}),
    **{f"gguf {name}": ({},) for name in (*BLOCKS, *FAMILIES)},
    "gguf Q4_K": ({}, {"dtype": "float32"}, {"dtype": "float16"}),
}
# what is made of the result of a case
CHAINED = (
    Case("quantize", "plain", {}),
    Case("quantize", "plain", {"scales": "search"}),
    Case("quantize", "plain", {"quant_storage": "bfloat16"}),
    Case("quantize", "qwen3_moe", {"moe": "packed"}),
    Case("quantize", "gpt-oss", {"moe": "packed"}),
    Case("quantize", "granite", {"moe": "packed"}),
    Case("quantize", "pipeline", {}),
)
NEXT = (
    ("quantize", {}),
    ("quantize", {"blocksize": 128}),
    ("dequantize", {}),
)


def _cases() -> list[Case]:
    found = [Case("quantize", name, each) for name in QUANTIZE for each in QUANTIZE[name]]
    found += [Case("dequantize", name, each) for name in DEQUANTIZE for each in DEQUANTIZE[name]]
    for first in CHAINED:
        found += [Case(command, first.name, options) for command, options in NEXT]
    return found


CASES = {case.name: case for case in _cases()}


class Workshop:
    """Makes sources and outputs below a folder, each of them once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, Path] = {}

    def source(self, name: str) -> Path:
        if name not in self._places:
            self._places[name] = self.folder / name.replace(" ", "-")
            SOURCES[name](self._places[name])
        return self._places[name]

    def output(self, name: str) -> Path:
        """Returns the folder that a case writes."""
        if name not in self._places:
            case = CASES[name]
            out = self.folder / digest(name.encode()) / "model"
            out.parent.mkdir()
            options = dict(case.options)
            if "lora" in options:
                options["lora"] = tuple(str(self.source(lora)) for lora in options["lora"])
            find = self.output if case.source in CASES else self.source
            convert = getattr(nf4conv, case.command)
            convert(_weights_of(find(case.source)), out, device="cpu", workers=2, **options)
            self._places[name] = out
        return self._places[name]


def _weights_of(source: Path) -> str:
    file = source / "model.gguf"
    return str(file if file.exists() else source)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digests(folder: Path) -> dict[str, Any]:
    """Returns a digest of every file of a folder by its path, of nf4conv.json one a key.

    The options in nf4conv.json stand as they are, without those that are off.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        if path.name == RECORD:
            found |= {f"{name}: {key}": part for key, part in _of_record(path).items()}
        else:
            found[name] = digest(path.read_bytes())
    return found


def _of_record(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_text())
    found = {}
    for key, value in record.items():
        if key == "options":
            found[key] = {name: one for name, one in value.items() if one not in (None, False, [])}
        elif key != "version":
            found[key] = digest(json.dumps(value).encode())
    return found


@cache
def frozen() -> dict[str, Any]:
    """Returns the digests: "sources" and "outputs", each by name and file."""
    found: dict[str, Any] = json.loads(FROZEN.read_text())
    return found


def main() -> None:
    if FROZEN.exists():
        raise SystemExit(f"{FROZEN} exists, and is never made anew")
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder))
        outputs = {name: digests(workshop.output(name)) for name in CASES}
        sources = {name: digests(workshop.source(name)) for name in SOURCES}
    FROZEN.write_text(json.dumps({"sources": sources, "outputs": outputs}, indent=0) + "\n")


if __name__ == "__main__":
    main()
