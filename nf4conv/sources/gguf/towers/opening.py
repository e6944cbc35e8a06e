"""Opens a tower's file, and presents its tensors as transformers has them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

from nf4conv.errors import SourceError, UndecodableError
from nf4conv.sources.gguf.header import GgufHeader, GgufTensor, read_gguf_header
from nf4conv.sources.gguf.presenting import present
from nf4conv.sources.gguf.towers.registry import ARCHITECTURE, TOWERS, projector_of
from nf4conv.sources.gguf.towers.tower import Tower
from nf4conv.sources.tensors import TensorInfo

_LAYER: Final = re.compile(r"([av]\.blk)\.(\d{1,4})\.(.+)")
_DEEPSTACK: Final = re.compile(r"v\.deepstack\.(\d{1,4})\.(.+)")


@dataclass(frozen=True)
class TowerFile:
    """A tower's file that has been read.

    Attributes:
        path: the file.
        tower: its kind.
        tensors: those of the file, by the names that the converter gives them today.
        sizes: the metadata without what its keys begin with.
        layers: how many layers it has.
    """

    path: Path
    tower: Tower
    tensors: tuple[GgufTensor, ...]
    sizes: Mapping[str, Any]
    layers: int

    def presented(self, dtype: str) -> tuple[TensorInfo, ...]:
        """Returns its tensors as transformers has them, given the tag of a dtype."""
        return present(self.tensors, self.tower.family, self.sizes, dtype)


def open_tower(path: Path, opened: Callable[[], IO[bytes]] | None = None) -> TowerFile:
    """Reads the header of a tower's file.

    Args:
        path: the file.
        opened: opens it, if it is not here.

    Raises:
        UndecodableError: nf4conv does not know its projector.
        SourceError: it is no tower's file, is cut off, or contradicts itself.
    """
    header = read_gguf_header(path, opened)
    tower = _kind_of(path, header)
    tensors = _renamed(header.tensors, tower.layer)
    prefix = f"{ARCHITECTURE}.{'audio' if tower.hears else 'vision'}."
    sizes = {key.removeprefix(prefix): value for key, value in header.metadata.items()}
    return TowerFile(path, tower, tensors, sizes, _count_layers(path, tensors, tower.layer))


def _kind_of(path: Path, header: GgufHeader) -> Tower:
    """Returns the kind of a tower."""
    architecture = header.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise SourceError(
            f"{path}: --mmproj names no tower's file: its architecture is {architecture!r}",
            path=path,
        )
    if all(header.metadata.get(f"clip.has_{kind}_encoder") for kind in ("vision", "audio")):
        raise UndecodableError(
            f"{path}: a tower that both sees and hears, which nf4conv does not read; take the "
            f"original, or leave out --mmproj to get the text model alone",
            path=path,
        )
    projector = projector_of(header.metadata)
    tower = TOWERS.get(str(projector))
    if tower is None:
        raise UndecodableError(
            f"{path}: a tower whose projector is {projector!r}, which nf4conv does not know; it "
            f"knows {', '.join(TOWERS)}",
            path=path,
        )
    return tower


def _are_swapped(tensors: Sequence[GgufTensor], layer: str) -> bool:
    """Returns True if the first matrix of a network, which widens, is called ffn_down."""
    by_name = {tensor.name: tensor for tensor in tensors}
    first = by_name.get(f"{layer}.0.ffn_down.weight")
    if first is None or len(first.shape) != 2 or f"{layer}.0.ffn_gate.weight" in by_name:
        return False
    return first.shape[0] > first.shape[1]


def _numbers_of_mergers(tensors: Sequence[GgufTensor]) -> dict[int, int]:
    """Returns the number of each merger on the way, by that of its layer."""
    depths = set()
    for tensor in tensors:
        found = _DEEPSTACK.fullmatch(tensor.name)
        if found is not None:
            depths.add(int(found[1]))
    return {depth: number for number, depth in enumerate(sorted(depths))}


def _renamed(tensors: Sequence[GgufTensor], layer: str) -> tuple[GgufTensor, ...]:
    """Returns tensors by the names that the converter gives them today, mergers by their number.

    Until 2025 it called the first matrix of a layer's network ffn_down and the second ffn_up. The
    first one widens. Mergers on the way (deepstack) have the number of their layer in the file.
    """
    swapped = {}
    if _are_swapped(tensors, layer):
        swapped = {"ffn_down": "ffn_up", "ffn_up": "ffn_down"}
    number_of = _numbers_of_mergers(tensors)
    renamed = []
    for tensor in tensors:
        name = tensor.name
        in_layer = _LAYER.fullmatch(name)
        on_the_way = _DEEPSTACK.fullmatch(name)
        if in_layer is not None:
            module, dot, ending = in_layer[3].partition(".")
            name = f"{in_layer[1]}.{in_layer[2]}.{swapped.get(module, module)}{dot}{ending}"
        elif on_the_way is not None:
            name = f"v.deepstack.{number_of[int(on_the_way[1])]}.{on_the_way[2]}"
        renamed.append(replace(tensor, name=name))
    return tuple(renamed)


def _count_layers(path: Path, tensors: Sequence[GgufTensor], layer: str) -> int:
    """Returns how many layers a tower has, which all have the same tensors."""
    layers: dict[int, set[str]] = {}
    for tensor in tensors:
        found = _LAYER.fullmatch(tensor.name)
        if found is not None:
            layers.setdefault(int(found[2]), set()).add(found[3])
    endings = sorted(set().union(*layers.values()))
    for number in range(len(layers)):
        for ending in endings:
            if ending not in layers.get(number, ()):
                name = f"{layer}.{number}.{ending}"
                raise SourceError(
                    f"{path}: {name}: is missing; other layers have one", path=path, tensor=name
                )
    return len(layers)
