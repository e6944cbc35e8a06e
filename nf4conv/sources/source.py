"""A folder or a single file → its config and the headers of all its tensors. No tensor data is read
here.

Weights are safetensors, or torch pickles where there are none. What another quantization encoded is
presented as the float tensors that it stands for (encoded.py).
"""

import json
import os
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nf4conv.errors import AdapterError, SourceError, named
from nf4conv.models.config import checkpoint_dtype
from nf4conv.options import SourceOptions
from nf4conv.sources.encodings.encoded import decoded_tensors
from nf4conv.sources.header import (
    LENGTH_BYTES,
    LONGEST_HEADER,
    MOST_TENSORS,
    header_stop,
    parse_header,
)
from nf4conv.sources.own_files import is_file, require_own
from nf4conv.sources.pickles.header import read_pickle_header
from nf4conv.sources.reader import each, read_bytes
from nf4conv.sources.tensors import TensorInfo
from nf4conv.sources.unfinished import check_finished
from nf4conv.sources.weight_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PICKLE_SUFFIXES,
    STEMS,
    find_weights,
)

if TYPE_CHECKING:
    from nf4conv.sources.remote.hub import Fetched, Origin

_HEAD: Final = 2**17  # bytes asked for first of a file on the Hub; most headers are shorter
_ENDS: Final = 2**14  # bytes at either end of a file, by which it is seen to have changed
_FARTHEST: Final = 2**16
"""Bytes between two small tensors that are still read together: a request to the Hub costs more."""
_LONGEST_READ: Final = 2**22
_LARGEST_JSON: Final = 2**24  # bytes, of config.json and the like
LARGEST_INDEX: Final = 2**26  # bytes, of the index of a million tensors
_DEEPEST_JSON: Final = 64
_HINT: Final = "; models on the Hub are named org/name, such as openai-community/gpt2"
_REPO_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter of PEFT, as it lies on disk."""

    place: str  # as the user gave it
    file: Path  # its weights
    config: Mapping[str, Any]  # the content of adapter_config.json
    origin: "Origin | None" = None  # where it came from on the Hub; None for a folder

    def __str__(self) -> str:
        return self.place if self.origin is None else str(self.origin)


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be read."""

    folder: Path  # where its files are
    root: (
        Path  # the folder that the user named, which holds it, and which links may not lead out of
    )
    files: tuple[Path, ...]  # the weight files, in order of name
    tensors: tuple[
        TensorInfo, ...
    ]  # every tensor, in the order of files and of bytes within a file
    config: Mapping[str, Any] | None  # the content of config.json; None when there is none
    stem: str  # base name of the weight files: "model", or what the source calls them
    notes: tuple[str, ...] = ()  # what the user should know about it
    # by which a file is seen to have changed since its header was read; none of a commit, which
    # cannot
    stamps: "Mapping[Path, Stamp]" = field(default_factory=dict)
    # where it came from on the Hub, and which weight files are still there; None for one that is
    # local
    fetched: "Fetched | None" = None
    adapters: "tuple[AdapterFiles, ...]" = ()  # what has been merged into it

    def __str__(self) -> str:
        return str(self.folder if self.fetched is None else self.fetched.origin)


class Stamp(NamedTuple):
    """A file as it was at a time. Only on one host do times mean the same."""

    size: int  # bytes
    modified: int  # when its content changed, which can be set at will; ns
    changed: int  # when the kernel last saw any change; ns
    ends: int  # CRC-32 of its first and last bytes, between them the header


def source_stamps(source: Source) -> dict[str, list[int]]:
    """Size and time of change of each weight file, by which a changed source is noticed; a commit
    cannot change.
    """
    stamps: dict[str, list[int]] = {} if source.fetched is None else {str(source): []}
    return stamps | {
        _relative(source, file): [stamp.size, stamp.modified]
        for file, stamp in source.stamps.items()
    }


