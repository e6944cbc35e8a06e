"""Tells the files of a checkpoint's folder apart: its own, the weights, and what stands beside.

Weights are found by the names and in the order in which loaders look. Of the other files those at
the top are copied unless they are known not to belong to the model, such as its tokenizer; of those
in sub-folders, those that loaders look for.

A folder may come from a stranger, and a link in it may lead to /etc or /proc. nf4conv follows only
two kinds of links: those that stay inside the folder that the user named, and those to blobs of the
Hub's cache, of which a snapshot consists: CACHE/models--org--name/snapshots/COMMIT/config.json →
CACHE/models--org--name/blobs/HASH.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from nf4conv.errors import DiffusersFolderError, SourceError
from nf4conv.sources.reader import read_json

STEMS: Final = ("model", "diffusion_pytorch_model")
"""Base names of weight files: those of transformers and of diffusers."""

MODEL_INDEX: Final = "model_index.json"
"""The file that makes a folder a diffusers pipeline.

Weight files beside it hold all its parts in another format.
"""

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
"""Files in which PEFT saves the weights of an adapter, which is no model."""

_LARGEST_INDEX: Final = 2**26  # bytes, of the index of a million tensors

PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt")

LOADED_SUFFIXES: Final = (".safetensors", ".bin")
"""Suffixes of the weights that transformers and diffusers look for."""

SUFFIXES_OF_OTHERS: Final = (".gguf", ".onnx", ".msgpack", ".h5", ".pt", ".pth", ".ckpt")
"""Suffixes of files in which other programs keep the weights of a whole model."""

WEIGHT_SUFFIXES: Final = (
    *LOADED_SUFFIXES, *SUFFIXES_OF_OTHERS,
    ".ggml", ".ot", ".tflite", ".mlmodel", ".npz", ".npy", ".pkl", ".joblib",
)  # fmt: skip
"""Suffixes of all files with weights, none of which is copied."""

MARKS_OF_MODELS: Final = ("config.json", MODEL_INDEX)
"""Files by which loaders recognise a model; a run writes them when everything else is there."""

_PART: Final = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
_PICKLE_STEMS: Final = ("pytorch_model", "diffusion_pytorch_model")


# --- weights --------------------------------------------------------------------------------------


class WeightFile(NamedTuple):
    """The file to begin with."""

    name: str  # of the only weight file, or of the index of several
    is_index: bool  # True for an index
    stem: str  # "model" or "diffusion_pytorch_model": what the output is called


def find_weights(names: Collection[str], variant: str | None, where: object) -> WeightFile:
    """Finds the weights among the files of a folder, whose `variant` is a word in their names.

    Safetensors are preferred to pickles, and a single file to an index. Raises a
    DiffusersFolderError for the folder of a pipeline; `where` names the folder.
    """
    if MODEL_INDEX in names:
        raise DiffusersFolderError(
            f"{where}: it is a diffusers pipeline, whose parts are taken one by one: --subfolder "
            f"transformer"
        )
    found = next(_named(names, STEMS, "safetensors", variant), None)
    if found is not None:
        return found
    pickled = next(_named(names, _PICKLE_STEMS, "bin", variant), None)
    if ADAPTER_CONFIG in names and pickled is None:
        raise no_model(where)
    loose = sorted(name for name in names if name.endswith(".safetensors"))
    if variant is None and len(loose) == 1:
        return WeightFile(loose[0], False, STEMS[0])
    if variant is None and loose:
        raise SourceError(
            f"{where}: {len(loose)} safetensors files, but neither model.safetensors nor an index "
            f"that names them"
        )
    if pickled is None:
        kind = "" if variant is None else f" of the variant {variant}"
        has_gguf = any(name.endswith(".gguf") for name in names)
        hint = "; it has GGUF files: name one, --gguf-file NAME" if has_gguf else ""
        raise SourceError(
            f"{where}: neither safetensors weights nor a pytorch_model.bin{kind} in it{hint}"
        )
    return pickled


def no_model(adapter: object) -> SourceError:
    """Returns the error of an adapter in the place of a model."""
    return SourceError(
        f"{adapter}: an adapter, not a model; to merge it: nf4conv quantize BASE OUT --lora "
        f"{adapter}"
    )


def _named(
    names: Collection[str], stems: Collection[str], suffix: str, variant: str | None
) -> Iterator[WeightFile]:
    """Yields the weight files that loaders look for, the preferred one first."""
    infix = "" if variant is None else f".{variant}"
    for stem in stems:
        called = stem if stem in STEMS else STEMS[0]
        single = f"{stem}{infix}.{suffix}"
        if single in names:
            yield WeightFile(single, False, called)
        index = f"{stem}.{suffix}.index{infix}.json"
        if index in names:
            yield WeightFile(index, True, called)
        of_older_diffusers = f"{stem}.{suffix}{infix}.index.json"
        if of_older_diffusers != index and of_older_diffusers in names:
            yield WeightFile(of_older_diffusers, True, called)


def read_index(index: Path) -> dict[str, Any]:
    """Returns the content of the index of a sharded checkpoint, whose weight_map tells which file
    holds each tensor; raises a SourceError if that is malformed, or names a file outside the
    folder.
    """
    content = read_json(index, _LARGEST_INDEX)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index}: has no weight_map", path=index)
    known: set[str] = set()
    for name, file in weight_map.items():
        if isinstance(file, str) and file in known:
            continue
        path = PurePosixPath(str(file))
        is_out = path.is_absolute() or ".." in path.parts or "\\" in str(file)
        if is_out or not isinstance(file, str):
            raise SourceError.about(index, name, f"{file!r} is outside the folder")
        known.add(file)
    return content


def split_names(name: str) -> list[str]:
    """Returns the names of all files of a split GGUF file, by that of one; or the only one."""
    match = _PART.fullmatch(name)
    if match is None or int(match["count"]) == 0:
        return [name]
    numbers = range(1, int(match["count"]) + 1)
    return [f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in numbers]


# --- files beside the weights ---------------------------------------------------------------------

QUANTIZATION_LEFTOVERS: Final = (
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "recipe.yaml",
    "quantization_config.json",  # of AutoRound, which vLLM reads
    "quant_model_description.json",  # of ModelSlim, by which SGLang and vLLM on Ascend know it
)
"""Files by which loaders recognise another quantization method.

