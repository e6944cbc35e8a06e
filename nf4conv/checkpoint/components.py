"""A pipeline of diffusers: a folder whose model_index.json names components, some of which are checkpoints.

Denoisers and text encoders are packed: they hold most of the bytes, and are what users of diffusers load in 4 bits. The
VAE and whatever else has weights keep them as they are, because a VAE in 4 bits saves little and is seen in the image.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from nf4conv.checkpoint.auxiliary import auxiliary_names
from nf4conv.checkpoint.source import is_repo_id, read_json
from nf4conv.checkpoint.weight_files import PIPELINE_INDEX, find_weights
from nf4conv.errors import NoPipelineError, SourceError
from nf4conv.options import SourceOptions

_PACKED: Final = re.compile(r"(unconditional_|prior_)?(transformer|unet|prior|controlnet|text_encoder)(_\d+)?")
"""Names that diffusers gives to components worth packing, such as transformer_2 of Wan, unconditional_transformer of
Ideogram 4 and text_encoder_3 of SD 3."""

_WEIGHTS: Final = (".safetensors", ".bin")


@dataclass(frozen=True)
class PipelineFolder:
    """A pipeline that can be read.

    Attributes:
        folder: where its files are; of one on the Hub, those that are not weights.
        place: the folder, or the repository on the Hub, that its components are opened from.
        components: how to open each component that has weights, by name, in the order of model_index.json.
        files: what else belongs to it, relative to the folder, without model_index.json.
    """

    folder: Path
    place: str
    components: Mapping[str, SourceOptions]
    files: tuple[PurePosixPath, ...]

    @property
    def index(self) -> Path:
        """Its model_index.json."""
        return self.folder / PIPELINE_INDEX


def is_packed_by_default(component: str) -> bool:
    """Whether a component is one whose linear layers are packed; the others stay as they are."""
    return _PACKED.fullmatch(component) is not None


def open_pipeline(source: str | Path, where: SourceOptions | None = None) -> PipelineFolder:
    """Find out what a pipeline consists of; of one on the Hub, fetch what is not weights.

    Args:
        source: a folder, or "org/name" on the Hugging Face Hub.
        where: revision and so on; a component that has no files of the variant is read without.

    Raises:
        NoPipelineError: it is something else.
        SourceError: it cannot be read, or lacks a component.
    """
    where = where or SourceOptions()
    prefix = f"{where.subfolder.strip('/')}/" if where.subfolder else ""
    if Path(source).is_file():
        raise NoPipelineError(f"{source}: a file, which is no pipeline")
    if Path(source).is_dir():
        folder = Path(source) / prefix
        if not (folder / PIPELINE_INDEX).is_file():
            raise NoPipelineError(f"{folder}: no {PIPELINE_INDEX}, so this is no pipeline")
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        return _describe(folder, str(source), where, prefix, names)
    if not is_repo_id(str(source)):
        raise SourceError(f"{source}: no such file or folder")
    from nf4conv.checkpoint.hub import list_pipeline  # importing huggingface_hub takes a while

    listing = list_pipeline(str(source), where)
    pipeline = _describe(listing.folder, str(source), replace(where, revision=listing.commit), prefix, listing.names)
    own_card = [name for name in listing.names if name == "README.md"]
    listing.fetch([*(str(name) for name in pipeline.files), *own_card])
    return pipeline


def _describe(folder: Path, place: str, where: SourceOptions, prefix: str, names: Sequence[str]) -> PipelineFolder:
    index = folder / PIPELINE_INDEX
    inside: dict[str, list[str]] = {}
    for name in names:
        parent, _, rest = name.partition("/")
        inside.setdefault(parent if rest else "", []).append(rest or name)
    components: dict[str, SourceOptions] = {}
    files = [path for path in auxiliary_names(inside.get("", ()), None) if path.name != PIPELINE_INDEX]
    for name in _component_names(read_json(index)):
        if not inside.get(name):
            raise SourceError(f"{index}: {name}: there is no such folder; the download is incomplete")
        own = inside[name]
        if any("/" not in file and file.endswith(_WEIGHTS) for file in own):
            variant = where.variant if _has_variant(own, where.variant) else None
            components[name] = replace(where, subfolder=f"{prefix}{name}", variant=variant)
        else:
            files += [PurePosixPath(name) / file for file in own if _is_copied(file, own)]
    if not components:
        raise SourceError(f"{index}: no component has weights")
    return PipelineFolder(folder, place, components, tuple(files))


def _component_names(index: Mapping[str, Any]) -> Iterator[str]:
    """Of model_index.json: "unet": ["diffusers", "UNet2DConditionModel"]; a component left out is [null, null]."""
    for name, value in index.items():
        if isinstance(value, list) and len(value) == 2 and isinstance(value[1], str):
            yield name


def _has_variant(names: Collection[str], variant: str | None) -> bool:
    try:
        find_weights(names, variant, "")
    except SourceError:
        return False
    return True


def _is_copied(name: str, siblings: Collection[str]) -> bool:
    return name == "config.json" or PurePosixPath(name) in auxiliary_names(siblings, None)
