"""Tensors on a bare GPU: read, decoded where they are encoded, and cast.

The counterpart of with_torch/reading.py. What a task needs goes up in one copy, in this order:

    file ranges, each at a multiple of 64 bytes | numbers that the host knows | tables of integers
"""

import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

from nf4conv.format.layout import DTYPE_NAMES
from nf4conv.run.loop import aligned
from nf4conv.run.without_torch.bundle import Action, Kernels, Purpose
from nf4conv.run.without_torch.worker import FLAG, TABLE_ROOM, CudaWorker, Launch
from nf4conv.sources.tensors import (
    DTYPE_BITS,
    Bitsandbytes4bit,
    Bitsandbytes8bit,
    FileRange,
    Fp4,
    Scaled,
    TensorInfo,
    packed_in_order,
)

_SCALE_TAGS: Final = ("F32", "F16", "BF16", "U8", "F8_E8M0")

Row = tuple[int, int, int, int]  # of a kernel's table: three addresses and a count


def bytes_of(tag: str, elements: int) -> int:
    return DTYPE_BITS[tag] * elements // 8


def starts(sizes: Iterable[int]) -> list[int]:
    """Where each of some neighbours begins, and where the last one ends."""
    return list(accumulate(sizes, initial=0))


class Reading:
    """A worker's input as a task fills it."""

    def __init__(self, worker: CudaWorker) -> None:
        self.worker = worker
        self.stop = 0  # how much of it is used so far
        self._ranges: list[FileRange] = []
        self._positions: list[int] = []

    def add(self, file_range: FileRange) -> int:
        """The position of what is to be read from a file."""
        self._ranges.append(file_range)
        self._positions.append(self.stop)
        return self.take(file_range[2] - file_range[1])

    def take(self, size: int) -> int:
        """The position of so many bytes that the host fills, once all has been read."""
        start, self.stop = self.stop, self.stop + aligned(size)
        return start

    def read(self) -> None:
        """Read it all; what lies between the ranges is zeroed."""
        self.worker.reserve(source=self.stop + TABLE_ROOM)
        view = self.worker.source.view
        self.worker.fill(view, self._ranges, self._positions)
        for (_, start, stop), position in zip(self._ranges, self._positions, strict=True):
            gap = -(stop - start) % 64
            if gap:
                view[position + stop - start : position + stop - start + gap] = bytes(gap)

    def address(self, position: int) -> int:
        """On the device, once it has been read."""
        return self.worker.input.address + position

    def put(self, position: int, number: float) -> int:
        """The address of a float32 that the host knows, now that it has been written to a position."""
        struct.pack_into("<f", self.worker.source.view, position, number)
        return self.address(position)

    def table(self, columns: Sequence[Iterable[int]]) -> int:
        """The address of a table of integers, whose columns stand one after the other."""
        raw = array("q", [value for column in columns for value in column]).tobytes()
        position = self.take(len(raw))
        self.worker.source.view[position : position + len(raw)] = raw
        return self.address(position)

    def tiled_table(self, rows: Sequence[Row], tile: int) -> tuple[int, int]:
        """The address of a table of rows and their first tiles; the number of tiles."""
        *first_tiles, tiles = starts(-(-row[3] // tile) for row in rows)
        return self.table([*zip(*rows, strict=True), first_tiles]), tiles


def add_tensor(reading: Reading, tensor: TensorInfo) -> dict[str, int]:
    """Add all that is needed of a tensor, or a piece of it: the positions of its parts, as they are
    stored, by role.
    """
    if tensor.encoding is None:
        return {"values": reading.add(tensor.file_range)}
    # the kernels have bitsandbytes' code map, and what its quant state says is known
    unread: tuple[str, ...] = ()
    packed = packed_in_order(tensor)
    if packed is not None:
        unread = ("quant_map", packed.quant_state_role)
    places = {}
    for role, part in tensor.encoding.parts:
        if role not in unread:
            places[role] = reading.add(part.file_range)
    # a number that the host knows: nested_offset, or the scale where there is none
    places["number"] = reading.take(4)
    return places


def purposes_of_tensor(tensor: TensorInfo, steps: Sequence[str]) -> frozenset[Purpose] | None:
    """What kernels bring a tensor from dtype to dtype, as of `load`; None if it needs more than is
    here.
    """
    casts = [Purpose(Action.CAST, step) for step in pairwise(steps)]
    decoding = [] if tensor.encoding is None else [_purpose(tensor, steps[0])]
    found = frozenset(purpose for purpose in (*decoding, *casts) if purpose is not None)
    return (
        found
        if len(found) == len(casts) + len(decoding) and not (casts and {*steps} - {*DTYPE_NAMES})
        else None
    )


def load(
    reading: Reading,
    tensors: Sequence[TensorInfo],
    steps: Sequence[str],
    room: Callable[[int], int] | None = None,
) -> tuple[list[int], list[Launch]]:
    """Read tensors, decode them if they are encoded, as all of them are or none, and cast them.

    Args:
        reading: of a worker, whose output has room for the head.
        tensors: as they are stored.
        steps: the dtypes that they go through, from what they are stored in, or decoded to.
        room: gives the address of so many bytes for the result, a multiple of 64; scratch memory if
            it is left out, or what is only read stays where it is.

    Returns:
        addresses: where the result of each begins, and where the last one ends; between them are
            zeros.
        launches: what decodes and casts them.
    """
    worker, encoded = reading.worker, [tensor for tensor in tensors if tensor.encoding is not None]
    placed = [add_tensor(reading, tensor) for tensor in tensors]
    reading.read()
    places = [*(parts["values"] for parts in placed), reading.stop]
    if encoded:
        places = starts(aligned(bytes_of(steps[0], tensor.elements)) for tensor in tensors)
    elements = places[-1] * 8 // DTYPE_BITS[steps[0]]
    sizes = [bytes_of(tag, elements) for tag in steps]
    elsewhere = {} if encoded else {0: reading.address(0)}
    regions = _regions(
        worker, sizes, elsewhere if room is None else elsewhere | {len(steps) - 1: room(sizes[-1])}
    )
    launches: list[Launch] = []
    for tensor, parts, start, stop in zip(encoded, placed, places, places[1:], strict=False):
        if (
            gap := -bytes_of(steps[0], tensor.elements) % 64
        ):  # the search for NaN looks at all of it
            worker.stream.clear(regions[0] + stop - gap, gap)
        launches.append(bring(reading, tensor, parts, steps[0], regions[0] + start))
    for step, (source, result) in zip(pairwise(steps), pairwise(regions), strict=True):
        kernels = worker.engine.kernels[Purpose(Action.CAST, step)]
        arguments = (source, result, worker.output.address + FLAG, elements)
        launches.append(
            (kernels.functions["cast"], -(-elements // kernels.numbers["tile"]), arguments)
        )
    return [
        regions[-1] + bytes_of(steps[-1], place * 8 // DTYPE_BITS[steps[0]]) for place in places
    ], launches


def _regions(worker: CudaWorker, sizes: Sequence[int], elsewhere: Mapping[int, int]) -> list[int]:
    """Addresses of so many bytes each: some that are given, by place in the list, all others in
    scratch memory.
    """
    needed = [0 if place in elsewhere else size for place, size in enumerate(sizes)]
    base = worker.scratch(sum(needed)) if any(needed) else 0
    return [elsewhere.get(place, base + start) for place, start in enumerate(starts(needed)[:-1])]


def _purpose(tensor: TensorInfo, tag: str) -> Purpose | None:
    encoding = tensor.encoding
    if encoding is None or tag not in DTYPE_NAMES or tensor.elements == 0:
        return None
    match encoding:
        case Scaled() | Bitsandbytes8bit():
            return _scaled_purpose(encoding, tag)
        case Fp4() if len(encoding.values.shape) == 2:
            return _fp4_purpose(encoding, tag)
        case Bitsandbytes4bit() if encoding.has_plain_state and not encoding.is_transposed:
            details = (DTYPE_NAMES[tag], encoding.quant_type, encoding.blocksize)
            return Purpose(Action.UNPACK, details)
        case _:
            return None


def _scaled_purpose(encoding: Scaled | Bitsandbytes8bit, tag: str) -> Purpose | None:
    values = encoding.values
    scale_tag = "F32" if encoding.scale is None else encoding.scale.dtype
    if len(values.shape) != 2 or scale_tag not in _SCALE_TAGS:
        return None
    block = (1, 1)
    if isinstance(encoding, Scaled) and encoding.block is not None:
        block = encoding.block
    by_127 = isinstance(encoding, Bitsandbytes8bit)
    is_aligned = values.shape[1] % 16 == 0
    details = (tag, values.dtype, scale_tag, block, by_127, is_aligned)
    return Purpose(Action.DECODE_SCALED, details)


def _fp4_purpose(encoding: Fp4, tag: str) -> Purpose:
    pairs = encoding.values.shape[1]
    group = pairs // encoding.scale.shape[1]
    divisor = None if encoding.divisor is None else encoding.divisor.dtype
    multiplier = None if encoding.multiplier is None else encoding.multiplier.dtype
    layout = (pairs % 16 == 0, encoding.is_transposed)
    details = (tag, encoding.scale.dtype, group, divisor, multiplier, *layout)
    return Purpose(Action.DECODE_FP4, details)


def bring(
    reading: Reading, tensor: TensorInfo, positions: Mapping[str, int], tag: str, target: int
) -> Launch:
    """The launch that decodes a tensor, which has been read to positions from `add_tensor`, to the
    dtype of a tag.

    The target is the address of the result: of a packed weight any that suits its dtype, else a
    multiple of 16.
    """
    purpose = _purpose(tensor, tag)
    assert purpose is not None  # `purposes_of_tensor` has said that it can be done
    assert tensor.encoding is not None
    parts, kernels = dict(tensor.encoding.parts), reading.worker.engine.kernels[purpose]
    if purpose.action is Action.UNPACK:
        return _unpack(reading, tensor, positions, kernels, target)
    number = reading.put(positions["number"], 1.0)
    places = {"scale": number} | {
        role: reading.address(position) for role, position in positions.items()
    }
    rows, columns = parts["values"].shape
    tiles = -(-columns // kernels.numbers["columns"])
    if purpose.action is Action.DECODE_SCALED:
        factors, steps = [], _strides(parts.get("scale"))
    else:
        factors = [places.get(role, places["scale"]) for role in ("divisor", "multiplier")]
        steps = (parts["scale"].shape[1],)
    arguments = (places["values"], places["scale"], *factors, target, rows, columns, tiles, *steps)
    return kernels.functions["decode"], -(-rows // kernels.numbers["rows"]) * tiles, arguments


def _unpack(
    reading: Reading,
    tensor: TensorInfo,
    positions: Mapping[str, int],
    kernels: Kernels[int],
    target: int,
) -> Launch:
    assert isinstance(tensor.encoding, Bitsandbytes4bit)
    places = {role: reading.address(position) for role, position in positions.items()}
    reading.put(positions["number"], tensor.encoding.nested_offset)
    is_aligned = tensor.elements % kernels.numbers["slot"] == 0 and target % 16 == 0
    name = (
        f"{'nested' if 'nested_absmax' in places else 'plain'}_{'aligned' if is_aligned else 'any'}"
    )
    nested = [places.get(part, places["absmax"]) for part in ("nested_quant_map", "nested_absmax")]
    decoding = (
        places["values"],
        places["absmax"],
        *nested,
        places["number"],
        kernels.tables["values"],
    )
    return (
        kernels.functions[name],
        -(-tensor.elements // kernels.numbers["tile"]),
        (*decoding, target, tensor.elements),
    )


def _strides(scale: TensorInfo | None) -> tuple[int, ...]:
    """From one row, and column, of scales to the next; 0 where one serves all. A single dimension
    is that of rows.
    """
    if scale is None or scale.elements == 1:
        return 0, 0
    height, width = scale.shape if len(scale.shape) == 2 else (scale.elements, 1)
    return (0 if height == 1 else width), (0 if width == 1 else 1)
