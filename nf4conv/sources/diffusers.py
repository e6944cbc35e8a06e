"""Opens a diffusers pipeline: a folder whose model_index.json names submodels and other parts.

Submodels are checkpoints. Denoisers and text encoders are packed: they hold most of the bytes, and
are what users of diffusers load in 4 bits. The VAE and other submodels keep their weights as they
are, because a VAE in 4 bits saves little and is seen in the image.
"""

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions
from nf4conv.sources.files import (
    LOADED_SUFFIXES,
    MODEL_INDEX,
    SUFFIXES_OF_OTHERS,
    auxiliary_names,
    files_below,
    find_weights,
    require_own,
)
from nf4conv.sources.places import from_address, is_repo_id, prefix_of
from nf4conv.sources.reader import read_json

_PACKED: Final = re.compile(
    r"(unconditional_|prior_)?(transformer|unet|prior|controlnet|text_encoder)(_\d+)?"
)
"""Names that diffusers gives to submodels worth packing, such as transformer_2 of Wan,
unconditional_transformer of Ideogram 4 and text_encoder_3 of SD 3.
"""

_NO_MODELS: Final = ("Tokenizer", "TokenizerFast", "Processor", "Extractor", "Scheduler")
"""Ends of the names of classes that have no weights."""


@dataclass(frozen=True)
class DiffusersFolder:
    """A diffusers pipeline that can be read.

    Attributes:
        folder: the folder with its files; of a pipeline on the Hub, those that are not weights.
        place: the folder, or the repository on the Hub, that its submodels are opened from.
        submodels: the options that open each submodel, by name, in the order of model_index.json.
        files: the other files that belong to it, relative to the folder, without model_index.json.
    """

    folder: Path
    place: str
    submodels: Mapping[str, SourceOptions]
    files: tuple[PurePosixPath, ...]

    def __str__(self) -> str:
        return self.place

    @property
    def index(self) -> Path:
        """Returns its model_index.json."""
        return self.folder / MODEL_INDEX


def is_packed_by_default(submodel: str) -> bool:
    """Returns True if a submodel's linear layers are packed; other submodels stay as they are."""
    return _PACKED.fullmatch(submodel) is not None


def open_diffusers(source: str | Path, where: SourceOptions | None = None) -> DiffusersFolder:
    """Finds out what a diffusers pipeline consists of: a folder, or "org/name" on the Hub, of which
    all files but weights are fetched.

    A submodel that has no files of the variant is read without. Raises a SourceError for anything
    else.
    """
    source, where = from_address(str(source), where or SourceOptions())
    path = Path(source)
    if path.exists():
        return _open_local(path, where)
    if not is_repo_id(source):
        raise SourceError(f"{source}: no such file or folder")
    return _open_repository(source, where)


def _open_local(root: Path, where: SourceOptions) -> DiffusersFolder:
    """Opens a pipeline that is a folder on this disk."""
    folder = root / prefix_of(where)
    index = folder / MODEL_INDEX
    if not index.is_file():
        raise SourceError(
            f"{folder}: no {MODEL_INDEX}, so this is no diffusers pipeline", path=folder
        )
    require_own(index, root)
    pipeline = _describe(folder, str(root), where, files_below(folder))
    for name in pipeline.files:
        require_own(folder / name, root)
    return pipeline


def _open_repository(repo: str, where: SourceOptions) -> DiffusersFolder:
    """Opens a pipeline on the Hub, and fetches its files except the weights."""
    from nf4conv.sources.remote.hub import list_diffusers  # slow import

    fetched, names = list_diffusers(repo, where)
    of_commit = replace(where, revision=fetched.repository.commit)
    pipeline = _describe(fetched.folder, repo, of_commit, names)
    needed = [str(path) for path in pipeline.files]
    if "README.md" in names:
        needed.append("README.md")
    if needed:
        prefix = prefix_of(where)
        fetched.repository.fetch([f"{prefix}{name}" for name in needed])
    return pipeline


def _describe(
    folder: Path, place: str, where: SourceOptions, names: Collection[str]
) -> DiffusersFolder:
    """Returns what a pipeline consists of, given the names of its files relative to the folder. Its
    submodels are opened from `place`; `where` opened the pipeline.
    """
    index = folder / MODEL_INDEX
    at_top = [name for name in names if "/" not in name]
    files = [path for path in auxiliary_names(at_top) if path.name != MODEL_INDEX]
    submodels: dict[str, SourceOptions] = {}
    for part, value in read_json(index).items():
        # "unet": ["diffusers", "UNet2DConditionModel"]; a part left out is [null, null]
        is_pair = isinstance(value, list) and len(value) == 2
        if not is_pair or not isinstance(value[1], str):
            continue
        own = [name.removeprefix(f"{part}/") for name in names if name.startswith(f"{part}/")]
        if not own:
            raise SourceError(
                f"{index}: {part}: there is no such folder; the download is incomplete", path=index
            )
        if any("/" not in name and name.endswith(LOADED_SUFFIXES) for name in own):
            submodels[part] = replace(
                where,
                subfolder=f"{prefix_of(where)}{part}",
                variant=where.variant if _has_variant(own, where.variant) else None,
            )
        else:
            _require_no_model(folder / part, own, value[1])
            # such as those of a tokenizer
            copied = {*auxiliary_names(own), PurePosixPath("config.json")}
            files += [PurePosixPath(part, name) for name in own if PurePosixPath(name) in copied]
    if not submodels:
        raise SourceError(f"{index}: no part of this diffusers pipeline has weights", path=index)
    return DiffusersFolder(folder, place, submodels, tuple(files))


def _require_no_model(folder: Path, names: Collection[str], class_name: str) -> None:
    """Refuses a model without weights that are read here: the result would have none."""
    has_others = any(name.endswith(SUFFIXES_OF_OTHERS) for name in names)
    if has_others or ("config.json" in names and not class_name.endswith(_NO_MODELS)):
        raise SourceError(
            f"{folder}: {class_name:.80} without weights in safetensors or PyTorch's format; the "
            f"download is incomplete, or they are in another format",
            path=folder,
        )


def _has_variant(names: Collection[str], variant: str | None) -> bool:
    """Returns True if a folder with these files has weights of a variant."""
    with suppress(SourceError):
        return bool(find_weights(names, variant, ""))
    return False
