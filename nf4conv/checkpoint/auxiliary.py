"""The files beside the weights that a loader needs: tokenizer, chat template, remote code, further modules.

Top-level files are copied unless they are known not to belong; of sub-folders only what loaders look for.
"""

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

WEIGHT_SUFFIXES: Final = frozenset(
    f".{suffix}"
    for suffix in (
        *("safetensors", "bin", "pt", "pth", "ckpt", "gguf", "ggml", "onnx", "h5", "msgpack", "ot", "tflite"),
        *("mlmodel", "npz", "npy", "pkl", "joblib"),
    )
)
QUANTIZATION_LEFTOVERS: Final = frozenset(
    ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "recipe.yaml")
)
"""Files by which loaders recognise another quantization method; they must not survive into our output."""

_REWRITTEN: Final = frozenset(("config.json", "README.md", "SHA256SUMS"))
_FOREIGN_FOLDERS: Final = frozenset(("original", "metal", "onnx", "openvino", "consolidated", "runs", "coreml"))


def auxiliary_files(folder: Path) -> tuple[PurePosixPath, ...]:
    """The files of a checkpoint folder that are copied as they are, relative to it, sorted."""
    top = {PurePosixPath(path.name) for path in folder.iterdir() if path.is_file() and _belongs(path)}
    return tuple(sorted(top | set(_from_subfolders(folder))))


def _belongs(path: Path) -> bool:
    return not (
        path.name.startswith(".")
        or path.name in _REWRITTEN
        or path.name in QUANTIZATION_LEFTOVERS
        or path.suffix in WEIGHT_SUFFIXES
        or path.name.endswith(".index.json")
        or path.name == "params.json"  # goes with consolidated weights, which are not copied either
    )


def _from_subfolders(folder: Path) -> Iterator[PurePosixPath]:
    modules = _module_folders(folder)
    for path in folder.rglob("*"):
        relative = PurePosixPath(path.relative_to(folder).as_posix())
        parents = relative.parts[:-1]
        if not parents or not path.is_file() or any(part.startswith(".") or part == "__pycache__" for part in parents):
            continue
        top = parents[0]
        if top in modules or (
            top not in _FOREIGN_FOLDERS and (path.suffix == ".py" or top == "additional_chat_templates")
        ):
            yield relative


def _module_folders(folder: Path) -> frozenset[str]:
    """Folders of sentence-transformers modules such as 1_Pooling; some of them hold small weights of their own."""
    try:
        modules = json.loads((folder / "modules.json").read_bytes())
        paths = [PurePosixPath(module["path"]) for module in modules]
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return frozenset()
    return frozenset(
        path.parts[0] for path in paths if path.parts and ".." not in path.parts and not path.is_absolute()
    )
