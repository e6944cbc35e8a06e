"""Says how much room models in 4 bits take, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

from nf4conv.check.structure import look_at
from nf4conv.sources.record import recorded_scales
from nf4conv.sources.source import Source
from nf4conv.sources.stored_weights import StoredWeight, Structure

_COUNTED = ("absmax", "nested_absmax")  # the other components have the same size in every format


@dataclass(frozen=True)
class Storage:
    """Says how much room a model takes.

    Attributes:
        bytes: all its tensors.
        bits_per_weight: codes and scales of the linear weights, for each of their elements. None if
            no weight is packed.
    """

    bytes: int
    bits_per_weight: float | None


def storages(outs: Sequence[Source]) -> list[Storage]:
    """Returns the room that forms of one model take.

    The linear weights are those that one of the forms has packed: in a form that keeps some of them
    in 16 bits, these count as well.
    """
    structures = [_structure(out) for out in outs]
    linear = {name for structure in structures for name in structure.weights}
    found = []
    for out, structure in zip(outs, structures, strict=True):
        size = sum(tensor.nbytes for tensor in out.tensors)
        found.append(Storage(size, _bits(structure, linear)))
    return found


def _structure(out: Source) -> Structure:
    tensors = {tensor.name: tensor for tensor in out.tensors}
    return look_at(Structure(out.folder, tensors, scales=recorded_scales(out.recorded_in)))


def _bits(structure: Structure, linear: set[str]) -> float | None:
    """Returns the bits of codes and scales for each element of the linear weights."""
    size = 0
    elements = 0
    for name in linear:
        weight = structure.weights.get(name)
        if weight is not None:
            size += _counted_bytes(weight)
            elements += weight.elements
        elif name in structure.plain:
            size += structure.plain[name].nbytes
            elements += structure.plain[name].elements
    return 8 * size / elements if elements else None


def _counted_bytes(weight: StoredWeight) -> int:
    parts = [weight.components[name] for name in _COUNTED if name in weight.components]
    return weight.values.nbytes + sum(part.nbytes for part in parts)
