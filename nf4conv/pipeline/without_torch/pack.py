"""A plan's shards as tasks for workers without torch: the counterpart of with_torch/pack.py, with the same bytes.

A batch of weights and the tables that describe it go up in one copy; where they are encoded, a launch for each decodes
it; one launch looks for NaN and infinity, one or two pack, two or more do the nested step; everything comes down in one
copy. Regions of the output, those that come down first:

    head, packed codes, codes of absmax, nested_absmax, offsets | absmax, partial sums
    head, packed codes, absmax                                    without double quantization
"""

import struct
from collections.abc import Sequence
from typing import Final

from nf4conv.checkpoint.encoded_pieces import Piece
from nf4conv.checkpoint.header import DTYPE_BITS, TensorInfo
from nf4conv.checkpoint.plan import CopyJob, PackJob, Plan
from nf4conv.codec.mean_order import TORCH_BLOCK, thread_blocks, threads
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP, NESTED_BLOCKSIZE
from nf4conv.format.layout import TAGS, Format, block_count
from nf4conv.pipeline.loop import Activity, aligned
from nf4conv.pipeline.shards import (
    Gathered,
    NonFiniteError,
    ShardProgress,
    ShardTask,
    fill,
    json_blobs,
    weight_pieces,
    weight_tasks,
)
from nf4conv.pipeline.without_torch.bundle import Action, Kernels, Purpose
from nf4conv.pipeline.without_torch.driver import DeviceMemory
from nf4conv.pipeline.without_torch.reading import (
    FLAG,
    HEAD,
    Reading,
    Row,
    add_tensor,
    bring,
    bytes_of,
    purposes_of_tensor,
    starts,
)
from nf4conv.pipeline.without_torch.worker import CudaWorker, Launch

RETURNED: Final = 3 / 8
"""Bytes that come back from the device for each that goes there; of 2-byte weights in blocks of 32: 1/4 in codes, 1/16
in absmax, 1/64 in its codes."""

_MEAN_ROOM: Final = 4 * 2**16
"""Bytes that the mean of a long vector needs for the sums of its parts."""

_MAPS = {
    **{name: struct.pack("<16f", *book.values) for name, book in CODEBOOKS.items()},
    "dynamic": struct.pack("<256f", *DYNAMIC_MAP),
}


def purpose_of_format(format: Format) -> Purpose:
    return Purpose(Action.PACK, (format.dtype, format.quant_type, format.blocksize, format.scales))


def purposes_of(plan: Plan) -> frozenset[Purpose] | None:
    """What kernels a plan needs; None if it needs more than is here: casts, transposed weights, some encodings."""
    found = {purpose_of_format(plan.format)}
    for job in plan.jobs:
        if isinstance(job, CopyJob):
            if job.dtype != job.source.dtype or job.source.encoding is not None:
                return None
        elif job.stored is None:
            pieces = _whole(job)
            needed = purposes_of_tensor(pieces[0].tensor, TAGS[plan.format.dtype]) if pieces else None
            if needed is None:
                return None
            found |= needed
    return frozenset(found)


def _whole(job: PackJob) -> list[Piece]:
    """A weight in one piece; none for one that must be read as a whole matrix."""
    enough = 8 * max(job.elements, 1)
    return weight_pieces(job, enough, enough, 1)


def shard_tasks(progress: ShardProgress, piece: int) -> list[ShardTask[CudaWorker]]:
    """Everything that is to be done for a shard, in pieces of so many bytes, of the source and decoded."""
    tag = TAGS[progress.format.dtype]
    tasks = weight_tasks(
        progress,
        piece,
        piece * 8 // DTYPE_BITS[tag],
        lambda job: max(aligned(job.source_bytes), aligned(bytes_of(tag, job.elements))),  # as it is read, and decoded
        lambda job: job.source.encoding is not None,
        _pack_piece,
        _pack_batch,
    )
    return fill(progress, tasks, piece)


