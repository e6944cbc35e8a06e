"""Opens a GGUF file, or all files of a split one, as a checkpoint of transformers."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from nf4conv.errors import SourceError, UndecodableError
from nf4conv.format.dtypes import TAGS
from nf4conv.format.gguf import LAYOUTS, PLAIN
from nf4conv.models.config import checkpoint_dtype
from nf4conv.sources.files import STEMS, require_own, split_names
from nf4conv.sources.gguf.families import GgufFamily, architectures, config_of, families_of
from nf4conv.sources.gguf.header import GgufTensor, Sizes, read_gguf_header
from nf4conv.sources.gguf.presenting import names_of, present, sizes_of
from nf4conv.sources.gguf.tokenizing import tokenizer_files
from nf4conv.sources.reader import Absent, read_json
from nf4conv.sources.source import Source, stamps_of
from nf4conv.system.machine import uncollected

_SEEING: Final = ("qwen2vl", "qwen3vl", "qwen3vlmoe")
"""Architectures of text models that occur only as parts of models that see."""

_REFUSED: Final = (
    ("deepseek2", "attention.temperature_scale", "of a Mistral Large 3, which no transformers has"),
    ("glm4", "rope.dimension_sections", "of a model that sees, whose rows the converter moved"),
)
"""Files that look like others: the architecture, a key of the metadata, and what they are."""


@uncollected()
def open_gguf(
    path: Path,
    borrowed: Path | None = None,
    absent: Absent | None = None,
    beside: Collection[str] = (),
) -> Source:
    """Opens a GGUF file, or any file of a split one, as the checkpoint that it was made from.

    config.json, the tokenizer and other files are those of the folder `borrowed`; without it, they
    are made of the metadata. `beside` names files that lie beside those that are absent.
    """
    absent = {} if absent is None else absent
    files = _files_of(path, absent)
    stamps = stamps_of([file for file in files if file not in absent])
    headers = [read_gguf_header(file, absent) for file in files]
    metadata = headers[0][0]
    tensors = [tensor for _, of_file in headers for tensor in of_file]
    _check_split(path, files, metadata, tensors)
    _check_types(tensors)
    sizes = sizes_of(metadata)
    names = names_of(tensors)
    config = None
    if borrowed is not None:
        config = read_json(require_own(borrowed / "config.json", borrowed))
    family = _family(path, sizes, names, config)
    dtype = _dtype_of(tensors, config or {})
    presented = present(tensors, family, sizes, dtype)
    folder = borrowed
    made = None
    if folder is None:
        folder = path / path.stem
        config = config_of(sizes, names, family, presented, dtype)
        made = tokenizer_files(metadata) or {}
    card = files[0].parent / "README.md"
    number = {file: number for number, file in enumerate(files)}
    return Source(
        folder=folder,
        root=folder,
        files=tuple(files),
        tensors=tuple(sorted(presented, key=lambda one: (number[one.file], one.start))),
        config=config,
        stem=STEMS[0],
        notes=tuple(_notes(path, tensors, sizes, beside, made)),
        stamps=stamps,
        place=str(path),
        card=card if card.is_file() else folder / "README.md",
        made=made,
    )


def _files_of(path: Path, absent: Collection[Path]) -> list[Path]:
    """Returns all files of a split model, or the only one; those that are absent count too."""
    files = [path.with_name(name) for name in split_names(path.name)]
    for file in files:
        if file not in absent and not file.is_file():
            count = len(files)
            raise SourceError(f"{file}: is missing; {path.name} is one of {count} files", path=file)
    return files


def _check_split(
    path: Path, files: Sequence[Path], metadata: Mapping[str, Any], tensors: Sequence[GgufTensor]
) -> None:
    """Compares the files of a split model with what the first one says of them."""
    count = metadata.get("split.count") or 1
    number = metadata.get("split.no", 0)
    expected = metadata.get("split.tensors.count", len(tensors))
    if count != len(files) or (number != 0 and len(files) > 1):
        raise SourceError(
            f"{files[0]}: is part {number!r:.40} of {count!r:.40} files of a model, and not the "
            f"first of {len(files)}; their names end with -00001-of-NNNNN.gguf and so on",
            path=files[0],
        )
    if expected != len(tensors):
        raise SourceError(
            f"{path}: {expected!r:.40} tensors are announced, {len(tensors)} are there", path=path
        )
    if not tensors:
        raise SourceError(f"{path}: no tensors", path=path)


def _family(
    path: Path, sizes: Sizes, names: Collection[str], config: Mapping[str, Any] | None
) -> GgufFamily:
    """Returns the family of a file's architecture, whose config may be that of the original."""
    architecture = str(sizes.get("general.architecture"))
    if architecture == "clip":
        raise UndecodableError(
            f"{path}: is the tower of a model that sees or hears; nf4conv reads towers from the "
            f"original's safetensors, and of GGUF files the text model's",
            path=path,
        )
    for of, sign, why in _REFUSED:
        if of == architecture and sizes.get(sign):
            raise UndecodableError(f"{path}: GGUF {why}; take the original", path=path)
    families = [each for each in families_of(architecture) if each.is_meant(sizes, names)]
    if not families:
        raise UndecodableError(
            f"{path}: GGUF of the architecture {architecture!r:.60}, whose names nf4conv does not "
            f"know; it knows {', '.join(architectures())}",
            path=path,
        )
    family = families[0]
    if config is not None:
        model_type = config.get("model_type")
        for each in families:
            if model_type in (each.model_type, *each.also):
                return each
        raise SourceError(
            f"{path}: is a {family.model_type}, but --config-from names a {model_type}", path=path
        )
    # no key of config.json tells transformers that tokens see those behind them
    if family.needs_config or sizes.get("attention.causal") is False:
        raise UndecodableError(
            f"{path}: a {family.model_type}, of which the metadata does not say all that "
            f"config.json does; --config-from REPO takes that of the original",
            path=path,
        )
    return family


def _check_types(tensors: Sequence[GgufTensor]) -> None:
    """Refuses types that only the package `gguf` decodes, where it is not installed."""
    for tensor in tensors:
        name = tensor.block_type.name
        if name not in (*PLAIN, *LAYOUTS) and find_spec("gguf") is None:
            raise UndecodableError.about(
                tensor.file,
                tensor.name,
                f"is in {name}, which llama.cpp's own package decodes: pip install 'nf4conv[gguf]'",
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


def _notes(
    path: Path,
    tensors: Sequence[GgufTensor],
    sizes: Sizes,
    beside: Collection[str],
    made: Mapping[str, Any] | None,
) -> Iterator[str]:
    """Yields lines about the types, a tower that is in another file, and what was made of the
    metadata, and is not in there.
    """
    counts = Counter(tensor.block_type.name for tensor in tensors)
    types = ", ".join(f"{count:,} of {name}" for name, count in counts.most_common())
    yield f"the source is a GGUF file: {types}"
    names = {*beside, *(file.name for file in path.parent.glob("*.gguf"))}
    has_tower = any("mmproj" in name and name.endswith(".gguf") for name in names)
    if has_tower or sizes.get("general.architecture") in _SEEING:
        yield "the text model alone: the tower that sees or hears is in the original's safetensors"
    if made is None:
        return
    lacking = [] if made else ["no tokenizer that nf4conv can write"]
    if any(tensor.name.startswith("rope_f") for tensor in tensors):
        lacking.append("not how rotary embeddings are scaled")
    what = "config.json and the tokenizer are made" if made else "config.json is made"
    but = f", which has {' and '.join(lacking)}" if lacking else ""
    yield f"{what} of the file's metadata{but}; --config-from REPO takes those of the original"
