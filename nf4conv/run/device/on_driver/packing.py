"""Weights packed to 4 bits on the GPU, and their errors measured.

A batch of weights and the tables that describe it go up in one copy. Where they are encoded, a
launch for each decodes it; where they are in another dtype, one casts them all. One launch looks
for NaN and infinity, one or two pack, two or more do the nested step. Where errors are measured, a
launch for each weight does so: codes come from the packing itself and count as right, scales are
those that are stored. Everything comes down in one copy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from nf4conv.codec.mean_order import TORCH_BLOCK, thread_blocks, threads
from nf4conv.format.codebook import NESTED_BLOCKSIZE
from nf4conv.format.layout import Format, block_count
from nf4conv.plan.rows import Errors
from nf4conv.run.device.on_driver.buffers import FLAG, HEAD, BatchInput, DriverBuffers, Launch, Row
from nf4conv.run.device.on_driver.capability import (
    measuring_purpose,
    packing_purpose,
    packing_steps,
)
from nf4conv.run.device.on_driver.kernels import Kernels
from nf4conv.run.device.on_driver.loading import load
from nf4conv.run.device.protocol import Gathered, NonFiniteError, Packed, Scales
from nf4conv.run.pieces import WeightPiece, starts
from nf4conv.run.worker import Activity
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit, cut_parts

_SUMS: Final = 32
"""Bytes of a program's sums, see kernels/error.py: two float32, two float64, an int64."""

_MEAN_ROOM: Final = 4 * 2**16
"""Bytes that the mean of a long vector needs for the sums of its parts."""


