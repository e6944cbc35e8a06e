"""Tensors on a bare GPU: read, and decoded where they are encoded.

The counterpart of with_torch/reading.py. What a task needs goes up in one copy, in this order:

    file ranges, each at a multiple of 64 bytes | numbers that the host knows | tables of integers

A weight that bitsandbytes packed to 4 bits is read with its JSON blob, which stays on the host but for the offset.
"""

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final

from nf4conv.checkpoint.header import DTYPE_BITS, FileRange, TensorInfo
from nf4conv.errors import CodecError, SourceError
from nf4conv.format.encodings import Method
from nf4conv.format.layout import DTYPE_NAMES, QUANT_STATE_PREFIX, nested_offset_of, parse_quant_state
from nf4conv.pipeline.loop import aligned
from nf4conv.pipeline.without_torch.bundle import Action, Kernels, Purpose
from nf4conv.pipeline.without_torch.worker import TABLE_ROOM, CudaWorker, Launch

FLAG: Final = 0
HEAD: Final = 256
"""Where in a worker's output a task finds whether a weight is not finite; and where anything else begins."""

_SCALE_TAGS: Final = ("F32", "F16", "BF16", "U8", "F8_E8M0")
_NUMBER_ROOM: Final = 64
_LONGEST_BLOB: Final = 2**20

Row = tuple[int, int, int, int]
"""Of a kernel's table: three addresses and a count."""


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

    def content(self, position: int, size: int) -> bytes:
        """What has been read, on the host."""
        return bytes(self.worker.source.view[position : position + size])

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
    """Add all that is needed of a tensor, or a piece of it: the positions of its parts, as they are stored, by role."""
    if tensor.encoding is None:
        return {"values": reading.add(tensor.file_range)}
    parts = dict(tensor.encoding.parts)
    if tensor.encoding.method is Method.BITSANDBYTES_4BIT:
        parts.pop("quant_map", None)  # which the kernels have
        blob = parts[blob_role(parts)]
        if blob.nbytes > _LONGEST_BLOB:
            raise SourceError(f"{blob.file}: {blob.name}: a quant state of impossible size")
    places = {role: reading.add(part.file_range) for role, part in parts.items()}
    # a number that the host knows: nested_offset, or the scale where there is none
    return {"number": reading.take(4), **places}


def room_of(tensor: TensorInfo) -> int:
    """At least the bytes of input that a tensor takes."""
    if tensor.encoding is None:
        return aligned(tensor.nbytes)
    return sum(aligned(part.nbytes) for _, part in tensor.encoding.parts) + _NUMBER_ROOM


def blob_role(roles: Iterable[str]) -> str:
    return next(role for role in roles if role.startswith(QUANT_STATE_PREFIX))


def purposes_of_tensor(tensor: TensorInfo, tag: str) -> frozenset[Purpose] | None:
    """What kernels bring a tensor to a dtype; None if it needs more than is here: other encodings, or a cast."""
    if tensor.dtype == tag and tensor.encoding is None:
        return frozenset()
    purpose = _purpose(tensor, tag)
    return None if purpose is None else frozenset({purpose})


def _purpose(tensor: TensorInfo, tag: str) -> Purpose | None:
    encoding = tensor.encoding
    if encoding is None or tensor.dtype != tag or tag not in DTYPE_NAMES or tensor.elements == 0:
        return None
    parts = dict(encoding.parts)
    values, scale = parts["values"], parts.get("scale")
    scale_tag = "F32" if scale is None else scale.dtype
    match encoding.method:
        case Method.SCALED | Method.INT8_ROWS if len(values.shape) == 2 and scale_tag in _SCALE_TAGS:
            by_127 = encoding.method is Method.INT8_ROWS
            details = (values.dtype, scale_tag, encoding.block or (1, 1), by_127, values.shape[1] % 16 == 0)
            return Purpose(Action.DECODE_SCALED, (tag, *details))
        case Method.FP4 if scale is not None:
            pairs = values.shape[1]
            factors = [parts[role].dtype if role in parts else None for role in ("divisor", "multiplier")]
            group = pairs // scale.shape[1]
            return Purpose(Action.DECODE_FP4, (tag, scale.dtype, group, *factors, pairs % 16 == 0))
        case Method.BITSANDBYTES_4BIT:
            quant_type = blob_role(parts).removeprefix(QUANT_STATE_PREFIX)
            return Purpose(Action.UNPACK, (DTYPE_NAMES[tag], quant_type, encoding.block[0]))
    return None


def bring(reading: Reading, tensor: TensorInfo, positions: Mapping[str, int], tag: str, target: int) -> Launch:
    """The launch that decodes a tensor, which has been read to positions from `add_tensor`, to the dtype of a tag.

    The target is the address of the result: of a packed weight any that suits its dtype, else a multiple of 16.
    """
    purpose = _purpose(tensor, tag)
    assert purpose is not None  # `purposes_of_tensor` has said that it can be done
    assert tensor.encoding is not None
    parts, kernels = dict(tensor.encoding.parts), reading.worker.engine.kernels[purpose]
    if purpose.action is Action.UNPACK:
        return _unpack(reading, tensor, positions, kernels, target)
    number = reading.put(positions["number"], 1.0)
    places = {"scale": number} | {role: reading.address(position) for role, position in positions.items()}
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
    reading: Reading, tensor: TensorInfo, positions: Mapping[str, int], kernels: Kernels[int], target: int
) -> Launch:
    assert tensor.encoding is not None
    parts, places = dict(tensor.encoding.parts), {role: reading.address(at) for role, at in positions.items()}
    role, is_nested = blob_role(parts), "nested_absmax" in parts
    try:
        fields = parse_quant_state(reading.content(positions[role], parts[role].nbytes))
        if is_nested:
            reading.put(positions["number"], nested_offset_of(fields))
    except CodecError as error:
        raise SourceError(f"{tensor.file}: {tensor.name}: {error}") from error
    is_aligned = tensor.elements % kernels.numbers["slot"] == 0 and target % 16 == 0
    name = f"{'nested' if is_nested else 'plain'}_{'aligned' if is_aligned else 'any'}"
    nested = [places.get(part, places["absmax"]) for part in ("nested_quant_map", "nested_absmax")]
    decoding = (places["values"], places["absmax"], *nested, places["number"], kernels.tables["values"])
    return kernels.functions[name], -(-tensor.elements // kernels.numbers["tile"]), (*decoding, target, tensor.elements)


def _strides(scale: TensorInfo | None) -> tuple[int, ...]:
    """From one row, and column, of scales to the next; 0 where one serves all. A single dimension is that of rows."""
    if scale is None or scale.elements == 1:
        return 0, 0
    height, width = scale.shape if len(scale.shape) == 2 else (scale.elements, 1)
    return (0 if height == 1 else width), (0 if width == 1 else 1)