They must not survive into our output.
"""

_NO_WEIGHTS: Final = ("spk_dict.pt",)
"""Data of a model that looks like weights: the voices of Qwen 2.5 Omni, without which it does not
load.
"""

_LEFT_OUT: Final = (
    *QUANTIZATION_LEFTOVERS,
    *("config.json", "README.md", "SHA256SUMS", "nf4conv.json"),  # written anew
    *("trainer_state.json", "zero_to_fp32.py"),  # other files of training have weights' suffixes
    "params.json",  # describes consolidated weights, which are not copied either
)

_FOREIGN_FOLDERS: Final = (
    "original", "metal", "onnx", "openvino", "consolidated", "runs", "coreml",
)  # fmt: skip
"""Folders with the model in another format, or with logs; their Python code is not copied."""

_TEMPLATES: Final = "additional_chat_templates"

_MODULE: Final = re.compile(r"\d+_\w+")
"""Names of the folders of sentence-transformers' modules, such as 1_Pooling, beside modules.json.

Some of them hold small weights of their own.
"""


def auxiliary_names(names: Collection[str]) -> tuple[PurePosixPath, ...]:
    """Chooses the files that are copied as they are from a listing of a checkpoint's folder. They
    are sorted.
    """
    has_modules = "modules.json" in names
    chosen = []
    for name in names:
        path = PurePosixPath(name)
        if len(path.parts) == 1:
            is_chosen = _is_chosen_at_top(path)
        else:
            is_chosen = _is_chosen_below(path, has_modules=has_modules)
        if is_chosen:
            chosen.append(path)
    return tuple(sorted(chosen))


def _is_chosen_at_top(path: PurePosixPath) -> bool:
    if path.name.startswith(".") or path.name in _LEFT_OUT:
        return False
    if path.suffix in WEIGHT_SUFFIXES:
        return path.name in _NO_WEIGHTS
    is_index = ".index." in path.name and path.suffix == ".json"
    return not is_index


def _is_chosen_below(path: PurePosixPath, *, has_modules: bool) -> bool:
    """Returns True for a file in a sub-folder that loaders look for."""
    top, *_ = folders = path.parts[:-1]
    if any(folder.startswith(".") or folder == "__pycache__" for folder in folders):
        return False
    if top == _TEMPLATES or (has_modules and _MODULE.fullmatch(top)):
        return True
    return path.suffix == ".py" and top not in _FOREIGN_FOLDERS


# --- files of the folder itself, and links --------------------------------------------------------


def require_own(path: Path, root: Path) -> Path:
    """Returns the path of a file; raises a SourceError for one that a link makes appear in `root`,
    the folder that the user named, and that does not belong to it.
    """
    if path.parent == root and not path.is_symlink():
        return path
    target = path.resolve()
    top = root.resolve()
    around = {target, *target.parents}
    is_cached = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    if top in around or is_cached or any(parent / "blobs" in around for parent in top.parents):
        return path
    raise SourceError(
        f"{path}: a link that leads out of {root}, to {target}; put the file itself there",
        path=path,
    )


def files_below(folder: Path) -> list[str]:
    """Lists the regular files below a folder, and links to such, relative to it."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
