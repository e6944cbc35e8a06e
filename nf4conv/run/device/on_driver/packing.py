"""Weights packed to 4 bits on the GPU, and their errors measured.

A batch of weights and the tables that describe it go up in one copy. Where they are encoded, a
launch for each decodes it; where they are in another dtype, one casts them all. One launch looks
for NaN and infinity, one or two pack, two or more do the nested step. Where errors are measured, a
launch for each weight does so: codes come from the packing itself and count as right, scales are
those that are stored. Everything comes down in one copy.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from nf4conv.codec.mean_order import TORCH_BLOCK, thread_blocks, threads
from nf4conv.format.codebook import NESTED_BLOCKSIZE
from nf4conv.format.layout import Format, block_count
from nf4conv.plan.rows import Errors
from nf4conv.run.device.on_driver.buffers import FLAG, HEAD, BatchInput, DriverBuffers, Launch, Row
from nf4conv.run.device.on_driver.kernels import (
    Kernels,
    measuring_purpose,
    packing_purpose,
    packing_steps,
)
from nf4conv.run.device.on_driver.loading import load
from nf4conv.run.device.protocol import Gathered, NonFiniteError, Packed, Scales
from nf4conv.run.pieces import WeightPiece, scale_ranges, starts
from nf4conv.run.worker import Activity
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit

_SUMS: Final = 32
"""Bytes of a program's sums, see kernels/error.py: two float32, two float64, an int64."""

_MEAN_ROOM: Final = 4 * 2**16
"""Bytes that the mean of a long vector needs for the sums of its parts."""


class _Region(NamedTuple):
    """A part of a thread's output, divided among weights; in bytes."""

    start: int
    starts: Sequence[int]  # of each weight in the region, and where it ends

    def addresses(self, base: int) -> list[int]:
        """Returns where each weight is on the GPU, given where the output is."""
        return [base + self.start + start for start in self.starts[:-1]]

    def of(self, view: memoryview) -> memoryview:
        """Returns what has come down to the host."""
        return view[self.start : self.start + self.starts[-1]]


class _Layout:
    """Divides a thread's output; the head is before all regions."""

    def __init__(self) -> None:
        self.size = HEAD

    def add(self, sizes: Iterable[int]) -> _Region:
        """Adds a region, given the bytes of each weight."""
        region = _Region(self.size, starts(sizes))
        size = region.starts[-1]
        self.size += size + -size % 256
        return region


class _ScalesOut:
    """The regions of what becomes of the absmax of weights.

    With double quantization these are 8-bit codes, nested_absmax and offsets; absmax that are not
    gathered elsewhere, and what means need, stay on the GPU behind them.
    """

    def __init__(
        self, layout: _Layout, blocks: Sequence[int], double_quant: bool, is_gathered: bool = False
    ) -> None:
        self.blocks = blocks
        self.is_nested = double_quant
        if not double_quant:
            self.absmax = layout.add(4 * count for count in blocks)
            self.visible = layout.size  # bytes of the output that come down to the host
            return
        self.codes = layout.add(blocks)
        self.nested_absmax = layout.add(
            4 * block_count(count, NESTED_BLOCKSIZE) for count in blocks
        )
        self.offsets = layout.add(4 for _ in blocks)
        self.visible = layout.size
        if not is_gathered:
            # torch's mean begins at a multiple of 16 bytes
            self.absmax = layout.add(4 * (count + -count % 4) for count in blocks)
        self.scratch = layout.add([_MEAN_ROOM])

    def fetched(self, view: memoryview) -> Scales:
        """Returns the scales that have come down to the host."""
        if not self.is_nested:
            return Scales(self.absmax.of(view), None, None)
        offsets = self.offsets.of(view).cast("f").tolist()
        return Scales(self.codes.of(view), self.nested_absmax.of(view), offsets)


