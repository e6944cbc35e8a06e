"""Tensors brought to the GPU: read, decoded where they are encoded, and cast."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.run.device.on_driver.batch.buffers import FLAG, DriverBuffers, Launch
from nf4conv.run.device.on_driver.batch.decoding import add_tensor, decode_launch
from nf4conv.run.device.on_driver.batch.input import BatchInput
from nf4conv.run.device.on_driver.batch.sizes import bytes_of, starts
from nf4conv.run.device.on_driver.kernels import Purpose
from nf4conv.run.grouping import aligned
from nf4conv.sources.tensors import TensorInfo


@dataclass
class Loaded:
    """Tensors on the GPU, once the launches are done.

    Attributes:
        addresses: where each begins, and where the last one ends; between them are zeros.
        launches: what decodes and casts them.
    """

    addresses: list[int]
    launches: list[Launch]


def load(
    batch: BatchInput,
    tensors: Sequence[TensorInfo],
    steps: Sequence[str],
    make_room: Callable[[int], int] | None = None,
) -> Loaded:
    """Reads tensors, decodes them if they are encoded, and casts them.

    Args:
        batch: the input, which is read now.
        tensors: as they are stored; all of them are encoded, or none.
        steps: tags of the dtypes that they go through, from what they are stored in, or decoded to.
        make_room: returns the address of so many bytes, a multiple of 64, for the result. Without
            it, the result is in scratch memory, or stays in the input if it is only read.
    """
    buffers = batch.buffers
    placed = [add_tensor(batch, tensor) for tensor in tensors]
    batch.read()
    is_encoded = tensors[0].encoding is not None
    if is_encoded:
        sizes = (aligned(bytes_of(steps[0], tensor.elements)) for tensor in tensors)
        offsets = starts(sizes)
    else:
        offsets = [places.positions["values"] for places in placed]
        offsets.append(batch.stop)
    elements = offsets[-1] * 8 // DTYPE_BITS[steps[0]]
    regions = _regions(batch, steps, elements, is_encoded, make_room)
    launches: list[Launch] = []
    if is_encoded:
        spans = zip(tensors, placed, pairwise(offsets), strict=True)
        for tensor, places, (start, stop) in spans:
            gap = -bytes_of(steps[0], tensor.elements) % 64
            if gap:  # the search for NaN looks at all of it
                buffers.stream.clear(regions[0] + stop - gap, gap)
            target = regions[0] + start
            launches.append(decode_launch(batch, tensor, places, steps[0], target))
    for step, (source, result) in zip(pairwise(steps), pairwise(regions), strict=True):
        launches.append(_cast_launch(buffers, step, source, result, elements))
    addresses = []
    for offset in offsets:
        elements_before = offset * 8 // DTYPE_BITS[steps[0]]
        addresses.append(regions[-1] + bytes_of(steps[-1], elements_before))
    return Loaded(addresses, launches)


def _regions(
    batch: BatchInput,
    steps: Sequence[str],
    elements: int,
    is_encoded: bool,
    make_room: Callable[[int], int] | None,
) -> list[int]:
    """Returns where the values are in each of the dtypes that they go through."""
    sizes = [bytes_of(tag, elements) for tag in steps]
    regions: list[int | None] = [None] * len(steps)
    if not is_encoded:
        regions[0] = batch.address(0)
    if make_room is not None:
        regions[-1] = make_room(sizes[-1])
    needed = 0
    for region, size in zip(regions, sizes, strict=True):
        if region is None:
            needed += size
    place = batch.buffers.scratch(needed) if needed else 0
    found = []
    for region, size in zip(regions, sizes, strict=True):
        if region is None:
            region = place
            place += size
        found.append(region)
    return found


def _cast_launch(
    buffers: DriverBuffers, step: tuple[str, str], source: int, result: int, elements: int
) -> Launch:
    """Returns the launch that casts values, and sets the flag if finite ones become infinite."""
    kernels = buffers.gpu.kernels[Purpose("caster", step)]
    programs = -(-elements // kernels.numbers["tile"])
    arguments = (source, result, buffers.output.address + FLAG, elements)
    return Launch(kernels.functions["cast"], programs, arguments)
