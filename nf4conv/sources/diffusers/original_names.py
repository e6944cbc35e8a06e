"""Gives the tensors of a denoiser the names in the files that its authors published.

Image tools read these names. diffusers has names of its own, and divides what is fused in Flux
(name_tables.py).
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from nf4conv.errors import PlanError
from nf4conv.options import QuantizeOptions
from nf4conv.sources.diffusers.name_tables import (
    FLUX,
    INSIDE_BLOCKS,
    OUTSIDE_BLOCKS,
    OriginalName,
)
from nf4conv.sources.encodings.cuts.rows import can_cut_rows, rows_of
from nf4conv.sources.encodings.types.arranged import Joined
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo

_BUNDLED: Final = "model.diffusion_model."
"""The prefix of a denoiser that is in one file with text encoders and a VAE.

UNets were only published so.
"""

_BLOCKS: Final = (
    # Flux
    "double_blocks.*",
    "single_blocks.*",
    # Stable Diffusion 3
    "joint_blocks.*",
    # UNets
    "input_blocks.*.transformer_blocks.*",
    "middle_block.*.transformer_blocks.*",
    "output_blocks.*.transformer_blocks.*",
)
"""The blocks whose linear layers are packed. By layers outside of them tools recognise which model
a file is.
"""

_TELLING: Final = "*.transformer_blocks.0.attn2.to_k.weight"
"""A layer in the blocks by whose width tools recognise a UNet; it stays as it is."""

_SWAPPED: Final = "final_layer.adaLN_modulation.1"
"""A layer of Flux that has shift and scale the other way round than diffusers."""

_UNET_MODULE: Final = re.compile(
    r"(?P<block>(?P<side>down|mid|up)_block(?:s\.(?P<number>\d+))?)"
    r"\.(?P<kind>\w+)\.(?P<layer>\d+)\.(?P<path>.+)"
)
"""A module in a block of a UNet of diffusers, such as "up_blocks.1.resnets.0.conv1"."""

_UNET_ATTENTION: Final = re.compile(r"(norm|proj_in|proj_out|transformer_blocks\.\d+\..*)$")
"""A module in an attention layer of a UNet, which is called the same in the original."""


class _Part(NamedTuple):
    """A tensor that becomes some rows of an original one."""

    place: int  # which part of the rows it is
    tensor: TensorInfo


def within_blocks(source: Source, options: QuantizeOptions) -> QuantizeOptions:
    """Returns options that pack the linear layers in the blocks of a denoiser, into one file.

    Args:
        source: the denoiser, under its original names.
        options: the options of the user; what they include is packed instead of the blocks.

    Raises:
        PlanError: the source has other names.
    """
    is_bundled = any(tensor.name.startswith(_BUNDLED) for tensor in source.tensors)
    prefix = _BUNDLED if is_bundled else ""
    globs = tuple(f"{prefix}{block}.weight" for block in _BLOCKS)
    if not any(_matches(tensor.name, globs) for tensor in source.tensors):
        raise PlanError(
            f"{source}: --single-file writes the names that image tools read, and these cannot be "
            f"mapped to them; give the file that the authors of Flux or Stable Diffusion "
            f"published, or diffusers' transformer or unet of it"
        )
    return replace(
        options,
        include=options.include or globs,
        exclude=(*options.exclude, _TELLING),
        max_shard_size=2**63,
    )


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def with_original_names(source: Source, among: Collection[str] = ()) -> Source:
    """Returns a Flux transformer or UNet of diffusers under its original names.

    Args:
        source: any source.
        among: names of tensors; a source that has one of them stays as it is.

    Returns:
        The source under other names and without a config; any other source as it is.

    Raises:
        PlanError: a tensor has no original name, or cannot be joined with others.
    """
    config = source.config or {}
    kind = config.get("_class_name")
    if kind not in ("FluxTransformer2DModel", "UNet2DConditionModel"):
        return source
    if any(tensor.name in among for tensor in source.tensors):
        return source
    attending = {tensor.name.partition(".attentions.")[0] for tensor in source.tensors}
    parts: dict[tuple[str, int], list[_Part]] = {}
    for tensor in source.tensors:
        module, _, leaf = tensor.name.rpartition(".")
        if kind == "FluxTransformer2DModel":
            original = _of_flux(module)
        else:
            original = _of_unet(module, config.get("layers_per_block"), attending)
        if original is None:
            raise PlanError.about(
                tensor.file, tensor.name, "has no name in the files that image tools read"
            )
        if original.name.endswith("_norm"):
            leaf = "scale"
        key = (f"{original.name}.{leaf}", original.places)
        parts.setdefault(key, []).append(_Part(original.place, tensor))
    joined = tuple(_joined(name, places, found) for (name, places), found in parts.items())
    return replace(source, tensors=joined, config=None)


def _of_flux(module: str) -> OriginalName | None:
    """Returns the original name of a module of a Flux transformer; None if it has none."""
    found = FLUX.get(re.sub(r"(?<=blocks\.)\d+(?=\.)", "#", module))
    block = re.search(r"blocks\.(\d+)\.", module)
    if found is None or block is None:
        return found
    return found._replace(name=found.name.replace("#", block[1]))


def _of_unet(module: str, layers: object, attending: Collection[str]) -> OriginalName | None:
    """Returns the original name of a module of a UNet; None if it has none.

    Args:
        module: its name in diffusers.
        layers: layers_per_block of the config.
        attending: the blocks that have attention.
    """
    found = _UNET_MODULE.fullmatch(module)
    if found is None or not isinstance(layers, int):
        inside = OUTSIDE_BLOCKS.get(module)
        return None if inside is None else inside._replace(name=f"{_BUNDLED}{inside.name}")
    kind = found["kind"]
    path = found["path"]
    if kind == "attentions" and _UNET_ATTENTION.match(path):
        inside = OriginalName(path)
    else:
        inside = INSIDE_BLOCKS.get(kind, {}).get(path)
    place = _place_in_unet(found, layers, attending)
    if inside is None or place is None:
        return None
    return inside._replace(name=f"{_BUNDLED}{place}.{inside.name}")


def _place_in_unet(found: re.Match[str], layers: int, attending: Collection[str]) -> str | None:
    """Returns the original name of the layer that a module is in; None if there is none.

    The original numbers the layers of all blocks one after the other, those that change the size
    included; in a layer, 0 is the resnet and 1 the attention behind it.
    """
    block = found["block"]
    kind = found["kind"]
    row = (layers + 1) * int(found["number"] or 0) + int(found["layer"])
    column = 1 if kind == "attentions" else 0
    is_layer = kind in ("resnets", "attentions")
    match found["side"]:
        case "mid" if is_layer and "mid_block" in attending and row + column < 2:
            return f"middle_block.{2 * row + column}"
        case "down" if kind == "downsamplers":
            return f"input_blocks.{row + layers + 1}.0"
        case "up" if kind == "upsamplers":
            return f"output_blocks.{row + layers}.{2 if block in attending else 1}"
        case "down" if is_layer:
            return f"input_blocks.{row + 1}.{column}"
        case "up" if is_layer:
            return f"output_blocks.{row}.{column}"
        case _:
            return None


def _joined(name: str, places: int, parts: Sequence[_Part]) -> TensorInfo:
    """Returns a tensor whose rows are those of its parts, one after the other.

    Args:
        name: the name of the tensor that is made.
        places: the number of parts that there must be.
        parts: the parts, in any order.

    Raises:
        PlanError: a part is missing, or the parts do not fit.
    """
    ordered = sorted(parts, key=lambda part: part.place)
    tensors = [part.tensor for part in ordered]
    first = tensors[0]
    is_swapped = name.startswith(_SWAPPED)
    is_complete = [part.place for part in ordered] == list(range(places))
    if is_complete and places == 1 and not is_swapped:
        return first._replace(name=name)
    kinds = {(tensor.dtype, len(tensor.shape), tensor.shape[1:]) for tensor in tensors}
    fits = is_complete and len(kinds) == 1 and len(first.shape) > 0
    if fits and is_swapped:
        fits = _can_swap_halves(first)
    if not fits:
        raise PlanError(
            f"{first.file}: {name} cannot be made of "
            f"{', '.join(tensor.name for tensor in tensors)}",
            path=first.file,
        )
    rows = sum(tensor.shape[0] for tensor in tensors)
    if is_swapped:
        rows = first.shape[0]
        tensors = [rows_of(first, rows // 2, rows), rows_of(first, 0, rows // 2)]
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    return largest._replace(
        name=name, shape=(rows, *first.shape[1:]), encoding=Joined(tuple(tensors))
    )


def _can_swap_halves(tensor: TensorInfo) -> bool:
    """Returns True if the upper half of a tensor's rows can be read before the lower half."""
    rows = tensor.shape[0]
    if rows == 0 or rows % 2 != 0:
        return False
    return tensor.encoding is None or can_cut_rows(tensor, rows // 2)
