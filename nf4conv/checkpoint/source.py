"""A folder or a single file → its config and the headers of all its tensors. No tensor data is read here.

Weights are safetensors, or torch pickles where there are none. What another quantization encoded is presented as the
float tensors that it stands for (encoded.py).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from nf4conv.checkpoint.config import checkpoint_dtype
from nf4conv.checkpoint.encoded import decoded_tensors
from nf4conv.checkpoint.header import TensorInfo, read_header
from nf4conv.checkpoint.pickle_header import read_pickle_header
from nf4conv.errors import SourceError

STEMS: Final = ("model", "diffusion_pytorch_model")
"""Base names of weight files: transformers', diffusers'."""

_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt")
_PICKLE_STEMS: Final = ("pytorch_model", "diffusion_pytorch_model")


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be read.

    Attributes:
        folder: where its files are.
        files: the weight files, in order of name.
        tensors: every tensor, in the order of files and of bytes within a file.
        config: the content of config.json; None when there is none.
        stem: base name of the weight files: "model", or what the source calls them.
        notes: what the user should know about it.
    """

    folder: Path
    files: tuple[Path, ...]
    tensors: tuple[TensorInfo, ...]
    config: Mapping[str, Any] | None
    stem: str
    notes: tuple[str, ...] = ()


def open_source(path: Path) -> Source:
    """Open a checkpoint: a folder with safetensors or pickled weights, sharded or not, or one such file.

    Raises:
        SourceError: it is missing, empty, truncated, or contradicts itself; the message names file and tensor.
    """
    try:
        if path.is_file():
            return _open_file(path)
        if not path.is_dir():
            raise SourceError(f"{path}: no such file or folder")
        return _open_folder(path)
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise SourceError(f"{error.filename or path}: {error.strerror or error}") from error


def _open_folder(path: Path) -> Source:
    files, weight_map = _find_weights(path)
    stored = _read_headers(files)
    if weight_map is not None:
        _check_index(path, weight_map, stored)
    stem = next((stem for stem in STEMS if files[0].name.startswith(stem)), STEMS[0])
    return _decoded(path, files, stored, stem)


def _decoded(folder: Path, files: tuple[Path, ...], stored: tuple[TensorInfo, ...], stem: str) -> Source:
    """A source whose encoded tensors are presented as what they are decoded to."""
    config = _read_config(folder)
    exported = folder / "hf_quant_config.json"
    dtype = "F16" if checkpoint_dtype(config or {}) == "float16" else "BF16"
    try:
        tensors, notes = decoded_tensors(
            stored, config or {}, read_json(exported) if exported.is_file() else {}, dtype, _read_tensor
        )
    except SourceError as error:
        raise SourceError(str(error) if str(error).startswith(str(folder)) else f"{folder}: {error}") from error
    return Source(folder, files, tensors, config, stem, notes)


def _read_tensor(tensor: TensorInfo) -> bytes:
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.start)
            return file.read(tensor.nbytes)
    except OSError as error:
        raise SourceError(f"{tensor.file}: {error.strerror or error}") from error


def _open_file(path: Path) -> Source:
    if path.suffix not in (".safetensors", *_PICKLE_SUFFIXES):
        raise SourceError(f"{path}: neither a .safetensors file nor a torch pickle")
    folder = path.parent
    for index in sorted(folder.glob("*.index.json")):
        if path.name in _read_weight_map(index).values():
            raise SourceError(f"{path}: one shard of those that {index.name} lists; give the folder")
    return _decoded(folder, (path,), _read_headers((path,)), STEMS[0])


def _find_weights(folder: Path) -> tuple[tuple[Path, ...], Mapping[str, str] | None]:
    named = next(_weights_named(folder, STEMS, "safetensors"), None)
    if named is not None:
        return named
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return (found[0],), None
    if found:
        raise SourceError(
            f"{folder}: {len(found)} safetensors files, but neither model.safetensors nor an index that names them"
        )
    named = next(_weights_named(folder, _PICKLE_STEMS, "bin"), None)
    if named is None:
        raise SourceError(f"{folder}: neither safetensors weights nor a pytorch_model.bin in it{_what_else(folder)}")
    return named


def _weights_named(
    folder: Path, stems: Iterable[str], suffix: str
) -> Iterator[tuple[tuple[Path, ...], Mapping[str, str] | None]]:
    """Weights under the names that loaders look for, in their order: a single file wins over an index beside it."""
    for stem in stems:
        single = folder / f"{stem}.{suffix}"
        if single.is_file():
            yield (single,), None
        index = folder / f"{stem}.{suffix}.index.json"
        if index.is_file():
            weight_map = _read_weight_map(index)
            yield tuple(folder / name for name in sorted(set(weight_map.values()))), weight_map


def _what_else(folder: Path) -> str:
    for pattern, hint in (
        ("*.gguf", "GGUF files"),
        ("*/model*.safetensors", "sub-folders"),
    ):
        if any(folder.glob(pattern)):
            return f"; it has {hint}, which are not read"
    return ""


def _read_weight_map(index: Path) -> Mapping[str, str]:
    table = read_json(index)
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index}: has no weight_map")
    for name, file in weight_map.items():
        relative = PurePosixPath(file) if isinstance(file, str) else PurePosixPath("..")
        if relative.is_absolute() or ".." in relative.parts or "\\" in str(file):
            raise SourceError(f"{index}: {name}: {file!r} is outside the folder")
        if not (index.parent / relative).is_file():
            raise SourceError(f"{index}: {name}: the shard {file} is missing; the download is incomplete")
    return weight_map


def _read_headers(files: tuple[Path, ...]) -> tuple[TensorInfo, ...]:
    seen: dict[str, TensorInfo] = {}
    for file in files:
        for tensor in read_header(file) if file.suffix == ".safetensors" else read_pickle_header(file):
            if tensor.name in seen:
                raise SourceError(f"{file}: {tensor.name}: also in {seen[tensor.name].file.name}")
            seen[tensor.name] = tensor
    if not seen:
        raise SourceError(f"{', '.join(str(file) for file in files)}: no tensors")
    return tuple(seen.values())


def _check_index(folder: Path, weight_map: Mapping[str, str], tensors: tuple[TensorInfo, ...]) -> None:
    held_in = {tensor.name: tensor.file for tensor in tensors}
    for name, file in weight_map.items():
        if held_in.get(name) != folder / file:
            raise SourceError(f"{folder / file}: {name}: the index places this tensor here, but the file lacks it")


def _read_config(folder: Path) -> Mapping[str, Any] | None:
    path = folder / "config.json"
    return read_json(path) if path.is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        SourceError: unreadable, or not a JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise SourceError(f"{path}: not a JSON object")
    return content
