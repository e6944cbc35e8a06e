"""Denoisers under the names of the files that their authors published, as image tools read them.

diffusers has names of its own, and divides what is fused in Flux. original_names.json says for each
original module which of diffusers' stand in it, their rows one after the other; # is the number of
a block. So does diffusers when it loads an original file (0.42.1: loaders/single_file_utils.py);
here it is done the other way round.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

from nf4conv.errors import PlanError
from nf4conv.options import QuantizeOptions
from nf4conv.sources.encodings.pieces import can_cut_rows, rows_of
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import Joined, TensorInfo

_BUNDLED: Final = "model.diffusion_model."
"""Before the names of a denoiser that is in one file with text encoders and a VAE; UNets were only
published so.
"""

_BLOCKS: Final = (
    "double_blocks.*", "single_blocks.*", "joint_blocks.*", "input_blocks.*.transformer_blocks.*",
    "middle_block.*.transformer_blocks.*", "output_blocks.*.transformer_blocks.*",
)  # fmt: skip
"""Of Flux, of Stable Diffusion 3, and of the UNets. By layers outside of them tools recognise which
model a file is.
"""

_TELLING: Final = "*.transformer_blocks.0.attn2.to_k.weight"  # by whose width they recognise a UNet
# of Flux: has shift and scale the other way round than diffusers
_SWAPPED: Final = "final_layer.adaLN_modulation.1"


class _Original(NamedTuple):
    """What a module of diffusers becomes."""

    name: str  # of the original module
    place: int = 0  # which part of it
    places: int = 1  # how many it has


_ORIGINALS: Final = {
    kind: {
        part: _Original(name, place, len(parts))
        for name, parts in table.items()
        for place, part in enumerate(parts)
    }
    for kind, table in json.loads(
        Path(__file__).with_name("original_names.json").read_bytes()
    ).items()
}
"""Of original_names.json: by class, or by what a UNet's blocks consist of, and by module of
diffusers.
"""


def within_blocks(source: Source, options: QuantizeOptions) -> QuantizeOptions:
    """Options that pack the linear layers in the blocks of a denoiser, unless they include others,
    into one file.

    A PlanError if the source has other names.
    """
    prefix = _BUNDLED if any(tensor.name.startswith(_BUNDLED) for tensor in source.tensors) else ""
    globs = tuple(f"{prefix}{block}.weight" for block in _BLOCKS)
    if not any(fnmatchcase(tensor.name, glob) for tensor in source.tensors for glob in globs):
        raise PlanError(
            f"{source}: --single-file writes the names that image tools read, and these cannot be "
            f"mapped to them; give "
            "the file that the authors of Flux or Stable Diffusion published, or diffusers' "
            "transformer or unet of it"
        )
    exclude = (*options.exclude, _TELLING)
    return replace(options, include=options.include or globs, exclude=exclude, max_shard_size=2**63)


def with_original_names(source: Source, among: Collection[str] = ()) -> Source:
    """A Flux transformer or UNet of diffusers under its original names; any other source as it is.

    So is one that has a tensor `among` these names. A PlanError if a tensor has no original name,
    or cannot be joined with others.
    """
    config = source.config or {}
    kind, layers = config.get("_class_name"), config.get("layers_per_block")
    if kind not in ("FluxTransformer2DModel", "UNet2DConditionModel"):
        return source
    if any(tensor.name in among for tensor in source.tensors):
        return source
    attending = {tensor.name.partition(".attentions.")[0] for tensor in source.tensors}
    found: dict[tuple[str, int], list[tuple[int, TensorInfo]]] = {}
    for tensor in source.tensors:
        module, _, leaf = tensor.name.rpartition(".")
        original = (
            _of_flux(module) if kind.startswith("Flux") else _of_unet(module, layers, attending)
        )
        if original is None:
            raise PlanError(
                f"{tensor.file}: {tensor.name}: has no name in the files that image tools read"
            )
        leaf = "scale" if original.name.endswith("_norm") else leaf
        found.setdefault((f"{original.name}.{leaf}", original.places), []).append(
            (original.place, tensor)
        )
    return replace(
        source, tensors=tuple(_joined(*key, parts) for key, parts in found.items()), config=None
    )


def _of_flux(module: str) -> _Original | None:
    block = re.search(r"blocks\.(\d+)\.", module)
    found = _ORIGINALS["FluxTransformer2DModel"].get(re.sub(r"(?<=blocks\.)\d+(?=\.)", "#", module))
    return (
        found
        if found is None or block is None
        else found._replace(name=found.name.replace("#", block[1]))
    )


def _of_unet(module: str, layers: object, attending: Collection[str]) -> _Original | None:
    """Arguments beside the module: layers_per_block of its config, and the blocks that have
    attention.
    """
    found = re.fullmatch(r"((down|mid|up)_block(?:s\.(\d+))?)\.(\w+)\.(\d+)\.(.+)", module)
    if found is None or not isinstance(layers, int):
        inside = _ORIGINALS["UNet2DConditionModel"].get(module)
        return inside and inside._replace(name=f"{_BUNDLED}{inside.name}")
    block, side, number, kind, layer, path = found.groups()
    if kind == "attentions" and re.match(
        r"(norm|proj_in|proj_out|transformer_blocks\.\d+\..*)$", path
    ):
        inside = _Original(path)
    else:
        inside = _ORIGINALS.get(kind, {}).get(path)
    row, column = (layers + 1) * int(number or 0) + int(layer), int(kind == "attentions")
    match side, kind:
        case "mid", "resnets" | "attentions" if "mid_block" in attending and row + column < 2:
            place = f"middle_block.{2 * row + column}"
        case "down", "downsamplers":
            place = f"input_blocks.{row + layers + 1}.0"
        case "up", "upsamplers":
            place = f"output_blocks.{row + layers}.{2 if block in attending else 1}"
        case "down", "resnets" | "attentions":
            place = f"input_blocks.{row + 1}.{column}"
        case "up", "resnets" | "attentions":
            place = f"output_blocks.{row}.{column}"
        case _:
            return None
    return inside and inside._replace(name=f"{_BUNDLED}{place}.{inside.name}")


def _joined(name: str, places: int, parts: Sequence[tuple[int, TensorInfo]]) -> TensorInfo:
    """A tensor whose rows are those of its parts, one after the other."""
    ordered = sorted(parts, key=lambda part: part[0])
    tensors, is_swapped = [tensor for _, tensor in ordered], name.startswith(_SWAPPED)
    first, is_sound = tensors[0], [place for place, _ in ordered] == [*range(places)]
    if is_sound and places == 1 and not is_swapped:
        return first._replace(name=name)
    kinds = {(tensor.dtype, len(tensor.shape), tensor.shape[1:]) for tensor in tensors}
    half = first.shape[0] // 2 if first.shape else 0
    if is_swapped:
        is_sound &= 0 < 2 * half == first.shape[0] and (
            first.encoding is None or can_cut_rows(first, half)
        )
    if not is_sound or not first.shape or len(kinds) > 1:
        raise PlanError(
            f"{first.file}: {name} cannot be made of {', '.join(tensor.name for tensor in tensors)}"
        )
    if is_swapped:
        tensors = [rows_of(first, half, 2 * half), rows_of(first, 0, half)]
    shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    return largest._replace(name=name, shape=shape, encoding=Joined(tuple(tensors)))