class _Measurement:
    """Measures the errors of weights that one call packs, with the scales of stored ones.

    Those are added to the input, which has not been read.
    """

    def __init__(
        self,
        batch: BatchInput,
        layout: _Layout,
        pieces: Sequence[WeightPiece],
        format: Format,
        stored: Sequence[Bitsandbytes4bit],
    ) -> None:
        self._batch = batch
        self._kernels = batch.buffers.gpu.kernels[measuring_purpose(format)]
        self._tile = self._kernels.numbers["tile"]  # elements that a program looks at
        self._stored = stored
        self._scales = []  # positions of stored scales in the input, by role
        for weight, piece in zip(stored, pieces, strict=True):
            ranges = scale_ranges(weight, piece)
            positions = {role: batch.add(file_range) for role, file_range in ranges.items()}
            positions["nested_offset"] = batch.take(4)
            self._scales.append(positions)
        self._sums = layout.add(_SUMS * -(-piece.elements // self._tile) for piece in pieces)

    def launches(self, rows: Sequence[Row]) -> list[Launch]:
        """Returns the launches that measure; rows are those of the weights that are packed."""
        places = self._sums.addresses(self._batch.buffers.output.address)
        each = zip(rows, self._stored, self._scales, places, strict=True)
        return [self._launch(*one) for one in each]

    def _launch(
        self, row: Row, stored: Bitsandbytes4bit, scales: Mapping[str, int], sums: int
    ) -> Launch:
        tables = self._kernels.tables
        programs = -(-row.elements // self._tile)
        self._batch.put(scales["nested_offset"], stored.nested_offset or 0.0)
        # without double quantization neither of these is read
        nested_absmax = scales.get("nested_absmax", scales["nested_offset"])
        arguments = (
            row.source,
            row.result,
            self._batch.address(scales["absmax"]),
            tables["nested"],
            self._batch.address(nested_absmax),
            self._batch.address(scales["nested_offset"]),
            tables["values"],
            tables["bounds"],
            sums,
            sums + 8 * programs,
            sums + 24 * programs,
            row.elements,
            programs,
        )
        return Launch(self._kernels.functions["compare"], programs, arguments)

    def errors(self, view: memoryview) -> list[Errors]:
        """Returns what has been measured of each weight."""
        sums = self._sums.of(view)
        return [_errors_of(sums[start:stop]) for start, stop in pairwise(self._sums.starts)]


def _errors_of(sums: memoryview) -> Errors:
    """Adds up the sums of all programs; each kind of sum has a value for each program."""
    programs = len(sums) // _SUMS
    peaks = sums[: 8 * programs].cast("f").tolist()
    squares = sums[8 * programs : 24 * programs].cast("d").tolist()
    outside = sums[24 * programs :].cast("q").tolist()
    return Errors(
        squared_error=math.fsum(squares[:programs]),
        squared_weight=math.fsum(squares[programs:]),
        largest=max(peaks[:programs], default=0.0),
        largest_of_absmax=max(peaks[programs:], default=0.0),
        outside=sum(outside),
        differing=0,
        not_nearest=0,
    )


def pack(
    buffers: DriverBuffers,
    pieces: Sequence[WeightPiece],
    format: Format,
    gathered: Gathered | None,
    stored: Sequence[Bitsandbytes4bit],
) -> Packed:
    """Packs weights, or a piece of a large one, as device/protocol.py says."""
    batch = BatchInput(buffers)
    layout = _Layout()
    codes = layout.add(-(-piece.elements // 2) for piece in pieces)
    measurement = _Measurement(batch, layout, pieces, format, stored) if stored else None
    visible = layout.size
    scales = None
    if gathered is None:
        blocks = [block_count(piece.elements, format.blocksize) for piece in pieces]
        scales = _ScalesOut(layout, blocks, format.double_quant)
        visible = scales.visible
    buffers.reserve(result=layout.size)
    tensors = [piece.tensor for piece in pieces if piece.tensor is not None]
    loaded = load(batch, tensors, packing_steps(pieces[0].job.source, format))
    kernels = buffers.gpu.kernels[packing_purpose(format)]
    weights = loaded.addresses
    launches = loaded.launches
    with buffers.timed(Activity.COMPUTE):
        base = buffers.output.address
        if scales is not None:
            absmax = scales.absmax.addresses(base)
        else:
            assert gathered is not None
            absmax = [_place_in(gathered, pieces[0].start // format.blocksize, buffers)]
        rows = []
        for number, place in enumerate(codes.addresses(base)):
            elements = pieces[number].elements
            rows.append(Row(weights[number], place, absmax[number], elements))
        launches.append(_look_for_non_finite(buffers, kernels, weights[0], weights[-1]))
        launches += _quantize(batch, kernels, rows)
        if scales is not None and scales.is_nested:
            launches += _compress(batch, kernels, scales, absmax)
        if measurement is not None:
            launches += measurement.launches(rows)
        buffers.execute(batch.stop, launches, visible)
    _check_finite(buffers, kernels, pieces, weights)
    view = buffers.result.view
    return Packed(
        codes.of(view),
        None if scales is None else scales.fetched(view),
        [] if measurement is None else measurement.errors(view),
    )


def _place_in(gathered: Gathered, first_block: int, buffers: DriverBuffers) -> int:
    """Returns where a piece of a large weight writes its absmax, from some block on."""
    whole = gathered.memory(lambda blocks: buffers.gpu.allocate(4 * blocks))
    address: int = whole.address + 4 * first_block
    return address


def compress(buffers: DriverBuffers, gathered: Gathered, format: Format) -> Scales:
    """Returns the scales of a large weight, whose absmax has gathered on the GPU."""
    memory = gathered.take()
    with buffers.timed(Activity.COMPUTE):
        batch = BatchInput(buffers)
        layout = _Layout()
        scales = _ScalesOut(layout, [gathered.blocks], format.double_quant, is_gathered=True)
        buffers.reserve(result=layout.size)
        if scales.is_nested:
            kernels = buffers.gpu.kernels[packing_purpose(format)]
            launches = _compress(batch, kernels, scales, [memory.address])
            buffers.execute(batch.stop, launches, scales.visible)
        else:
            buffers.fetch(scales.absmax.start, memory.address, 4 * gathered.blocks)
    buffers.gpu.give_back(memory)
    return scales.fetched(buffers.result.view)


def _look_for_non_finite(
    buffers: DriverBuffers, kernels: Kernels[int], start: int, stop: int
) -> Launch:
    """Returns the launch that looks through some bytes on the GPU, and sets the flag."""
    words = (stop - start) // 4
    programs = -(-words // kernels.numbers["finite_tile"])
    arguments = (start, buffers.output.address + FLAG, words)
    return Launch(kernels.functions["finite"], programs, arguments)


def _check_finite(
    buffers: DriverBuffers,
    kernels: Kernels[int],
    pieces: Sequence[WeightPiece],
    addresses: Sequence[int],
) -> None:
    """Raises a NonFiniteError for the first weight that is not finite, if the flag is set."""
    if not buffers.is_flagged():
        return
    for number, piece in enumerate(pieces):
        start = addresses[number]
        stop = addresses[number + 1]
        launch = _look_for_non_finite(buffers, kernels, start, stop)
        buffers.execute(0, [launch], HEAD)
        if buffers.is_flagged():
            raise NonFiniteError(piece.job)


def _quantize(batch: BatchInput, kernels: Kernels[int], rows: Sequence[Row]) -> list[Launch]:
    """Returns the launches that pack weights to codes and absmax, one for each alignment."""
    by_kernel: dict[str, list[Row]] = {"quantize_aligned": [], "quantize_any": []}
    for row in rows:
        is_aligned = row.elements % kernels.numbers["slot"] == 0 and row.result % 4 == 0
        by_kernel["quantize_aligned" if is_aligned else "quantize_any"].append(row)
    launches = []
    for name, chosen in by_kernel.items():
        if chosen:
            table, tiles = batch.tiled_table(chosen, kernels.numbers["tile"])
            arguments = (table, 0, kernels.tables["codes"], len(chosen))
            launches.append(Launch(kernels.functions[name], tiles, arguments))
    return launches


def _compress(
    batch: BatchInput, kernels: Kernels[int], out: _ScalesOut, absmax: Sequence[int]
) -> list[Launch]:
    """Returns the launches that quantize the absmax of weights, given their addresses."""
    base = batch.buffers.output.address
    means = base + out.offsets.start
    launches = _average(batch, kernels, out, absmax)
    codes = out.codes.addresses(base)
    nested_absmax = out.nested_absmax.addresses(base)
    rows = [Row(*row) for row in zip(absmax, codes, nested_absmax, out.blocks, strict=True)]
    table, tiles = batch.tiled_table(rows, kernels.numbers["nested_tile"])
    arguments = (table, means, kernels.tables["middles"], len(rows))
    launches.append(Launch(kernels.functions["compress"], tiles, arguments))
    return launches


def _average(
    batch: BatchInput, kernels: Kernels[int], out: _ScalesOut, absmax: Sequence[int]
) -> list[Launch]:
    """Returns the launches that take the mean of each weight's absmax.

    A long one takes two launches of its own, one after the other in one scratch region.
    """
    functions = kernels.functions
    base = batch.buffers.output.address
    means = base + out.offsets.start
    scratch = base + out.scratch.start
    counts = out.blocks
    threads_of_each = [threads(count) for count in counts]
    table = batch.table([absmax, counts, threads_of_each])
    launches = [Launch(functions["mean"], len(counts), (table, means, len(counts)))]
    for number, count in enumerate(counts):
        if count <= TORCH_BLOCK:
            continue
        blocks = thread_blocks(count, kernels.numbers["resident_blocks"])
        part = (absmax[number], scratch, count, blocks)
        total = (scratch, means + 4 * number, blocks, count)
        launches.append(Launch(functions["mean_part"], blocks, part))
        launches.append(Launch(functions["mean_total"], 1, total))
    return launches
