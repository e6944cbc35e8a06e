"""A plan's shards as tasks for workers without torch: the counterpart of with_torch/pack.py, with the same bytes.

A batch of weights and the tables that describe it go up in one copy; one launch looks for NaN and infinity, one or two
pack, two or more do the nested step; everything comes down in one copy. Regions of the output, those that come down
first:

    flag, packed codes, codes of absmax, nested_absmax, offsets | absmax, partial sums
    flag, packed codes, absmax                                    without double quantization
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

from nf4conv.checkpoint.header import DTYPE_BITS
from nf4conv.checkpoint.plan import PackJob, Plan
from nf4conv.codec.mean_order import TORCH_BLOCK, thread_blocks, threads
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP, NESTED_BLOCKSIZE
from nf4conv.format.layout import DTYPE_NAMES, block_count
from nf4conv.pipeline.loop import Activity, aligned
from nf4conv.pipeline.shards import (
    Gathered,
    NonFiniteError,
    ShardProgress,
    ShardTask,
    fill,
    json_blobs,
    pack_groups,
    spans,
)
from nf4conv.pipeline.without_torch.bundle import Action, Purpose
from nf4conv.pipeline.without_torch.driver import DeviceMemory
from nf4conv.pipeline.without_torch.worker import CudaWorker, Launch

_EXPONENTS: Final[dict[str, tuple[Literal["H", "I"], int]]] = {
    "F32": ("I", 0x7F800000),
    "BF16": ("H", 0x7F80),
    "F16": ("H", 0x7C00),
}
_MAPS = {
    **{name: struct.pack("<16f", *book.values) for name, book in CODEBOOKS.items()},
    "dynamic": struct.pack("<256f", *DYNAMIC_MAP),
}


def purpose_of(plan: Plan) -> Purpose | None:
    """What kernels a plan needs; None if it needs more than is here: casts, transposed or encoded weights."""
    format = plan.format
    is_plain = all(
        bool(job.stored) or (not job.is_cut_out and DTYPE_NAMES.get(job.source.dtype) == format.dtype)
        if isinstance(job, PackJob)
        else job.dtype == job.source.dtype and job.source.encoding is None
        for job in plan.jobs
    )
    if not is_plain:
        return None
    return Purpose(Action.PACK, format.dtype, format.quant_type, format.blocksize, format.scales)


def shard_tasks(progress: ShardProgress, piece: int) -> list[ShardTask[CudaWorker]]:
    """Everything that is to be done for a shard, in pieces of so many source bytes."""
    tasks: list[ShardTask[CudaWorker]] = []
    for jobs in pack_groups(progress.shard, piece):
        job, pieces = jobs[0], spans(jobs[0], piece)
        if len(pieces) > 1:
            absmax: Gathered[DeviceMemory] = Gathered(block_count(job.elements, progress.format.blocksize), len(pieces))
            tasks += [PackPiece(progress, job.source.file, job, absmax, *part) for part in pieces]
        else:
            tasks.append(PackBatch(progress, job.source.file, jobs))
    return fill(progress, tasks, piece)


Row = tuple[int, int, int, int]
"""Of a kernel's table: three addresses and a count."""