def source_changes(source: Source) -> dict[str, int]:
    """When the kernel last saw each weight file change: what came of another is not kept, for bytes
    may have.
    """
    return {_relative(source, file): stamp.changed for file, stamp in source.stamps.items()}


def _relative(source: Source, file: Path) -> str:
    return str(file.relative_to(source.folder) if file.is_relative_to(source.folder) else file)


def changed_files(stamps: "Mapping[Path, Stamp]") -> list[Path]:
    """The files that are not what they were when their source was opened; a SourceError if one is
    gone.
    """
    return [
        file
        for file, stamp in zip(stamps, each(stamp_of, stamps), strict=True)
        if stamp != stamps[file]
    ]


def stamp_of(path: Path) -> Stamp:
    """What a file is now; a SourceError if it cannot be read."""
    return _look_at(path)[0]


def _look_at(path: Path) -> tuple[Stamp, bytes]:
    """What a file is now, and its first bytes, the header included."""
    with named(path, SourceError), path.open("rb") as file:
        status = os.fstat(file.fileno())
        head = file.read(_ENDS)
        length = min(
            int.from_bytes(head[:LENGTH_BYTES], "little"), LONGEST_HEADER
        )  # a pickle has other first bytes
        head += file.read(max(LENGTH_BYTES + length - len(head), 0))
        file.seek(max(status.st_size - _ENDS, 0))
        ends = zlib.crc32(file.read(_ENDS), zlib.crc32(head))
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, ends), head


def open_source(source: str | Path, where: SourceOptions | None = None) -> Source:
    """Open a checkpoint: a folder with safetensors or pickled weights, sharded or not, one such
    file, or a Hub id.

    A path that exists wins over "org/name". A SourceError, if it is missing, empty, truncated, or
    contradicts itself, names file and tensor.
    """
    opened = open_stored(source, where)
    folder, config = opened.folder, opened.config or {}
    exported = folder / "hf_quant_config.json"
    modelopt = read_json(require_own(exported, opened.root)) if exported.is_file() else {}
    dtype = "F16" if checkpoint_dtype(config) == "float16" else "BF16"
    try:
        tensors, notes = decoded_tensors(
            opened.tensors, config, modelopt, dtype, partial(read_tensor, opened)
        )
    except SourceError as error:
        raise SourceError(
            str(error) if str(error).startswith(str(folder)) else f"{folder}: {error}"
        ) from error
    return replace(opened, tensors=tensors, notes=notes)


def open_stored(source: str | Path, where: SourceOptions | None = None) -> Source:
    """Open a checkpoint and take its tensors as they are stored, encoded or not; otherwise as
    `open_source`.
    """
    where = where or SourceOptions()
    path = Path(source)
    try:
        if is_file(path):
            return _open_file(path)
        if path.is_dir():
            check_finished(path)
            return _open_folder(path, where)
        if not is_repo_id(str(source)):
            raise SourceError(
                f"{path}: no such file or folder{_HINT if '/' not in str(source) else ''}"
            )
        from nf4conv.sources.remote.hub import (
            fetch_source,  # importing huggingface_hub takes a while
        )

        fetched = fetch_source(str(source), where)
        return replace(
            _open_folder(fetched.folder, replace(where, subfolder=None), fetched), fetched=fetched
        )
    except AdapterError as error:
        raise AdapterError(_how_to_merge(str(source), where)) from error
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise SourceError(f"{error.filename or path}: {error.strerror or error}") from error


def _how_to_merge(adapter: str, where: SourceOptions) -> str:
    """What to tell somebody who gives an adapter where a model is expected."""
    folder = Path(adapter)
    if not folder.exists():
        from nf4conv.sources.remote.hub import (
            fetch_adapter,  # importing huggingface_hub takes a while
        )

        folder, _ = fetch_adapter(adapter, where)
    folder = (folder.parent if folder.is_file() else folder) / (where.subfolder or "")
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "BASE"
    place = folder if Path(adapter).exists() else adapter
    return f"{adapter}: an adapter of {base}, not a model; to merge it: nf4conv quantize {base} OUT --lora {place}"


