"""Measures on the GPU how far the values of tensors are apart.

Some pieces of tensors go up in one copy. A launch decodes each that is encoded, another subtracts
each pair. Their sums come down in one copy.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import fsum
from typing import Final

from nf4conv.plan.rows import Errors
from nf4conv.run.device.on_driver.batch.buffers import HEAD, DriverBuffers, Launch
from nf4conv.run.device.on_driver.batch.decoding import Places, add_tensor, decode_launch
from nf4conv.run.device.on_driver.batch.input import BatchInput
from nf4conv.run.device.on_driver.batch.sizes import bytes_of, starts
from nf4conv.run.device.on_driver.kernels import Purpose
from nf4conv.run.device.protocol import PairOfPieces
from nf4conv.run.grouping import aligned
from nf4conv.run.worker import Activity
from nf4conv.sources.tensors import TensorInfo

_SUMS: Final = 32
"""Bytes of a program's sums, see kernels/difference.py: four float64."""


def subtract(buffers: DriverBuffers, pairs: Sequence[PairOfPieces]) -> list[Errors]:
    """Returns how far the values of each pair are apart.

    Args:
        buffers: the thread's.
        pairs: pieces that fit into the buffer together. All first ones are of one dtype, and so are
            all second ones.
    """
    batch = BatchInput(buffers)
    tensors = [tensor for pair in pairs for tensor in pair]
    placed = [add_tensor(batch, tensor) for tensor in tensors]
    batch.read()
    with buffers.timed(Activity.COMPUTE):
        launches, addresses = _decode(batch, tensors, placed)
        first = pairs[0]
        dtypes = (first.a.dtype, first.b.dtype)
        kernels = buffers.gpu.kernels[Purpose("subtractor", dtypes)]
        programs = [-(-pair.a.elements // kernels.numbers["tile"]) for pair in pairs]
        places = [HEAD + _SUMS * place for place in starts(programs)]
        buffers.reserve(result=places[-1])
        function = kernels.functions["subtract"]
        sums = buffers.output.address
        for number, pair in enumerate(pairs):
            count = programs[number]
            a = addresses[2 * number]
            b = addresses[2 * number + 1]
            result = sums + places[number]
            arguments = (a, b, result, pair.a.elements, count)
            launches.append(Launch(function, count, arguments))
        buffers.execute(batch.stop, launches, places[-1])
    return [_added_up(buffers.result.view[start:stop]) for start, stop in pairwise(places)]


def _decode(
    batch: BatchInput, tensors: Sequence[TensorInfo], placed: Sequence[Places]
) -> tuple[list[Launch], list[int]]:
    """Decodes the tensors that are encoded.

    Returns:
        The launches, and the address of each tensor's values.
    """
    sizes = [_room(tensor) for tensor in tensors]
    offsets = starts(sizes)
    base = batch.buffers.scratch(offsets[-1])
    launches = []
    addresses = []
    for tensor, places, offset in zip(tensors, placed, offsets, strict=False):
        if tensor.encoding is None:
            addresses.append(batch.address(places.positions["values"]))
        else:
            launches.append(decode_launch(batch, tensor, places, tensor.dtype, base + offset))
            addresses.append(base + offset)
    return launches, addresses


def _room(tensor: TensorInfo) -> int:
    """Returns the bytes of scratch memory that a tensor is decoded to; 0 for one that is not."""
    if tensor.encoding is None:
        return 0
    return aligned(bytes_of(tensor.dtype, tensor.elements))


def _added_up(view: memoryview) -> Errors:
    """Adds up the sums of all programs: four rows, with a column for each program."""
    sums = view.cast("d").tolist()
    programs = len(sums) // 4
    squares = sums[:programs]
    values = sums[programs : 2 * programs]
    largest = sums[2 * programs : 3 * programs]
    differing = sums[3 * programs :]
    return Errors(
        squared_error=fsum(squares),
        squared_weight=fsum(values),
        largest=max(largest),
        differing=round(sum(differing)),
    )
