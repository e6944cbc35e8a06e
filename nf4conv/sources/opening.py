"""Opens a folder, a file or a repository of the Hub: reads its config and all tensors' headers.

No tensor data is read. Weights are safetensors, or torch pickles where there are none. Tensors that
another quantization encoded are presented as the float tensors they stand for (foreign/).
"""

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions
from nf4conv.sources.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PICKLE_SUFFIXES,
    STEMS,
    find_weights,
    no_model,
    read_index,
    require_own,
)
from nf4conv.sources.foreign.integers import Gptq
from nf4conv.sources.foreign.presenting import decoded_tensors
from nf4conv.sources.header import MOST_TENSORS, header_json, parse_header
from nf4conv.sources.pickle_header import read_pickle_header
from nf4conv.sources.places import from_address, is_repo_id
from nf4conv.sources.reader import Absent, bytes_of, each, read_json
from nf4conv.sources.source import Source, stamps_of
from nf4conv.sources.tensors import TensorInfo
from nf4conv.sources.unfinished import check_finished

if TYPE_CHECKING:
    from nf4conv.sources.remote.hub import Fetched

_log: Final = logging.getLogger(__name__)

_HINT: Final = "; models on the Hub are named org/name, such as openai-community/gpt2"


def open_source(source: str | Path, where: SourceOptions | None = None) -> Source:
    """Opens a checkpoint and presents its encoded tensors as the tensors that they decode to.

    It is a folder with safetensors or pickled weights, sharded or not; one such file; or "org/name"
    on the Hub, also as the address of its page. A path that exists wins over a name on the Hub.
    Raises a SourceError that names file and tensor.
    """
    return present_encoded(open_stored(source, where))


def present_encoded(opened: Source) -> Source:
    """Presents the encoded tensors of a checkpoint as the tensors that they decode to; raises an
    UndecodableError if nf4conv does not decode the method.
    """
    if opened.is_gguf:
        return opened  # its tensors already say how they are decoded
    exported = _exported(opened)
    try:
        tensors, notes = decoded_tensors(opened, exported)
    except SourceError as error:
        if str(error).startswith(str(opened.folder)):
            raise
        path = error.path or opened.folder
        raise type(error)(f"{opened.folder}: {error}", path=path, tensor=error.tensor) from error
    return replace(opened, tensors=tensors, notes=notes)


def _exported(opened: Source) -> Mapping[str, Any]:
    """Returns what a quantizer says of the checkpoint in a file of its own."""
    of_modelopt = opened.folder / "hf_quant_config.json"
    if of_modelopt.is_file():
        return read_json(require_own(of_modelopt, opened.root))
    if not any(tensor.name.endswith(Gptq.stored) for tensor in opened.tensors):
        return {}
    # releases of AutoGPTQ and AutoAWQ before transformers knew them
    for method, name in (("gptq", "quantize_config.json"), ("awq", "quant_config.json")):
        file = opened.folder / name
        if file.is_file():
            content = read_json(require_own(file, opened.root))
            return {"quantization": {"quant_method": method, **content}}
    return {}


def open_stored(source: str | Path, where: SourceOptions | None = None) -> Source:
    """Opens a checkpoint as `open_source` does, but takes its tensors as they are stored, encoded
    or not.
    """
    started = time.perf_counter()
    where = where or SourceOptions()
    source, where = from_address(str(source), where)
    opened = _open(source, where)
    _log.info(
        "opened %s: %d tensors in %d files, by their headers, in %.1f s",
        source,
        len(opened.tensors),
        len(opened.files),
        time.perf_counter() - started,
    )
    return opened


def _open(source: str, where: SourceOptions) -> Source:
    """Opens whatever is at a place: a file, a folder, or a repository of the Hub."""
    path = Path(source)
    try:
        if path.is_file():
            if path.suffix == ".gguf":
                from nf4conv.sources.gguf.opening import open_gguf  # few runs need to import it

                return open_gguf(path, _folder_of_config(where))
            return _open_file(path)
        if where.gguf_file is not None:
            return _open_gguf_in(path, where.gguf_file, where)
        if path.is_dir():
            check_finished(path)
            return _open_folder(path, where)
        if not is_repo_id(source):
            hint = _HINT if "/" not in source else ""
            raise SourceError(f"{path}: no such file or folder{hint}", path=path)
        return _open_repository(source, where)
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise SourceError(f"{error.filename or path}: {error.strerror or error}") from error


def _open_repository(repo: str, where: SourceOptions) -> Source:
    """Fetches a repository of the Hub, and opens the folder in the cache."""
    from nf4conv.sources.remote.hub import fetch_source  # huggingface_hub takes long to import

    fetched = fetch_source(repo, where)
    # the folder in the cache is that of the subfolder
    return _open_folder(fetched.folder, replace(where, subfolder=None), fetched)


