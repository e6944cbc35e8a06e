"""A diffusers pipeline: a folder whose model_index.json names submodels, which are checkpoints, and
other parts.

Denoisers and text encoders are packed: they hold most of the bytes, and are what users of diffusers
load in 4 bits. The VAE and whatever else has weights keep them as they are, because a VAE in 4 bits
saves little and is seen in the image.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from nf4conv.errors import NoDiffusersFolderError, SourceError
from nf4conv.options import SourceOptions
from nf4conv.sources.auxiliary import auxiliary_names
from nf4conv.sources.opening import is_repo_id
from nf4conv.sources.own_files import own_files, require_own
from nf4conv.sources.reader import read_json
from nf4conv.sources.weight_files import MODEL_INDEX, find_weights

_PACKED: Final = re.compile(
    r"(unconditional_|prior_)?(transformer|unet|prior|controlnet|text_encoder)(_\d+)?"
)
"""Names that diffusers gives to submodels worth packing, such as transformer_2 of Wan,
unconditional_transformer of Ideogram 4 and text_encoder_3 of SD 3.
"""


@dataclass(frozen=True)
class DiffusersFolder:
    """A diffusers pipeline that can be read."""

    folder: Path  # where its files are; of one on the Hub, those that are not weights
    place: str  # the folder, or the repository on the Hub, that its submodels are opened from
    # how to open each part that has weights, by name, in the order of model_index.json
    submodels: Mapping[str, SourceOptions]
    files: tuple[
        PurePosixPath, ...
    ]  # what else belongs to it, relative to the folder, without model_index.json
    strays: tuple[str, ...] = ()  # what would, but is a link that leads out of it

    @property
    def index(self) -> Path:
        """Its model_index.json."""
        return self.folder / MODEL_INDEX


def is_packed_by_default(submodel: str) -> bool:
    """Whether a submodel is one whose linear layers are packed; the others stay as they are."""
    return _PACKED.fullmatch(submodel) is not None


def open_diffusers(source: str | Path, where: SourceOptions | None = None) -> DiffusersFolder:
    """Find out what a diffusers pipeline consists of, a folder or a repository of which what is not
    weights is fetched.

    A submodel that has no files of the variant is read without. A NoDiffusersFolderError if the
    source is something else, a SourceError if it cannot be read, or lacks a part.
    """
    where = where or SourceOptions()
    prefix = f"{where.subfolder.strip('/')}/" if where.subfolder else ""
    if Path(source).is_file():
        raise NoDiffusersFolderError(f"{source}: a file, which is no diffusers pipeline")
    if Path(source).is_dir():
        folder = Path(source) / prefix
        if not (folder / MODEL_INDEX).is_file():
            raise NoDiffusersFolderError(
                f"{folder}: no {MODEL_INDEX}, so this is no diffusers pipeline"
            )
        require_own(folder / MODEL_INDEX, Path(source))
        names, strays = own_files(folder, Path(source))
        return replace(_describe(folder, str(source), where, prefix, names), strays=tuple(strays))
    if not is_repo_id(str(source)):
        raise SourceError(f"{source}: no such file or folder")
    from nf4conv.sources.remote.hub import list_diffusers  # importing huggingface_hub takes a while

    fetched, listed = list_diffusers(str(source), where)
    repository = fetched.repository
    commit = (
        where.revision if repository is None else repository.commit
    )  # offline the revision is asked for again
    pipeline = _describe(
        fetched.folder, str(source), replace(where, revision=commit), prefix, listed
    )
    missing = [*map(str, pipeline.files), *(name for name in listed if name == "README.md")]
    if repository is not None and missing:
        repository.fetch([f"{prefix}{name}" for name in missing])
    return pipeline


def _describe(
    folder: Path, place: str, where: SourceOptions, prefix: str, names: Sequence[str]
) -> DiffusersFolder:
    index = folder / MODEL_INDEX
    inside: dict[str, list[str]] = {}
    for name in names:
        parent, _, rest = name.partition("/")
        inside.setdefault(parent if rest else "", []).append(rest or name)
    submodels: dict[str, SourceOptions] = {}
    files = [path for path in auxiliary_names(inside.get("", ()), None) if path.name != MODEL_INDEX]
    for name, value in read_json(index).items():
        # "unet": ["diffusers", "UNet2DConditionModel"]; a part left out is [null, null]
        if not (isinstance(value, list) and len(value) == 2 and isinstance(value[1], str)):
            continue
        if not inside.get(name):
            raise SourceError(
                f"{index}: {name}: there is no such folder; the download is incomplete"
            )
        own = inside[name]
        if any("/" not in file and file.endswith((".safetensors", ".bin")) for file in own):
            variant = where.variant if _has_variant(own, where.variant) else None
            submodels[name] = replace(where, subfolder=f"{prefix}{name}", variant=variant)
        else:
            copied = {*auxiliary_names(own, None), PurePosixPath("config.json")}
            files += [PurePosixPath(name) / file for file in own if PurePosixPath(file) in copied]
    if not submodels:
        raise SourceError(f"{index}: no part of this diffusers pipeline has weights")
    return DiffusersFolder(folder, place, submodels, tuple(files))


def _has_variant(names: Collection[str], variant: str | None) -> bool:
    with suppress(SourceError):
        return bool(find_weights(names, variant, ""))
    return False