class _OutputLayout:
    """Divides a thread's output among the results of weights; the head is before them.

    packed codes, sums of errors, codes of absmax, nested_absmax, offsets | absmax, part sums
    packed codes, sums of errors, absmax (without double quantization)

    What is before the bar comes down to the host. Each region begins at a byte, and each weight in
    it at one of the `starts`, the last of which is where the region ends; those of codes,
    nested_absmax and absmax are counted in values.
    """

    def __init__(self, sizes: Sequence[int], blocksize: int) -> None:
        self.size = HEAD  # bytes that are used so far
        self.visible = HEAD  # how many of them come down to the host
        self.sizes = sizes
        self.blocks = [block_count(size, blocksize) for size in sizes]
        nested_blocks = [block_count(count, NESTED_BLOCKSIZE) for count in self.blocks]
        self.packed_starts = starts(-(-size // 2) for size in sizes)
        self.codes_starts = starts(self.blocks)
        self.nested_starts = starts(nested_blocks)
        self.absmax_starts = self.codes_starts
        self.sums_starts: list[int] = []

    def add_codes(self) -> None:
        """Makes room for packed codes."""
        self.packed = self._take(self.packed_starts[-1])
        self.visible = self.size

    def add_sums(self, tile: int) -> None:
        """Makes room for the sums of programs that each look at so many elements."""
        programs = [-(-size // tile) for size in self.sizes]
        self.sums_starts = starts(_SUMS * count for count in programs)
        self.sums = self._take(self.sums_starts[-1])
        self.visible = self.size

    def add_scales(self, double_quant: bool, *, is_gathered: bool = False) -> None:
        """Makes room for all that becomes of the absmax, and for itself unless it is elsewhere."""
        if not double_quant:
            self.absmax = self._take(4 * self.absmax_starts[-1])
            self.visible = self.size
            return
        self.codes = self._take(self.codes_starts[-1])
        self.nested_absmax = self._take(4 * self.nested_starts[-1])
        self.offsets = self._take(4 * len(self.blocks))
        self.visible = self.size
        if not is_gathered:
            # torch's mean begins at a multiple of 16 bytes
            rooms = [count + -count % 4 for count in self.blocks]
            self.absmax_starts = starts(rooms)
            self.absmax = self._take(4 * self.absmax_starts[-1])
        self.scratch = self._take(_MEAN_ROOM)

    def _take(self, size: int) -> int:
        start = self.size
        self.size += size + -size % 256
        return start


@dataclass(frozen=True)
class _StoredScales:
    """Tells where the stored scales of a piece are in the input: positions."""

    absmax: int
    nested_absmax: int | None
    nested_offset: int
    offset: float  # what is to be put there


class _Measurement:
    """Measures the errors of weights that one call packs, with the scales of stored ones.

    Those are added to the input, which has not been read.
    """

    def __init__(
        self,
        batch: BatchInput,
        pieces: Sequence[WeightPiece],
        format: Format,
        stored: Sequence[Bitsandbytes4bit],
    ) -> None:
        self._batch = batch
        self._kernels = batch.buffers.gpu.kernels[measuring_purpose(format)]
        self.tile = self._kernels.numbers["tile"]  # elements that a program looks at
        self._scales = []
        for weight, piece in zip(stored, pieces, strict=True):
            self._scales.append(_add_scales(batch, weight, piece))

    def launches(self, out: _OutputLayout, rows: Sequence[Row]) -> list[Launch]:
        """Returns the launches that measure; rows are those of the weights that are packed."""
        base = self._batch.buffers.output.address + out.sums
        launches = []
        for row, scales, place in zip(rows, self._scales, out.sums_starts, strict=False):
            launches.append(self._launch(row, scales, base + place))
        return launches

    def _launch(self, row: Row, scales: _StoredScales, sums: int) -> Launch:
        tables = self._kernels.tables
        programs = -(-row.elements // self.tile)
        nested_offset = self._batch.put(scales.nested_offset, scales.offset)
        nested_absmax = nested_offset  # which is not read without double quantization
        if scales.nested_absmax is not None:
            nested_absmax = self._batch.address(scales.nested_absmax)
        arguments = (
            row.source,
            row.result,
            self._batch.address(scales.absmax),
            tables["nested"],
            nested_absmax,
            nested_offset,
            tables["values"],
            tables["bounds"],
            sums,
            sums + 8 * programs,
            sums + 24 * programs,
            row.elements,
            programs,
        )
        return Launch(self._kernels.functions["compare"], programs, arguments)

    def errors(self, view: memoryview, out: _OutputLayout) -> list[Errors]:
        """Returns what has been measured of each weight."""
        found = []
        for start, stop in pairwise(out.sums_starts):
            found.append(_errors_of(view[out.sums + start : out.sums + stop]))
        return found


def _add_scales(batch: BatchInput, weight: Bitsandbytes4bit, piece: WeightPiece) -> _StoredScales:
    """Adds the scales of a piece as they are stored."""
    stop = piece.start + piece.elements
    parts = cut_parts(dict(weight.parts), weight.blocksize, piece.start, stop)
    absmax = batch.add(parts["absmax"].file_range)
    nested_absmax = None
    if "nested_absmax" in parts:
        nested_absmax = batch.add(parts["nested_absmax"].file_range)
    return _StoredScales(absmax, nested_absmax, batch.take(4), weight.nested_offset or 0.0)


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
    measurement = _Measurement(batch, pieces, format, stored) if stored else None
    out = _OutputLayout([piece.elements for piece in pieces], format.blocksize)
    out.add_codes()
    if measurement is not None:
        out.add_sums(measurement.tile)
    if gathered is None:
        out.add_scales(format.double_quant)
    buffers.reserve(result=out.size)
    tensors = [piece.tensor for piece in pieces if piece.tensor is not None]
    loaded = load(batch, tensors, packing_steps(pieces[0].job.source, format))
    kernels = buffers.gpu.kernels[packing_purpose(format)]
    addresses = loaded.addresses
    launches = loaded.launches
    with buffers.timed(Activity.COMPUTE):
        first_block = pieces[0].start // format.blocksize
        absmax = _absmax_addresses(buffers, out, first_block, gathered)
        rows = _packing_rows(buffers, out, addresses, absmax)
        first = addresses[0]
        end = addresses[-1]
        launches.append(_look_for_non_finite(buffers, kernels, first, end))
        launches += _quantize(batch, kernels, rows)
        if gathered is None and format.double_quant:
            launches += _compress(batch, kernels, out, absmax)
        if measurement is not None:
            launches += measurement.launches(out, rows)
        buffers.execute(batch.stop, launches, out.visible)
    _check_finite(buffers, kernels, pieces, addresses)
    view = buffers.result.view
    codes = _region(view, out.packed, out.packed_starts[-1])
    scales = None
    if gathered is None:
        scales = _scales(view, out, format)
    errors = []
    if measurement is not None:
        errors = measurement.errors(view, out)
    return Packed(codes, scales, errors)


def _packing_rows(
    buffers: DriverBuffers, out: _OutputLayout, weights: Sequence[int], absmax: Sequence[int]
) -> list[Row]:
    """Returns the row of each weight, given the addresses of the weights and of their absmax."""
    codes = buffers.output.address + out.packed
    rows = []
    for number, elements in enumerate(out.sizes):
        address = codes + out.packed_starts[number]
        rows.append(Row(weights[number], address, absmax[number], elements))
    return rows


def compress(buffers: DriverBuffers, gathered: Gathered, format: Format) -> Scales:
    """Returns the scales of a large weight, whose absmax has gathered on the GPU."""
    memory = gathered.take()
    with buffers.timed(Activity.COMPUTE):
        batch = BatchInput(buffers)
        out = _OutputLayout([gathered.blocks * format.blocksize], format.blocksize)
        out.add_scales(format.double_quant, is_gathered=True)
        buffers.reserve(result=out.size)
        if format.double_quant:
            kernels = buffers.gpu.kernels[packing_purpose(format)]
            launches = _compress(batch, kernels, out, [memory.address])
            buffers.execute(batch.stop, launches, out.visible)
        else:
            buffers.fetch(out.absmax, memory.address, 4 * out.blocks[0])
    buffers.gpu.give_back(memory)
    return _scales(buffers.result.view, out, format)


def _absmax_addresses(
    buffers: DriverBuffers, out: _OutputLayout, first_block: int, gathered: Gathered | None
) -> list[int]:
    """Returns where the absmax of each weight is written, or of a piece from some block on."""
    if gathered is None:
        base = buffers.output.address + out.absmax
        starts = out.absmax_starts[:-1]
        return [base + 4 * start for start in starts]
    whole = gathered.memory(lambda blocks: buffers.gpu.allocate(4 * blocks))
    place = whole.address + 4 * first_block
    return [place]


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
    aligned = []
    others = []
    for row in rows:
        is_aligned = row.elements % kernels.numbers["slot"] == 0 and row.result % 4 == 0
        if is_aligned:
            aligned.append(row)
        else:
            others.append(row)
    launches = []
    for name, chosen in (("quantize_aligned", aligned), ("quantize_any", others)):
        if chosen:
            table = batch.tiled_table(chosen, kernels.numbers["tile"])
            arguments = (table.address, 0, kernels.tables["codes"], len(chosen))
            launches.append(Launch(kernels.functions[name], table.tiles, arguments))
    return launches


def _compress(
    batch: BatchInput, kernels: Kernels[int], out: _OutputLayout, absmax: Sequence[int]
) -> list[Launch]:
    """Returns the launches that quantize the absmax of weights, given their addresses."""
    base = batch.buffers.output.address
    launches = _average(batch, kernels, out, absmax)
    rows = []
    for number, blocks in enumerate(out.blocks):
        codes = base + out.codes + out.codes_starts[number]
        nested_absmax = base + out.nested_absmax + 4 * out.nested_starts[number]
        rows.append(Row(absmax[number], codes, nested_absmax, blocks))
    table = batch.tiled_table(rows, kernels.numbers["nested_tile"])
    arguments = (table.address, base + out.offsets, kernels.tables["middles"], len(rows))
    launches.append(Launch(kernels.functions["compress"], table.tiles, arguments))
    return launches


def _average(
    batch: BatchInput, kernels: Kernels[int], out: _OutputLayout, absmax: Sequence[int]
) -> list[Launch]:
    """Returns the launches that take the mean of each weight's absmax.

    A long one takes two launches of its own, one after the other in one scratch region.
    """
    functions = kernels.functions
    base = batch.buffers.output.address
    means = base + out.offsets
    scratch = base + out.scratch
    counts = out.blocks
    threads_of_each = [threads(count) for count in counts]
    table = batch.table([absmax, counts, threads_of_each])
    arguments = (table, means, len(counts))
    launches = [Launch(functions["mean"], len(counts), arguments)]
    for number, count in enumerate(counts):
        if count <= TORCH_BLOCK:
            continue
        blocks = thread_blocks(count, kernels.numbers["resident_blocks"])
        part = (absmax[number], scratch, count, blocks)
        total = (scratch, means + 4 * number, blocks, count)
        launches.append(Launch(functions["mean_part"], blocks, part))
        launches.append(Launch(functions["mean_total"], 1, total))
    return launches


def _scales(view: memoryview, out: _OutputLayout, format: Format) -> Scales:
    """Returns the scales that have come down to the host."""
    if not format.double_quant:
        absmax = _region(view, out.absmax, 4 * out.absmax_starts[-1])
        return Scales(absmax, None, None)
    codes = _region(view, out.codes, out.codes_starts[-1])
    nested_absmax = _region(view, out.nested_absmax, 4 * out.nested_starts[-1])
    offsets = _region(view, out.offsets, 4 * len(out.blocks))
    return Scales(codes, nested_absmax, offsets.cast("f").tolist())


def _region(view: memoryview, start: int, size: int) -> memoryview:
    return view[start : start + size]