def _open_folder(root: Path, where: SourceOptions, fetched: "Fetched | None" = None) -> Source:
    """Opens a folder; of one that was fetched, weight files may be absent."""
    folder = root / (where.subfolder or "")
    absent = {} if fetched is None else fetched.absent
    names = {path.name for path in absent}
    for path in folder.iterdir():
        if path.is_file():
            names.add(path.name)
    weights = find_weights(names, where.variant, folder)
    weight_map: Mapping[str, str] = {}
    if weights.is_index:
        index = require_own(folder / weights.name, root)
        weight_map = read_index(index)["weight_map"]
    file_names = sorted(set(weight_map.values())) or [weights.name]
    files = {name: folder / name for name in file_names}
    for name, file in files.items():
        if file in absent:
            continue
        if not file.is_file():
            raise SourceError(
                f"{folder / weights.name}: the shard {name} is missing; the download is incomplete",
                path=file,
            )
        require_own(file, root)
    opened = _describe(folder, root, tuple(files.values()), weights.stem, fetched)
    by_name = opened.by_name
    for name, file_name in weight_map.items():
        if name not in by_name or by_name[name].file is not files[file_name]:
            raise SourceError.about(
                files[file_name], name, "the index places this tensor here, but the file lacks it"
            )
    return opened


def _describe(
    folder: Path, root: Path, files: tuple[Path, ...], stem: str, fetched: "Fetched | None" = None
) -> Source:
    """Reads the config and all headers; arguments as the attributes of `Source`."""
    stamps = {} if fetched is not None else stamps_of(files)  # a commit cannot change
    config = folder / "config.json"
    opened = Source(
        folder=folder,
        root=root,
        files=files,
        tensors=_read_headers(files, {} if fetched is None else fetched.absent),
        config=read_json(require_own(config, root)) if config.is_file() else None,
        stem=stem,
        card=folder / "README.md",
        stamps=stamps,
        fetched=fetched,
    )
    if len(opened.by_name) < len(opened.tensors):
        for tensor in opened.tensors:
            other = opened.by_name[tensor.name]
            if other is not tensor:
                raise SourceError.about(other.file, other.name, f"also in {tensor.file.name}")
    return opened


def _read_headers(files: Collection[Path], absent: Absent) -> tuple[TensorInfo, ...]:
    """Returns the tensors of all weight files, of which some are on the Hub, in the order of files
    and of bytes within a file.
    """
    tensors: list[TensorInfo] = []
    # threads wait for files, but would hinder each other in looking at what they have read
    heads = each(partial(_read_head, absent), files)
    for file, (head, size) in zip(files, heads, strict=True):
        if file.suffix == ".safetensors":
            tensors += parse_header(head, file, size)[0]
        else:
            tensors += read_pickle_header(file)
        if len(tensors) > MOST_TENSORS:
            raise SourceError(
                f"{file}: more than {MOST_TENSORS:,} tensors in all files up to it, as no model "
                f"has",
                path=file,
            )
    if not tensors:
        raise SourceError(f"{', '.join(str(file) for file in files)}: no tensors")
    return tuple(tensors)


def _read_head(absent: Absent, path: Path) -> tuple[bytes, int]:
    """Returns the JSON in the header of a weight file, of a pickle nothing, and the file's size."""
    if path.suffix != ".safetensors":
        if path in absent:
            raise SourceError(
                f"{path}: only safetensors can be streamed; run without --stream", path=path
            )
        return b"", 0
    with bytes_of(path, absent) as file:
        return header_json(path, file), file.size


def _open_gguf_in(place: Path, name: str, where: SourceOptions) -> Source:
    """Opens a GGUF file of a folder or a repository."""
    from nf4conv.sources.gguf.opening import open_gguf  # few runs need to import it

    if place.is_dir():
        file = place / (where.subfolder or "") / name
        if not file.is_file():
            raise SourceError(f"{file}: no such file", path=file)
        return open_gguf(require_own(file, place), _folder_of_config(where))
    if not is_repo_id(str(place)):
        raise SourceError(f"{place}: no such folder{_HINT}")
    from nf4conv.sources.remote.hub import fetch_gguf  # importing it takes long

    file, fetched = fetch_gguf(str(place), name, where)
    beside = tuple(fetched.repository.files)
    opened = open_gguf(file, _folder_of_config(where), fetched.absent, beside)
    card = opened.card
    if card.parent != file.parent:  # the repository has one for all its folders
        inside = PurePosixPath(where.subfolder or "", name)
        card = file.parents[len(inside.parts) - 1] / "README.md"
    return replace(opened, fetched=fetched, card=card, place=f"{fetched.origin}/{name}")


def _folder_of_config(where: SourceOptions) -> Path | None:
    """Returns the folder that --config-from names, fetched without weights if it is on the Hub."""
    if where.config_from is None:
        return None
    folder = Path(where.config_from)
    if folder.is_dir():
        return folder
    if not is_repo_id(where.config_from):
        raise SourceError(f"--config-from {where.config_from}: no such folder, and no model's name")
    from nf4conv.sources.remote.hub import fetch_source  # huggingface_hub takes long to import

    without = replace(where, stream=True, subfolder=None, revision=None, variant=None)
    return fetch_source(where.config_from, without).folder


def _open_file(path: Path) -> Source:
    """Opens a single weight file: safetensors, or a pickle."""
    if path.suffix not in (".safetensors", *PICKLE_SUFFIXES):
        raise SourceError(f"{path}: neither a .safetensors file nor a torch pickle", path=path)
    folder = path.parent
    if path.name in ADAPTER_WEIGHTS and (folder / ADAPTER_CONFIG).is_file():
        raise no_model(folder)
    for index in sorted(folder.glob("*.index.json")):
        if path.name in read_index(require_own(index, folder))["weight_map"].values():
            raise SourceError(
                f"{path}: one shard of those that {index.name} lists; give the folder", path=path
            )
    return _describe(folder, folder, (path,), STEMS[0])
