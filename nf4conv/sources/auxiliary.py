"""Lists the files beside the weights that a loader needs: tokenizer, chat template, remote code.

Files at the top of a checkpoint are copied unless they are known not to belong to it. From its
sub-folders only those are copied that loaders look for.
"""

import json
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from nf4conv.sources.own_files import own_files

WEIGHT_SUFFIXES: Final = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".h5", ".msgpack",
    ".ot", ".tflite", ".mlmodel", ".npz", ".npy", ".pkl", ".joblib",
)  # fmt: skip
"""Suffixes of files with weights, in any format."""

QUANTIZATION_LEFTOVERS: Final = (
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "recipe.yaml",
)
"""Files by which loaders recognise another quantization method.

They must not survive into our output.
"""

_NO_WEIGHTS: Final = ("spk_dict.pt",)
"""Data of a model that looks like weights: the voices of Qwen 2.5 Omni, without which it does not
load.
"""

_WRITTEN_ANEW: Final = ("config.json", "README.md", "SHA256SUMS", "nf4conv.json")

# optimizer.pt, training_args.bin and the like have suffixes of weights
_FOR_TRAINING: Final = ("trainer_state.json", "zero_to_fp32.py")

# describes consolidated weights, which are not copied either
_OF_CONSOLIDATED: Final = ("params.json",)

_LEFT_OUT: Final = frozenset(
    (*QUANTIZATION_LEFTOVERS, *_WRITTEN_ANEW, *_FOR_TRAINING, *_OF_CONSOLIDATED)
)

_FOREIGN_FOLDERS: Final = (
    "original", "metal", "onnx", "openvino", "consolidated", "runs", "coreml",
)  # fmt: skip
"""Folders with the model in another format, or with logs; their Python code is not copied."""

_TEMPLATES: Final = "additional_chat_templates"

_MODULES: Final = "modules.json"  # lists the modules of sentence-transformers
_LARGEST_MODULES: Final = 2**20


def auxiliary_files(
    folder: Path, root: Path | None = None, *, strays: bool = False
) -> tuple[PurePosixPath, ...]:
    """Lists the files of a checkpoint folder that are copied as they are.

    Args:
        folder: the folder.
        root: the folder that it lies in, and that links may not lead out of; None for itself.
        strays: True to list the links that lead out of `root` and would be copied otherwise.

    Returns:
        Paths relative to the folder, sorted.
    """
    own, others = own_files(folder, root or folder)
    modules = None
    if _MODULES in own and (folder / _MODULES).stat().st_size <= _LARGEST_MODULES:
        modules = (folder / _MODULES).read_bytes()
    return auxiliary_names(others if strays else own, modules)


def auxiliary_names(names: Iterable[str], modules: bytes | None) -> tuple[PurePosixPath, ...]:
    """Chooses the files that are copied as they are from a listing of a checkpoint's folder.

    Args:
        names: the paths of all its files, relative to the folder.
        modules: the content of modules.json, if there is one.

    Returns:
        The paths of the chosen files, sorted.
    """
    folders = _module_folders(modules)
    chosen = []
    for name in names:
        path = PurePosixPath(name)
        if _is_chosen_below(path, folders) if len(path.parts) > 1 else _is_chosen_at_top(path):
            chosen.append(path)
    return tuple(sorted(chosen))


def _is_chosen_at_top(path: PurePosixPath) -> bool:
    if path.name.startswith(".") or path.name in _LEFT_OUT:
        return False
    if path.suffix in WEIGHT_SUFFIXES:
        return path.name in _NO_WEIGHTS
    is_index = ".index." in path.name and path.suffix == ".json"
    return not is_index


def _is_chosen_below(path: PurePosixPath, modules: frozenset[str]) -> bool:
    """Returns True for a file in a sub-folder that loaders look for.

    Args:
        path: relative to the checkpoint's folder.
        modules: the folders of sentence-transformers modules.
    """
    folders = path.parts[:-1]
    for folder in folders:
        if folder.startswith(".") or folder == "__pycache__":
            return False
    top = folders[0]
    if top in modules or top == _TEMPLATES:
        return True
    return path.suffix == ".py" and top not in _FOREIGN_FOLDERS


def _module_folders(description: bytes | None) -> frozenset[str]:
    """Returns the folders of sentence-transformers modules such as 1_Pooling.

    Some of them hold small weights of their own. What modules.json says is only compared with names
    that are found in the folder.
    """
    folders = set()
    try:
        for module in json.loads(description or b""):
            parts = PurePosixPath(module["path"]).parts
            if parts:
                folders.add(parts[0])
    except (ValueError, RecursionError, TypeError, KeyError):
        return frozenset()
    return frozenset(folders)
