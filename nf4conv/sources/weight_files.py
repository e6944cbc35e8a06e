"""Which files of a listing hold the weights, by the names and in the order in which loaders look
for them.
"""

from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from nf4conv.errors import AdapterError, DiffusersFolderError, SourceError

STEMS: Final = (
    "model",
    "diffusion_pytorch_model",
)  # base names of weight files: transformers', diffusers'

MODEL_INDEX: Final = "model_index.json"
"""What makes a folder a diffusers pipeline; weights beside it are those of all its parts in another
format.
"""

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
"""What PEFT saves of an adapter, which is no model."""

LARGEST_INDEX: Final = 2**26  # bytes, of the index of a million tensors

PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt")

_PICKLE_STEMS: Final = ("pytorch_model", "diffusion_pytorch_model")


class WeightFile(NamedTuple):
    """Where to begin."""

    name: str  # of the only weight file, or of the index of several
    is_index: bool  # which of the two
    stem: str  # "model" or "diffusion_pytorch_model", as the output is to be called


def find_weights(names: Collection[str], variant: str | None, where: object) -> WeightFile:
    """The weights among the files in a folder itself; safetensors are preferred to pickles, a
    single file to an index.

    `variant` is such as "fp16", or None for the files without one; `where` is named in errors: a
    DiffusersFolderError if the folder is that of a diffusers pipeline, an AdapterError if it is
    that of an adapter, a SourceError if there are none, or several that nothing tells apart.
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
    infix = "" if variant is None else f".{variant}"
    for stem in stems:
        single = f"{stem}{infix}.{suffix}"
        # the last is diffusers' older spelling
        indexes = (f"{stem}.{suffix}.index{infix}.json", f"{stem}.{suffix}{infix}.index.json")
        for name in (single, *dict.fromkeys(indexes)):
            if name in names:
                yield WeightFile(name, name != single, stem if stem in STEMS else STEMS[0])


def _what_else(names: Collection[str], variant: str | None) -> str:
    if variant is not None and any(name.endswith(".safetensors") for name in names):
        return "; without --variant there are weights"
    if any(name.endswith(".gguf") for name in names):
        return "; it has GGUF files, which are not read"
    return ""