def _load(reading: Reading, tensors: Sequence[TensorInfo], format: Format) -> tuple[list[int], list[Launch]]:
    """Read weights, and decode them if they are encoded: all of them, or none.

    Returns:
        addresses: where each begins on the device, and where the last one ends.
        launches: what decodes them.
    """
    worker, tag = reading.worker, TAGS[format.dtype]
    placed = [add_tensor(reading, tensor) for tensor in tensors]
    reading.read()
    if tensors[0].encoding is None:
        return [reading.address(place) for place in [*(parts["values"] for parts in placed), reading.stop]], []
    positions = starts(aligned(bytes_of(tag, tensor.elements)) for tensor in tensors)
    base = worker.scratch(positions[-1])
    addresses = [base + position for position in positions]
    for tensor, stop in zip(tensors, addresses[1:], strict=True):
        gap = -bytes_of(tag, tensor.elements) % 64
        worker.stream.clear(stop - gap, gap)  # the search for NaN looks at all of it
    each = zip(tensors, placed, addresses, strict=False)
    return addresses, [bring(reading, tensor, parts, tag, address) for tensor, parts, address in each]


class _Output:
    """Where the results of some weights lie in a worker's output: starts of regions, and of each weight in them."""

    def __init__(self, sizes: Sequence[int], blocksize: int, double_quant: bool) -> None:
        self.double_quant = double_quant
        self.blocks = [block_count(size, blocksize) for size in sizes]
        self.packed_starts = starts(-(-size // 2) for size in sizes)
        self.codes_starts = starts(self.blocks)
        self.nested_starts = starts(block_count(count, NESTED_BLOCKSIZE) for count in self.blocks)
        # torch's mean begins at a multiple of 16 bytes
        self.absmax_starts = starts(count + -count % 4 for count in self.blocks) if double_quant else self.codes_starts
        self.size = HEAD
        self.packed = self._take(self.packed_starts[-1])
        if double_quant:
            self.codes = self._take(self.codes_starts[-1])
            self.nested_absmax = self._take(4 * self.nested_starts[-1])
            self.means = self._take(4 * len(sizes))
            self.visible = self.size
            self.absmax = self._take(4 * self.absmax_starts[-1])
            self.scratch = self._take(_MEAN_ROOM)
        else:
            self.absmax = self._take(4 * self.absmax_starts[-1])
            self.visible = self.size

    def _take(self, size: int) -> int:
        start = self.size
        self.size += size + -size % 256
        return start


def _pack_batch(progress: ShardProgress, jobs: tuple[PackJob, ...], worker: CudaWorker) -> None:
    """Weights that fit into a worker's buffer together and are neighbours in the shard."""
    format = progress.format
    reading = Reading(worker)
    addresses, launches = _load(reading, [_whole(job)[0].tensor for job in jobs], format)
    kernels = worker.engine.kernels[purpose_of_format(format)]
    with worker.timed(Activity.COMPUTE):
        sizes = [job.elements for job in jobs]
        out = _Output(sizes, format.blocksize, format.double_quant)
        worker.reserve(result=out.size)
        base = worker.output.address
        absmax = [base + out.absmax + 4 * start for start in out.absmax_starts[:-1]]
        codes = [base + out.packed + start for start in out.packed_starts[:-1]]
        rows = list(zip(addresses, codes, absmax, sizes, strict=False))
        launches.append(_look_for_non_finite(worker, kernels, addresses[0], addresses[-1]))
        launches += _quantize(reading, kernels, rows)
        if format.double_quant:
            launches += _compress_all(reading, kernels, out, absmax)
        worker.execute(reading.stop, launches, out.visible)
    _check_finite(worker, kernels, jobs, addresses)
    host = worker.result.view
    with worker.timed(Activity.WRITE):
        progress.writer.write(jobs[0].offsets[0], host[out.packed : out.packed + out.packed_starts[-1]])
        offsets = _write_scales(progress, jobs, host, out)
    progress.done(json_blobs(format, jobs, offsets))


def _pack_piece(
    progress: ShardProgress, job: PackJob, piece: Piece, gathered: Gathered[DeviceMemory], worker: CudaWorker
) -> None:
    """A piece of a large weight."""
    format, (tensor, start) = progress.format, piece
    reading = Reading(worker)
    addresses, launches = _load(reading, [tensor], format)
    kernels = worker.engine.kernels[purpose_of_format(format)]
    with worker.timed(Activity.COMPUTE):
        whole = gathered.memory(lambda blocks: worker.engine.allocate(4 * blocks))
        absmax = whole.address + 4 * (start // format.blocksize)
        size = -(-tensor.elements // 2)
        worker.reserve(result=HEAD + size)
        row = addresses[0], worker.output.address + HEAD, absmax, tensor.elements
        launches.append(_look_for_non_finite(worker, kernels, *addresses))
        launches += _quantize(reading, kernels, [row])
        worker.execute(reading.stop, launches, HEAD + size)
    _check_finite(worker, kernels, [job], addresses)
    with worker.timed(Activity.WRITE):
        codes = worker.result.view[HEAD : HEAD + size]
        progress.writer.write(job.offsets[0] + start // 2, codes)
    memory = gathered.done()
    if memory is None:
        progress.done()
        return
    offset = _write_large_scales(worker, kernels, progress, job, memory.address, gathered.blocks)
    worker.engine.give_back(memory)
    progress.done(json_blobs(format, [job], [offset]))


def _look_for_non_finite(worker: CudaWorker, kernels: Kernels[int], start: int, stop: int) -> Launch:
    """The launch that looks through some bytes on the device, and sets the flag, which is cleared now."""
    worker.stream.clear(worker.output.address, HEAD)
    words = (stop - start) // 4
    programs = -(-words // kernels.numbers["finite_tile"])
    return kernels.functions["finite"], programs, (start, worker.output.address + FLAG, words)


def _check_finite(worker: CudaWorker, kernels: Kernels[int], jobs: Sequence[PackJob], addresses: Sequence[int]) -> None:
    if not any(worker.result.view[FLAG : FLAG + 4]):
        return
    for job, start, stop in zip(jobs, addresses, addresses[1:], strict=False):
        worker.execute(0, [_look_for_non_finite(worker, kernels, start, stop)], HEAD)
        if any(worker.result.view[FLAG : FLAG + 4]):
            raise NonFiniteError(job)


def _quantize(reading: Reading, kernels: Kernels[int], rows: Sequence[Row]) -> list[Launch]:
    """What packs weights: of each the addresses of the weight, of its codes and of its absmax, and its elements."""
    chosen: dict[str, list[Row]] = {"quantize_aligned": [], "quantize_any": []}
    for row in rows:
        is_aligned = row[3] % kernels.numbers["slot"] == 0 and row[1] % 4 == 0
        chosen["quantize_aligned" if is_aligned else "quantize_any"].append(row)
    launches: list[Launch] = []
    for name, of_kind in chosen.items():
        if of_kind:
            table, tiles = reading.tiled_table(of_kind, kernels.numbers["tile"])
            launches.append((kernels.functions[name], tiles, (table, 0, kernels.tables["codes"], len(of_kind))))
    return launches


def _average(
    reading: Reading, kernels: Kernels[int], vectors: Sequence[tuple[int, int]], means: int, room: int
) -> list[Launch]:
    """The mean of each absmax vector; long ones each take two launches, one after the other in one scratch region."""
    addresses, counts = zip(*vectors, strict=True)
    table = reading.table([addresses, counts, [threads(count) for count in counts]])
    functions = kernels.functions
    launches: list[Launch] = [(functions["mean"], len(counts), (table, means, len(counts)))]
    for index, (values, count) in enumerate(vectors):
        if count > TORCH_BLOCK:
            blocks = thread_blocks(count, kernels.numbers["resident_blocks"])
            launches.append((functions["mean_part"], blocks, (values, room, count, blocks)))
            launches.append((functions["mean_total"], 1, (room, means + 4 * index, blocks, count)))
    return launches


def _compress(reading: Reading, kernels: Kernels[int], rows: Sequence[Row], means: int) -> Launch:
    """What quantizes absmax: of each weight the addresses of absmax, of its codes and of nested_absmax, its blocks."""
    table, tiles = reading.tiled_table(rows, kernels.numbers["nested_tile"])
    return kernels.functions["compress"], tiles, (table, means, kernels.tables["middles"], len(rows))


def _compress_all(reading: Reading, kernels: Kernels[int], out: _Output, absmax: Sequence[int]) -> list[Launch]:
    base = reading.worker.output.address
    rows = [
        (scales, base + out.codes + codes, base + out.nested_absmax + 4 * nested, count)
        for scales, codes, nested, count in zip(absmax, out.codes_starts, out.nested_starts, out.blocks, strict=False)
    ]
    vectors = list(zip(absmax, out.blocks, strict=True))
    averaging = _average(reading, kernels, vectors, base + out.means, base + out.scratch)
    return [*averaging, _compress(reading, kernels, rows, base + out.means)]


def _write_scales(
    progress: ShardProgress, jobs: Sequence[PackJob], host: memoryview, out: _Output
) -> Sequence[float | None]:
    """Write all components of weights but their codes and JSON blobs; returns their nested_offsets."""
    count = len(jobs)
    quant_map = memoryview(_MAPS[progress.format.quant_type] * count)
    if not out.double_quant:
        _write_parts(progress, jobs[0], [host[out.absmax : out.absmax + 4 * out.absmax_starts[-1]], quant_map])
        return [None] * count
    codes = host[out.codes : out.codes + out.codes_starts[-1]]
    nested_absmax = host[out.nested_absmax : out.nested_absmax + 4 * out.nested_starts[-1]]
    _write_parts(progress, jobs[0], [codes, quant_map, nested_absmax, memoryview(_MAPS["dynamic"] * count)])
    return host[out.means : out.means + 4 * count].cast("f").tolist()


def _write_parts(progress: ShardProgress, first: PackJob, parts: Sequence[memoryview]) -> None:
    # parts stand in the order of layout.components, of which the packed codes are the first
    for offset, part in zip(first.offsets[1:], parts, strict=True):
        progress.writer.write(offset, part)


def _write_large_scales(
    worker: CudaWorker, kernels: Kernels[int], progress: ShardProgress, job: PackJob, absmax: int, blocks: int
) -> float | None:
    """As `_write_scales` for a weight whose absmax has gathered on the device: it comes down in pieces."""
    maps = memoryview(_MAPS[progress.format.quant_type])
    step = len(worker.result.view) // 8 // NESTED_BLOCKSIZE * NESTED_BLOCKSIZE  # whose scales, plain or nested, fit
    chunks = [(start, min(step, blocks - start)) for start in range(0, blocks, step)]
    if not progress.format.double_quant:
        for start, count in chunks:
            worker.stream.to_host(worker.result.address, absmax + 4 * start, 4 * count)
            worker.stream.wait()
            progress.writer.write(job.offsets[1] + 4 * start, worker.result.view[: 4 * count])
        progress.writer.write(job.offsets[2], maps)
        return None
    reading, mean = Reading(worker), worker.output.address
    launches = _average(reading, kernels, [(absmax, blocks)], mean, mean + HEAD)
    worker.execute(reading.stop, launches, 4)
    [offset] = worker.result.view[:4].cast("f").tolist()
    for start, count in chunks:
        with worker.timed(Activity.COMPUTE):
            codes, nested = HEAD, HEAD + count + -count % 256  # behind the mean
            size = nested + 4 * block_count(count, NESTED_BLOCKSIZE)
            reading = Reading(worker)
            launch = _compress(reading, kernels, [(absmax + 4 * start, mean + codes, mean + nested, count)], mean)
            worker.execute(reading.stop, [launch], size)
        with worker.timed(Activity.WRITE):
            place, view = start // NESTED_BLOCKSIZE * 4, worker.result.view
            progress.writer.write(job.offsets[1] + start, view[codes : codes + count])
            progress.writer.write(job.offsets[3] + place, view[nested:size])
    progress.writer.write(job.offsets[2], maps)
    progress.writer.write(job.offsets[4], memoryview(_MAPS["dynamic"]))
    return float(offset)