def is_repo_id(text: str) -> bool:
    """Whether a source that is no path may be a repository on the Hub."""
    return _REPO_ID.fullmatch(text) is not None and ".." not in text and "--" not in text


def _open_folder(root: Path, where: SourceOptions, fetched: "Fetched | None" = None) -> Source:
    folder = root / (where.subfolder or "")
    absent = {} if fetched is None else fetched.absent
    names = {path.name for path in (*folder.iterdir(), *absent) if path in absent or path.is_file()}
    weights = find_weights(names, where.variant, folder)
    weight_map = (
        _read_weight_map(require_own(folder / weights.name, root), absent)
        if weights.is_index
        else None
    )
    paths = {
        name: folder / name for name in sorted(set((weight_map or {"": weights.name}).values()))
    }
    files = tuple(paths.values())
    for file in files:
        if file not in absent:
            require_own(file, root)
    stamps, stored = _read_headers(files, fetched)
    if weight_map is not None:
        _check_index(folder, weight_map, paths, stored)
    return Source(
        folder, root, files, stored, _read_config(folder, root), weights.stem, stamps=stamps
    )


def read_tensor(source: Source, tensor: TensorInfo) -> bytes:
    """The bytes of a small tensor, wherever they are; a SourceError if they cannot be read."""
    fetched = source.fetched
    if fetched is not None and tensor.file in fetched.absent and fetched.repository is not None:
        return fetched.repository.read(fetched.absent[tensor.file], tensor.start, tensor.stop)
    return read_bytes(tensor)


def read_together(source: Source, tensors: Sequence[TensorInfo]) -> dict[str, bytes]:
    """The bytes of many small tensors, by name; those near each other are read at once. Errors as
    `read_tensor`.
    """
    groups: list[list[TensorInfo]] = []
    for tensor in sorted(tensors, key=lambda tensor: (str(tensor.file), tensor.start)):
        first, last = (groups[-1][0], groups[-1][-1]) if groups else (tensor, tensor)
        is_near = (
            tensor.start - last.stop <= _FARTHEST and tensor.stop - first.start <= _LONGEST_READ
        )
        if not groups or tensor.file != first.file or not is_near:
            groups.append([])
        groups[-1].append(tensor)
    together = [group[0]._replace(stop=group[-1].stop) for group in groups]
    return {
        tensor.name: raw[tensor.start - group[0].start : tensor.stop - group[0].start]
        for group, raw in zip(groups, each(partial(read_tensor, source), together), strict=True)
        for tensor in group
    }


def _open_file(path: Path) -> Source:
    if path.suffix not in (".safetensors", *PICKLE_SUFFIXES):
        raise SourceError(f"{path}: neither a .safetensors file nor a torch pickle")
    folder = path.parent
    if path.name in ADAPTER_WEIGHTS and (folder / ADAPTER_CONFIG).is_file():
        raise AdapterError(f"{path}: an adapter, not a model")
    for index in sorted(folder.glob("*.index.json")):
        if path.name in _read_weight_map(require_own(index, folder), ()).values():
            raise SourceError(
                f"{path}: one shard of those that {index.name} lists; give the folder"
            )
    stamps, stored = _read_headers((path,))
    return Source(
        folder, folder, (path,), stored, _read_config(folder, folder), STEMS[0], stamps=stamps
    )


