"""Weights packed to 4 bits on the GPU.

A batch of weights and the tables that describe it go up in one copy. Where they are encoded, a
launch for each decodes it; where they are in another dtype, one casts them all. One launch looks
for NaN and infinity, one or two pack, two or more do the nested step. Where errors are measured, a
launch for each weight does so. Everything comes down in one copy (output.py).
"""

from collections.abc import Sequence

from nf4conv.codec.mean_order import TORCH_BLOCK, thread_blocks, threads
from nf4conv.format.layout import Format
from nf4conv.run.device.on_driver.batch.buffers import FLAG, HEAD, DriverBuffers, Launch
from nf4conv.run.device.on_driver.batch.input import BatchInput, Row
from nf4conv.run.device.on_driver.batch.loading import load
from nf4conv.run.device.on_driver.batch.measuring import Measurement
from nf4conv.run.device.on_driver.batch.output import OutputLayout
from nf4conv.run.device.on_driver.capability import packing_purpose, packing_steps
from nf4conv.run.device.on_driver.kernels import Kernels
from nf4conv.run.device.protocol import Gathered, NonFiniteError, Packed, Scales
from nf4conv.run.pieces import WeightPiece
from nf4conv.run.worker import Activity
from nf4conv.sources.stored_weights import StoredWeight


def pack(
    buffers: DriverBuffers,
    pieces: Sequence[WeightPiece],
    format: Format,
    gathered: Gathered | None,
    stored: Sequence[StoredWeight],
) -> Packed:
    """Packs weights, or a piece of a large one: `Device.pack` of device/protocol.py."""
    batch = BatchInput(buffers)
    measurement = Measurement(batch, pieces, format, stored) if stored else None
    out = OutputLayout([piece.elements for piece in pieces], format.blocksize)
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
    buffers: DriverBuffers, out: OutputLayout, weights: Sequence[int], absmax: Sequence[int]
) -> list[Row]:
    """Returns the row of each weight, given the addresses of the weights and of their absmax."""
    codes = buffers.output.address + out.packed
    rows = []
    for number, elements in enumerate(out.sizes):
        address = codes + out.packed_starts[number]
        rows.append(Row(weights[number], address, absmax[number], elements))
    return rows


def compress(buffers: DriverBuffers, gathered: Gathered, elements: int, format: Format) -> Scales:
    """Returns the scales of a large weight, whose absmax has gathered on the GPU."""
    memory = gathered.take()
    with buffers.timed(Activity.COMPUTE):
        batch = BatchInput(buffers)
        out = OutputLayout([elements], format.blocksize)
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
    buffers: DriverBuffers, out: OutputLayout, first_block: int, gathered: Gathered | None
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
    batch: BatchInput, kernels: Kernels[int], out: OutputLayout, absmax: Sequence[int]
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
    batch: BatchInput, kernels: Kernels[int], out: OutputLayout, absmax: Sequence[int]
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


def _scales(view: memoryview, out: OutputLayout, format: Format) -> Scales:
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