class _Tables:
    """Tables of integers behind the weights in a worker's input, to go up with them in one copy."""

    def __init__(self, worker: CudaWorker, start: int) -> None:
        self._worker = worker
        self.stop = start

    def add(self, columns: Sequence[Iterable[int]]) -> int:
        """The device address of a table, whose columns stand one after the other."""
        raw = array("q", [value for column in columns for value in column]).tobytes()
        start, self.stop = self.stop, self.stop + aligned(len(raw))
        self._worker.source.view[start : start + len(raw)] = raw
        return self._worker.input.address + start

    def add_tiled(self, rows: Sequence[Row], tile: int) -> tuple[int, int]:
        """The address of a table of rows and their first tiles; the number of tiles."""
        *first_tiles, tiles = _starts(-(-row[3] // tile) for row in rows)
        return self.add([*zip(*rows, strict=True), first_tiles]), tiles


class _Output:
    """Where the results of some weights lie in a worker's output: starts of regions, and of each weight in them."""

    def __init__(self, sizes: Sequence[int], blocksize: int, double_quant: bool) -> None:
        self.double_quant = double_quant
        self.blocks = [block_count(size, blocksize) for size in sizes]
        self.packed_starts = _starts(-(-size // 2) for size in sizes)
        self.codes_starts = _starts(self.blocks)
        self.nested_starts = _starts(block_count(count, NESTED_BLOCKSIZE) for count in self.blocks)
        # torch's mean of a long vector begins at a multiple of 16 bytes; without double_quant absmax is itself written
        self.absmax_starts = _starts(count + -count % 4 * double_quant for count in self.blocks)
        self.size = 0
        self.flag = self._take(4)
        self.packed = self._take(self.packed_starts[-1])
        if double_quant:
            self.codes = self._take(self.codes_starts[-1])
            self.nested_absmax = self._take(4 * self.nested_starts[-1])
            self.means = self._take(4 * len(sizes))
            self.visible = self.size
            self.absmax = self._take(4 * self.absmax_starts[-1])
            self.scratch = self._take(4 * 2**16)
        else:
            self.absmax = self._take(4 * self.absmax_starts[-1])
            self.visible = self.size

    def _take(self, size: int) -> int:
        start = self.size
        self.size += size + -size % 256
        return start


def _starts(sizes: Iterable[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))


@dataclass(frozen=True)
class PackBatch(ShardTask[CudaWorker]):
    """Weights that fit into a worker's buffer together and are neighbours in the shard."""

    jobs: tuple[PackJob, ...]

    def run(self, worker: CudaWorker) -> None:
        format = self.progress.format
        positions = _read(worker, [(job, *job.source_range) for job in self.jobs])
        with worker.timed(Activity.COMPUTE):
            sizes = [job.elements for job in self.jobs]
            out = _Output(sizes, format.blocksize, format.double_quant)
            absmax = [worker.output.address + out.absmax + 4 * start for start in out.absmax_starts[:-1]]
            tables = _Tables(worker, positions[-1])
            launches = [
                _look_for_non_finite(worker, positions[-1], out),
                *_quantize(worker, tables, positions[:-1], sizes, out, absmax),
            ]
            if format.double_quant:
                launches += _compress(worker, tables, out, absmax)
            worker.execute(tables.stop, launches, out.visible)
        _check_finite(worker, self.jobs, positions)
        host = worker.result.view
        with worker.timed(Activity.WRITE):
            self.progress.writer.write(self.jobs[0].offsets[0], host[out.packed : out.packed + out.packed_starts[-1]])
            offsets = _write_scales(self.progress, self.jobs, host, out)
        self.progress.done(json_blobs(format, self.jobs, offsets))


@dataclass(frozen=True)
class PackPiece(ShardTask[CudaWorker]):
    """Elements start … stop of a large weight."""

    job: PackJob
    absmax: Gathered[DeviceMemory]
    start: int
    stop: int

    def run(self, worker: CudaWorker) -> None:
        blocksize = self.progress.format.blocksize
        itemsize = DTYPE_BITS[self.job.source.dtype] // 8
        begin = self.job.source_range[0]
        positions = _read(worker, [(self.job, begin + self.start * itemsize, begin + self.stop * itemsize)])
        with worker.timed(Activity.COMPUTE):
            whole = self.absmax.memory(lambda blocks: worker.engine.allocate(4 * blocks))
            absmax = whole.address + 4 * (self.start // blocksize)
            sizes = [self.stop - self.start]
            out = _Output(sizes, blocksize, double_quant=False)
            tables = _Tables(worker, positions[-1])
            launches = [
                _look_for_non_finite(worker, positions[-1], out),
                *_quantize(worker, tables, positions[:-1], sizes, out, [absmax]),
            ]
            worker.execute(tables.stop, launches, out.packed + out.packed_starts[-1])
        _check_finite(worker, [self.job], positions)
        with worker.timed(Activity.WRITE):
            codes = worker.result.view[out.packed : out.packed + out.packed_starts[-1]]
            self.progress.writer.write(self.job.offsets[0] + self.start // 2, codes)
        memory = self.absmax.done()
        if memory is None:
            self.progress.done()
            return
        offset = _write_large_scales(worker, self.progress, self.job, memory.address, self.absmax.blocks)
        worker.engine.give_back(memory)
        self.progress.done(json_blobs(self.progress.format, [self.job], [offset]))


def _read(worker: CudaWorker, parts: Sequence[tuple[PackJob, int, int]]) -> list[int]:
    """Read byte ranges of weights to the worker's input; their positions there, and where the last one ends.

    What lies between them is zeroed: the search for NaN looks at all of it.
    """
    positions = _starts(aligned(stop - start) for _, start, stop in parts)
    view = worker.source.view
    worker.fill(view, [(job.source.file, start, stop) for job, start, stop in parts], positions)
    for (_, start, stop), position, following in zip(parts, positions, positions[1:], strict=False):
        used = position + stop - start
        if used < following:
            view[used:following] = bytes(following - used)
    return positions


def _look_for_non_finite(worker: CudaWorker, size: int, out: _Output) -> Launch:
    """The launch that looks through so many bytes of a worker's input, and sets the flag, which is cleared now."""
    worker.stream.clear(worker.output.address + out.flag, 4)
    words = size // 4
    return (
        "finite",
        -(-words // worker.engine.bundle.numbers["finite_tile"]),
        (worker.input.address, worker.output.address + out.flag, words),
    )


def _quantize(
    worker: CudaWorker,
    tables: _Tables,
    positions: Sequence[int],
    sizes: Sequence[int],
    out: _Output,
    absmax: Sequence[int],
) -> list[Launch]:
    bundle = worker.engine.bundle
    rows: dict[str, list[Row]] = {"quantize_aligned": [], "quantize_any": []}
    for position, start, scales, size in zip(positions, out.packed_starts, absmax, sizes, strict=False):
        target = worker.output.address + out.packed + start
        fast = size % bundle.numbers["slot"] == 0 and target % 4 == 0
        rows["quantize_aligned" if fast else "quantize_any"].append(
            (worker.input.address + position, target, scales, size)
        )
    launches: list[Launch] = []
    for name, chosen in rows.items():
        if chosen:
            table, tiles = tables.add_tiled(chosen, bundle.numbers["tile"])
            launches.append((name, tiles, (table, 0, worker.engine.tables["codes"], len(chosen))))
    return launches


def _compress(worker: CudaWorker, tables: _Tables, out: _Output, absmax: Sequence[int]) -> list[Launch]:
    base = worker.output.address
    rows = [
        (scales, base + out.codes + codes, base + out.nested_absmax + 4 * nested, count)
        for scales, codes, nested, count in zip(absmax, out.codes_starts, out.nested_starts, out.blocks, strict=False)
    ]
    table, tiles = tables.add_tiled(rows, worker.engine.bundle.numbers["nested_tile"])
    means = base + out.means
    return [
        *_means(worker, tables, absmax, out.blocks, means, base + out.scratch),
        ("compress", tiles, (table, means, worker.engine.tables["middles"], len(rows))),
    ]


def _means(
    worker: CudaWorker, tables: _Tables, absmax: Sequence[int], counts: Sequence[int], means: int, scratch: int
) -> list[Launch]:
    """The mean of each absmax vector; long ones each take two launches, one after the other in one scratch region."""
    table = tables.add([absmax, counts, [threads(count) for count in counts]])
    launches: list[Launch] = [("mean", len(counts), (table, means, len(counts)))]
    for index, (values, count) in enumerate(zip(absmax, counts, strict=True)):
        if count > TORCH_BLOCK:
            blocks = thread_blocks(count, worker.engine.bundle.numbers["resident_blocks"])
            launches.append(("mean_part", blocks, (values, scratch, count, blocks)))
            launches.append(("mean_total", 1, (scratch, means + 4 * index, blocks, count)))
    return launches


def _check_finite(worker: CudaWorker, jobs: Sequence[PackJob], positions: Sequence[int]) -> None:
    if not any(worker.result.view[:4]):
        return
    for job, start, stop in zip(jobs, positions, positions[1:], strict=False):
        code, exponent = _EXPONENTS[job.source.dtype]
        if any(value & exponent == exponent for value in worker.source.view[start:stop].cast(code)):
            raise NonFiniteError(job)


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
    worker: CudaWorker, progress: ShardProgress, job: PackJob, absmax: int, blocks: int
) -> float | None:
    """As `_write_scales` for a weight whose absmax has gathered on the device: it comes down in pieces."""
    maps = memoryview(_MAPS[progress.format.quant_type])
    step = (len(worker.result.view) // 8) // NESTED_BLOCKSIZE * NESTED_BLOCKSIZE
    chunks = [(start, min(step, blocks - start)) for start in range(0, blocks, step)]
    if not progress.format.double_quant:
        for start, count in chunks:
            worker.stream.to_host(worker.result.address, absmax + 4 * start, 4 * count)
            worker.stream.wait()
            progress.writer.write(job.offsets[1] + 4 * start, worker.result.view[: 4 * count])
        progress.writer.write(job.offsets[2], maps)
        return None
    tables = _Tables(worker, 0)
    base, view = worker.output.address, worker.result.view
    launches = _means(worker, tables, [absmax], [blocks], base, base + 256)
    worker.execute(tables.stop, launches, 4)
    [offset] = view[:4].cast("f").tolist()
    for start, count in chunks:
        with worker.timed(Activity.COMPUTE):
            codes, nested = 256, 256 + count + -count % 256  # behind the mean
            nested_count = block_count(count, NESTED_BLOCKSIZE)
            tables = _Tables(worker, 0)
            row = (absmax + 4 * start, base + codes, base + nested, count)
            table, tiles = tables.add_tiled([row], worker.engine.bundle.numbers["nested_tile"])
            launch = ("compress", tiles, (table, base, worker.engine.tables["middles"], 1))
            worker.execute(tables.stop, [launch], nested + 4 * nested_count)
        with worker.timed(Activity.WRITE):
            place = start // NESTED_BLOCKSIZE * 4
            progress.writer.write(job.offsets[1] + start, view[codes : codes + count])
            progress.writer.write(job.offsets[3] + place, view[nested : nested + 4 * nested_count])
    progress.writer.write(job.offsets[2], maps)
    progress.writer.write(job.offsets[4], memoryview(_MAPS["dynamic"]))
    return float(offset)
