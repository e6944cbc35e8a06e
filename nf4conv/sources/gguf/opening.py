"""Opens a GGUF file, or all files of a split one, as a checkpoint of transformers."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from nf4conv.errors import SourceError, UndecodableError
from nf4conv.format.gguf import PLAIN
from nf4conv.format.layout import TAGS
from nf4conv.models.config import checkpoint_dtype
from nf4conv.sources.gguf.families.family import GgufFamily
from nf4conv.sources.gguf.families.registry import FAMILIES, family_of
from nf4conv.sources.gguf.header import GgufTensor, read_gguf_header
from nf4conv.sources.gguf.presenting import names_of, present, sizes_of
from nf4conv.sources.gguf.settings import config_of
from nf4conv.sources.gguf.unpacked import unpack
from nf4conv.sources.own_files import is_file, require_own
from nf4conv.sources.reader import read_json
from nf4conv.sources.source import Source
from nf4conv.sources.stamps import stamp_of
from nf4conv.sources.weight_files import STEMS
from nf4conv.system.garbage import uncollected

_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_FILES: Final = 10_000


@uncollected()
def open_gguf(
    path: Path,
    borrowed: Path | None = None,
    absent: Mapping[Path, Callable[[], IO[bytes]]] | None = None,
) -> Source:
    """Opens a GGUF file as the checkpoint that it was made from.

    Args:
        path: the file, or any file of a split one.
        borrowed: the folder from which config.json, the tokenizer and other files are taken. None
            makes config.json and the tokenizer of the file's metadata.
        absent: opens files that are not here, by the path that they would have.

    Raises:
        UndecodableError: nf4conv does not know the architecture.
        SourceError: a file is missing, cut off, or contradicts itself; the message names file and
            tensor.
    """
    absent = {} if absent is None else absent
    files = _files_of(path, absent)
    headers = [read_gguf_header(file, absent.get(file)) for file in files]
    metadata = headers[0].metadata
    tensors = [tensor for header in headers for tensor in header.tensors]
    _check_split(path, files, metadata, tensors)
    sizes = sizes_of(metadata)
    names = names_of(tensors)
    family = _family(path, sizes, names)
    config: Mapping[str, Any] = {}
    if borrowed is not None:
        config = read_json(require_own(borrowed / "config.json", borrowed))
        _check_model_type(path, config, family)
    dtype = _dtype_of(tensors, config)
    presented = present(tensors, family, sizes, dtype)
    place = {file: number for number, file in enumerate(files)}
    presented = tuple(sorted(presented, key=lambda one: (place[one.file], one.start)))
    notes = [_note_on_types(tensors)]
    tokenizer = None
    if borrowed is None:
        config = config_of(sizes, names, family, presented, dtype)
        borrowed, tokenizer = unpack(path, headers[0], config)
        notes.append(_note_on_metadata(tensors, has_tokenizer=tokenizer is not None))
    return Source(
        folder=borrowed,
        root=borrowed,
        files=tuple(files),
        tensors=presented,
        config=config,
        stem=STEMS[0],
        notes=tuple(notes),
        stamps={file: stamp_of(file) for file in files if file not in absent},
        place=str(path),
        pending=tokenizer,
    )


def _files_of(path: Path, absent: Collection[Path]) -> list[Path]:
    """Returns all files of a split model, or the only one; those that are absent count too."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 0 < count <= _MOST_FILES:
        raise SourceError(f"{path}: is one of {count} files, which cannot be", path=path)
    files = []
    for number in range(1, count + 1):
        file = path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
        if file not in absent and not is_file(file):
            raise SourceError(f"{file}: is missing; {path.name} is one of {count} files", path=file)
        files.append(file)
    return files


def _check_split(
    path: Path, files: Sequence[Path], metadata: Mapping[str, Any], tensors: Sequence[GgufTensor]
) -> None:
    """Compares the files of a split model with what the first one says of them."""
    count = metadata.get("split.count", 1)
    if len(files) != max(count if isinstance(count, int) else 0, 1):
        raise SourceError(
            f"{path}: is one of {count} files of a model, whose names end with "
            f"-00001-of-{count:05}.gguf and so on"
        )
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise SourceError(f"{path}: {expected} tensors are announced, {len(tensors)} are there")
    names = Counter(tensor.name for tensor in tensors)
    for name, times in names.items():
        if times > 1:
            raise SourceError(f"{path}: {name}: is in {times} files", path=path, tensor=name)
    if not tensors:
        raise SourceError(f"{path}: no tensors", path=path)


def _family(path: Path, sizes: Mapping[str, Any], names: Collection[str]) -> GgufFamily:
    """Returns the family of a file's architecture."""
    architecture = sizes.get("general.architecture")
    family = family_of(str(architecture), sizes, names)
    if family is None:
        raise UndecodableError(
            f"{path}: GGUF of the architecture {architecture!r}, whose names nf4conv does not "
            f"know; it knows {', '.join(FAMILIES)}",
            path=path,
        )
    return family


def _check_model_type(path: Path, config: Mapping[str, Any], family: GgufFamily) -> None:
    """Refuses a config of another kind of model."""
    model_type = config.get("model_type")
    if model_type not in (family.model_type, *family.also):
        raise SourceError(
            f"{path}: is a {family.model_type}, but --config-from names a {model_type}", path=path
        )


def _dtype_of(tensors: Sequence[GgufTensor], config: Mapping[str, Any]) -> str:
    """Returns the tag of the dtype to present a model in.

    That of most matrices, if they are not quantized; else that of the config that was borrowed, or
    bfloat16, which holds all that the scales can.
    """
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1:
            sizes[tensor.block_type.name] += tensor.nbytes
    [(most, _)] = sizes.most_common(1) or [("F32", 0)]
    if most in PLAIN:
        return most
    return TAGS.get(checkpoint_dtype(config) or "", "BF16")


def _note_on_types(tensors: Sequence[GgufTensor]) -> str:
    counts = Counter(tensor.block_type.name for tensor in tensors)
    listed = ", ".join(f"{count:,} of {name}" for name, count in counts.most_common())
    return f"the source is a GGUF file: {listed}"


def _note_on_metadata(tensors: Sequence[GgufTensor], *, has_tokenizer: bool) -> str:
    """Returns a line about what was made of the metadata, and what is not in there."""
    lacking = []
    if not has_tokenizer:
        lacking.append("no tokenizer that nf4conv can write")
    if any(tensor.name.startswith("rope_f") for tensor in tensors):
        lacking.append("not how rotary embeddings are scaled")
    what = "config.json and the tokenizer are made" if has_tokenizer else "config.json is made"
    but = f", which has {' and '.join(lacking)}" if lacking else ""
    return f"{what} of the file's metadata{but}; --config-from REPO takes those of the original"