def _read_weight_map(index: Path, absent: Collection[Path]) -> Mapping[str, str]:
    table = read_json(index, LARGEST_INDEX)
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index}: has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise SourceError(f"{index}: {name}: {file!r} is outside the folder")
    for file, name in {file: name for name, file in reversed(weight_map.items())}.items():
        relative = PurePosixPath(file)
        if relative.is_absolute() or ".." in relative.parts or "\\" in file:
            raise SourceError(f"{index}: {name}: {file!r} is outside the folder")
        if not is_file(index.parent / relative) and index.parent / relative not in absent:
            raise SourceError(
                f"{index}: {name}: the shard {file} is missing; the download is incomplete"
            )
    return weight_map


def _read_headers(
    files: tuple[Path, ...], fetched: "Fetched | None" = None
) -> tuple[dict[Path, Stamp], tuple[TensorInfo, ...]]:
    """What files were when their headers were read, and the tensors of all of them."""
    seen: dict[str, TensorInfo] = {}
    stamps: dict[Path, Stamp] = {}
    # threads wait for files, but would hinder each other in looking at what they have read
    for file, (stamp, head, size) in zip(
        files, each(partial(_read_head, fetched), files), strict=True
    ):
        if stamp is not None:
            stamps[file] = stamp
        is_pickle = file.suffix != ".safetensors"
        stop = 0 if is_pickle else header_stop(file, head, size)
        header = (
            read_pickle_header(file)
            if is_pickle
            else parse_header(head[LENGTH_BYTES:stop], file, size)
        )
        if len(seen) + len(header) > MOST_TENSORS:
            raise SourceError(
                f"{file}: more than {MOST_TENSORS:,} tensors in all files up to it, as no model has"
            )
        for tensor in header:
            if tensor.name in seen:
                raise SourceError(f"{file}: {tensor.name}: also in {seen[tensor.name].file.name}")
            seen[tensor.name] = tensor
    if not seen:
        raise SourceError(f"{', '.join(str(file) for file in files)}: no tensors")
    return stamps, tuple(seen.values())


def _read_head(fetched: "Fetched | None", path: Path) -> tuple[Stamp | None, bytes, int]:
    """What a file was when it was read, None if it is of a commit; its first bytes, of its header
    all; its size.
    """
    if fetched is None or path not in fetched.absent or fetched.repository is None:
        stamp, head = _look_at(path)
        return None if fetched is not None else stamp, head, stamp.size
    if path.suffix != ".safetensors":
        raise SourceError(f"{path}: only safetensors can be streamed; run without --stream")
    repository, file = fetched.repository, fetched.absent[path]
    head = repository.read(file, 0, min(file.size, _HEAD))
    stop = header_stop(path, head, file.size)
    if stop > len(head):
        head += repository.read(file, len(head), stop)
    return None, head, file.size


def _check_index(
    folder: Path,
    weight_map: Mapping[str, str],
    files: Mapping[str, Path],
    tensors: tuple[TensorInfo, ...],
) -> None:
    held_in = {tensor.name: tensor.file for tensor in tensors}
    for name, file in weight_map.items():
        if held_in.get(name) is not files[file]:
            raise SourceError(
                f"{folder / file}: {name}: the index places this tensor here, but the file lacks it"
            )


def _read_config(folder: Path, root: Path) -> Mapping[str, Any] | None:
    path = folder / "config.json"
    return read_json(require_own(path, root)) if path.is_file() else None


def read_json(path: Path, most: int = _LARGEST_JSON) -> dict[str, Any]:
    """A JSON object from a file of at most so many bytes; a SourceError if it cannot be read, or is
    none.
    """
    try:
        with named(path, SourceError):
            size = path.stat().st_size
            if size > most:
                raise SourceError(f"{path}: {size:,} bytes; expected at most {most:,}")
            content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise SourceError(f"{path}: not a JSON object")
    level: list[Any] = [content]
    for _ in range(_DEEPEST_JSON):
        groups = (value.values() if isinstance(value, dict) else value for value in level)
        level = [child for group in groups for child in group if isinstance(child, (dict, list))]
    if level:
        raise SourceError(f"{path}: not JSON: nested more than {_DEEPEST_JSON} times")
    return content
