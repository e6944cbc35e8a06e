"""Finds the files that hold the weights, by the names and in the order in which loaders look."""

from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from nf4conv.errors import AdapterError, DiffusersFolderError, SourceError

STEMS: Final = ("model", "diffusion_pytorch_model")
"""Base names of weight files: those of transformers and of diffusers."""

MODEL_INDEX: Final = "model_index.json"
"""The file that makes a folder a diffusers pipeline.

Weight files beside it hold all its parts in another format.
"""

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
"""Files in which PEFT saves the weights of an adapter, which is no model."""

LARGEST_INDEX: Final = 2**26  # bytes, of the index of a million tensors

PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt")

_PICKLE_STEMS: Final = ("pytorch_model", "diffusion_pytorch_model")


class WeightFile(NamedTuple):
    """The file to begin with."""

    name: str  # of the only weight file, or of the index of several
    is_index: bool  # True for an index
    stem: str  # "model" or "diffusion_pytorch_model": what the output is called


def find_weights(names: Collection[str], variant: str | None, where: object) -> WeightFile:
    """Finds the weights among the files of a folder.

    Safetensors are preferred to pickles, and a single file to an index.

    Args:
        names: the files in the folder itself.
        variant: a word in the names of the weight files, such as "fp16"; None for files without.
        where: the folder, to name it in errors.

    Raises:
        DiffusersFolderError: the folder is that of a diffusers pipeline.
        AdapterError: the folder is that of an adapter.
        SourceError: there are no weights, or several files that nothing tells apart.
    """
    if MODEL_INDEX in names:
        raise DiffusersFolderError(
            f"{where}: it is a diffusers pipeline, whose parts are taken one by one: --subfolder "
            f"transformer"
        )
    found = next(_named(names, STEMS, "safetensors", variant), None)
    if found is not None:
        return found
    if ADAPTER_CONFIG in names and not any(_named(names, _PICKLE_STEMS, "bin", variant)):
        raise AdapterError(f"{where}: an adapter, not a model")
    loose = sorted(name for name in names if name.endswith(".safetensors"))
    if variant is None and len(loose) == 1:
        return WeightFile(loose[0], False, STEMS[0])
    if variant is None and loose:
        raise SourceError(
            f"{where}: {len(loose)} safetensors files, but neither model.safetensors nor an index "
            f"that names them"
        )
    found = next(_named(names, _PICKLE_STEMS, "bin", variant), None)
    if found is None:
        kind = "" if variant is None else f" of the variant {variant}"
        raise SourceError(
            f"{where}: neither safetensors weights nor a pytorch_model.bin{kind} in "
            f"it{_what_else(names, variant)}"
        )
    return found


def _named(
    names: Collection[str], stems: Collection[str], suffix: str, variant: str | None
) -> Iterator[WeightFile]:
    """Yields the weight files that loaders look for, the preferred one first.

    Args:
        names: the files in the folder.
        stems: base names of weight files, in the order of preference.
        suffix: the suffix of the weight files, without a dot.
        variant: a word in their names, or None.
    """
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


def _what_else(names: Collection[str], variant: str | None) -> str:
    """Returns what to add to the error of a folder without weights."""
    if variant is not None and any(name.endswith(".safetensors") for name in names):
        return "; without --variant there are weights"
    if any(name.endswith(".gguf") for name in names):
        return "; it has GGUF files: name one, --gguf-file NAME"
    return ""
