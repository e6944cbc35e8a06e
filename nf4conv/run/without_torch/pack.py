"""A plan's shards as tasks for workers without torch: the counterpart of with_torch/pack.py, with
the same bytes.

A batch of weights and the tables that describe it go up in one copy; where they are encoded, a
launch for each decodes it, and where they are in another dtype one casts them all; one launch looks
for NaN and infinity, one or two pack, two or more do the nested step; where errors are measured
(proof.py), a launch for each does so; everything comes down in one copy. Regions of the output,
those that come down first:

    head, packed codes, sums of errors, codes of absmax, nested_absmax, offsets | absmax, partial sums
    head, packed codes, sums of errors, absmax                                    without double quantization
"""

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

from nf4conv.codec.mean_order import TORCH_BLOCK, thread_blocks, threads
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP, NESTED_BLOCKSIZE
from nf4conv.format.layout import TAGS, Format, block_count
from nf4conv.plan.jobs import CopyJob, Job, PackJob, Plan
from nf4conv.report.measured import PieceErrors
from nf4conv.run import shards
from nf4conv.run.loop import Activity, aligned
from nf4conv.run.without_torch.bundle import Action, Kernels, Purpose
from nf4conv.run.without_torch.convert import convert, most_elements
from nf4conv.run.without_torch.driver import DeviceMemory
from nf4conv.run.without_torch.reading import (
    Reading,
    Row,
    bytes_of,
    load,
    purposes_of_tensor,
    starts,
)
from nf4conv.run.without_torch.worker import FLAG, HEAD, CudaWorker, Launch
from nf4conv.sources.encodings.pieces import Piece, cut_parts
from nf4conv.sources.stored_weights import StoredWeight
from nf4conv.sources.tensors import TensorInfo

_RETURNED: Final = 3 / 8
"""Bytes of a packed weight for each that it had; of 2-byte weights in blocks of 32: 1/4 in codes,
1/16 in absmax, 1/64 in its codes.
"""

# pieces of a weight that is encoded which are decoded at a time, as far as a piece holds them
_DECODED: Final = 2
_MEAN_ROOM: Final = (
    4 * 2**16
)  # bytes that the mean of a long vector needs for the sums of its parts
_ENOUGH: Final = 2**62  # more elements than there are
_SUMS: Final = (
    32  # bytes of a program's sums, see kernels/error.py: two float32, two float64, an int64
)

_MAPS = {
    **{name: bytearray(struct.pack("<16f", *book.values)) for name, book in CODEBOOKS.items()},
    "dynamic": bytearray(struct.pack("<256f", *DYNAMIC_MAP)),
}


def _purpose(format: Format, action: Action) -> Purpose:
    details = (format.dtype, format.quant_type, format.blocksize, format.scales)
    return Purpose(action, details if action is Action.PACK else (*details, format.double_quant))


def purposes_of(plan: Plan, *, is_compared: bool = False) -> frozenset[Purpose] | None:
    """What kernels a plan needs; None if it needs more than is here: transposed weights, some
    encodings and dtypes.

    `is_compared` says whether errors are to be measured.
    """
    needed = {purposes_of_job(job, plan.format, is_compared=is_compared) for job in plan.jobs}
    return None if None in needed else frozenset[Purpose]().union(*filter(None, needed))


def purposes_of_job(
    job: Job, format: Format, *, is_compared: bool = False
) -> frozenset[Purpose] | None:
    """As `purposes_of`."""
    if isinstance(job, CopyJob):
        pieces = shards.pieces_of(job.source, _ENOUGH) if job.is_changed else ()
        first = next(iter(pieces), None)  # as all others are
        return frozenset() if first is None else purposes_of_tensor(first.tensor, job.steps)
    if job.stored is not None:
        return None if is_compared else frozenset()
    pieces = _whole(job)
    needed = purposes_of_tensor(pieces[0].tensor, _steps(job.source, format)) if pieces else None
    actions = (Action.PACK, Action.COMPARE)[: 1 + is_compared]
    return None if needed is None else needed | {_purpose(format, action) for action in actions}


def returned_by(plan: Plan) -> float:
    """Bytes that come back from the device for each that goes there; more of weights that are
    decoded there.
    """
    packed = [job.source.encoding is not None for job in plan.jobs if isinstance(job, PackJob)]
    return _RETURNED * (_DECODED if any(packed) else 1) if packed else 1.0


def _steps(source: TensorInfo, format: Format) -> tuple[str, ...]:
    """The dtypes that a weight goes through before it is packed."""
    tag = TAGS[format.dtype]
    return (tag,) if source.dtype == tag else (source.dtype, tag)


def _whole(job: PackJob) -> list[Piece]:
    """A weight in one piece; none for one that must be read as a whole matrix."""
    return shards.weight_pieces(job, _ENOUGH, _ENOUGH, 1)


def shard_tasks(
    progress: shards.ShardProgress, piece: int, returned: float = _RETURNED
) -> list[shards.ShardTask[CudaWorker]]:
    """Everything that is to be done for a shard, in pieces of so many bytes; `returned` is that of
    the whole plan.
    """
    tag = TAGS[progress.format.dtype]
    tasks = shards.weight_tasks(
        progress,
        piece,
        lambda job: aligned(
            max(
                job.source_bytes,
                bytes_of(tag, job.elements) // (_DECODED if job.source.encoding else 1),
            )
        ),
        lambda job: (job.source.encoding is None, job.source.dtype),
        lambda progress, job, piece, gathered, worker: _pack(
            progress, [job], [piece], gathered, worker
        ),
        lambda progress, jobs, worker: _pack(
            progress, jobs, [_whole(job)[0] for job in jobs], None, worker
        ),
    )
    return shards.fill(
        progress, tasks, piece, partial(most_elements, piece=piece, returned=returned), convert
    )


class _Output:
    """Where the results of some weights lie in a worker's output: starts of regions, and of each
    weight in them.
    """

    def __init__(self, sizes: Sequence[int], blocksize: int) -> None:
        self.size = self.visible = HEAD
        self.sizes = sizes
        self.blocks = [block_count(size, blocksize) for size in sizes]
        self.packed_starts = starts(-(-size // 2) for size in sizes)
        self.codes_starts = starts(self.blocks)
        self.nested_starts = starts(block_count(count, NESTED_BLOCKSIZE) for count in self.blocks)

    def add_codes(self, tile: int) -> None:
        """Room for packed codes, and for the sums of programs that look at so many elements; 0 for
        none.
        """
        self.packed = self._take(self.packed_starts[-1])
        self.sums_starts = starts(_SUMS * -(-size // tile) if tile else 0 for size in self.sizes)
        self.sums = self._take(self.sums_starts[-1])
        self.visible = self.size

    def add_scales(self, double_quant: bool, *, is_gathered: bool = False) -> None:
        """Room for all that becomes of the absmax, and for itself unless it is elsewhere already."""
        # torch's mean begins at a multiple of 16 bytes
        self.absmax_starts = (
            starts(count + -count % 4 for count in self.blocks)
            if double_quant
            else self.codes_starts
        )
        if double_quant:
            self.codes = self._take(self.codes_starts[-1])
            self.nested_absmax = self._take(4 * self.nested_starts[-1])
            self.means = self._take(4 * len(self.blocks))
            self.visible = self.size
            self.absmax = self._take(0 if is_gathered else 4 * self.absmax_starts[-1])
            self.scratch = self._take(_MEAN_ROOM)
        else:
            self.absmax = self._take(4 * self.absmax_starts[-1])
            self.visible = self.size

    def _take(self, size: int) -> int:
        start = self.size
        self.size += size + -size % 256
        return start


def _pack(
    progress: shards.ShardProgress,
    jobs: Sequence[PackJob],
    pieces: Sequence[Piece],
    gathered: shards.Gathered[DeviceMemory] | None,
    worker: CudaWorker,
) -> None:
    """Weights that fit into a worker's buffer together and are neighbours in the shard; or a piece
    of a large one.
    """
    format, start = progress.format, pieces[0].start
    reading = Reading(worker)
    results = progress.results or {}
    comparing = worker.engine.kernels[_purpose(format, Action.COMPARE)] if results else None
    weights = [results[job.name].weight for job in jobs if comparing]
    scales = [_add_scales(reading, *of_weight) for of_weight in zip(weights, pieces, strict=False)]
    out = _Output([piece.tensor.elements for piece in pieces], format.blocksize)
    out.add_codes(comparing.numbers["tile"] if comparing else 0)
    if gathered is None:
        out.add_scales(format.double_quant)
    worker.reserve(result=out.size)
    addresses, launches = load(
        reading, [piece.tensor for piece in pieces], _steps(jobs[0].source, format)
    )
    with worker.timed(Activity.COMPUTE):
        base, kernels = worker.output.address, worker.engine.kernels[_purpose(format, Action.PACK)]
        if gathered is None:
            absmax = [base + out.absmax + 4 * place for place in out.absmax_starts[:-1]]
        else:
            whole = gathered.memory(lambda blocks: worker.engine.allocate(4 * blocks))
            absmax = [whole.address + 4 * (start // format.blocksize)]
        codes = [base + out.packed + place for place in out.packed_starts[:-1]]
        rows = list(zip(addresses, codes, absmax, out.sizes, strict=False))
        launches.append(_look_for_non_finite(worker, kernels, addresses[0], addresses[-1]))
        launches += _quantize(reading, kernels, rows)
        if gathered is None and format.double_quant:
            launches += _compress(reading, kernels, out, absmax)
        if comparing:
            launches += _measure(
                comparing, out, base, rows, [addresses_of() for addresses_of in scales]
            )
        worker.execute(reading.stop, launches, out.visible)
    _check_finite(worker, kernels, jobs, addresses)
    for job, errors in zip(
        jobs if comparing else (), _errors(worker.result.view, out), strict=False
    ):
        results[job.name].add_piece(start, errors)
    with worker.timed(Activity.WRITE):
        packed = worker.result.view[out.packed : out.packed + out.packed_starts[-1]]
        progress.writer.write(jobs[0].offsets[0] + start // 2, packed)
    if gathered is None:
        _write_scales(worker, progress, jobs, out)
    elif (memory := gathered.done()) is None:
        progress.done()
    else:
        _write_gathered(worker, kernels, progress, jobs[0], memory)


def _look_for_non_finite(
    worker: CudaWorker, kernels: Kernels[int], start: int, stop: int
) -> Launch:
    """The launch that looks through some bytes on the device, and sets the flag."""
    words = (stop - start) // 4
    programs = -(-words // kernels.numbers["finite_tile"])
    return kernels.functions["finite"], programs, (start, worker.output.address + FLAG, words)


def _check_finite(
    worker: CudaWorker, kernels: Kernels[int], jobs: Sequence[PackJob], addresses: Sequence[int]
) -> None:
    if not worker.is_flagged():
        return
    for job, start, stop in zip(jobs, addresses, addresses[1:], strict=False):
        worker.execute(0, [_look_for_non_finite(worker, kernels, start, stop)], HEAD)
        if worker.is_flagged():
            raise shards.NonFiniteError(job)


def _quantize(reading: Reading, kernels: Kernels[int], rows: Sequence[Row]) -> list[Launch]:
    """What packs weights: of each the addresses of the weight, of its codes and of its absmax, and
    its elements.
    """
    chosen: dict[str, list[Row]] = {"quantize_aligned": [], "quantize_any": []}
    for row in rows:
        is_aligned = row[3] % kernels.numbers["slot"] == 0 and row[1] % 4 == 0
        chosen["quantize_aligned" if is_aligned else "quantize_any"].append(row)
    launches: list[Launch] = []
    for name, of_kind in chosen.items():
        if of_kind:
            table, tiles = reading.tiled_table(of_kind, kernels.numbers["tile"])
            launches.append(
                (kernels.functions[name], tiles, (table, 0, kernels.tables["codes"], len(of_kind)))
            )
    return launches


def _average(
    reading: Reading,
    kernels: Kernels[int],
    vectors: Sequence[tuple[int, int]],
    means: int,
    room: int,
) -> list[Launch]:
    """The mean of each absmax vector; long ones each take two launches, one after the other in one
    scratch region.
    """
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


def _compress(
    reading: Reading, kernels: Kernels[int], out: _Output, absmax: Sequence[int]
) -> list[Launch]:
    """What quantizes the absmax of weights, given their addresses."""
    base = reading.worker.output.address
    rows = [
        (scales, base + out.codes + codes, base + out.nested_absmax + 4 * nested, count)
        for scales, codes, nested, count in zip(
            absmax, out.codes_starts, out.nested_starts, out.blocks, strict=False
        )
    ]
    vectors = list(zip(absmax, out.blocks, strict=True))
    averaging = _average(reading, kernels, vectors, base + out.means, base + out.scratch)
    table, tiles = reading.tiled_table(rows, kernels.numbers["nested_tile"])
    arguments = (table, base + out.means, kernels.tables["middles"], len(rows))
    return [*averaging, (kernels.functions["compress"], tiles, arguments)]


def _write_scales(
    worker: CudaWorker, progress: shards.ShardProgress, jobs: Sequence[PackJob], out: _Output
) -> None:
    """Write all components of weights but their codes; they are complete then."""
    host, count = worker.result.view, len(jobs)
    maps = memoryview(_MAPS[progress.format.quant_type] * count)
    offsets: Sequence[float | None] = [None] * count
    if progress.format.double_quant:
        codes = host[out.codes : out.codes + out.codes_starts[-1]]
        nested_absmax = host[out.nested_absmax : out.nested_absmax + 4 * out.nested_starts[-1]]
        parts = [codes, maps, nested_absmax, memoryview(_MAPS["dynamic"] * count)]
        offsets = host[out.means : out.means + 4 * count].cast("f").tolist()
    else:
        parts = [host[out.absmax : out.absmax + 4 * out.absmax_starts[-1]], maps]
    with worker.timed(Activity.WRITE):
        # parts stand in the order of layout.components, of which the packed codes are the first
        for offset, part in zip(jobs[0].offsets[1:], parts, strict=True):
            progress.writer.write(offset, part)
    progress.packed(worker, jobs, shards.json_blobs(progress.format, jobs, offsets))


def _write_gathered(
    worker: CudaWorker,
    kernels: Kernels[int],
    progress: shards.ShardProgress,
    job: PackJob,
    absmax: DeviceMemory,
) -> None:
    """As `_write_scales` for a weight whose absmax has gathered on the device, which is given back."""
    with worker.timed(Activity.COMPUTE):
        out, reading = _Output([job.elements], progress.format.blocksize), Reading(worker)
        out.add_scales(progress.format.double_quant, is_gathered=True)
        worker.reserve(result=out.size)
        if progress.format.double_quant:
            launches = _compress(reading, kernels, out, [absmax.address])
            worker.execute(reading.stop, launches, out.visible)
        else:
            worker.fetch(out.absmax, absmax.address, 4 * out.blocks[0])
    worker.engine.give_back(absmax)
    _write_scales(worker, progress, [job], out)


def _add_scales(
    reading: Reading, weight: StoredWeight, piece: Piece
) -> Callable[[], Sequence[int]]:
    """Add the scales of a piece as they are stored; gives their addresses, as of `_measure`, once
    they are read.
    """
    parts = cut_parts(
        weight.parts(), weight.format.blocksize, piece.start, piece.start + piece.tensor.elements
    )
    places = [
        reading.add(parts[role].file_range) for role in ("absmax", "nested_absmax") if role in parts
    ]
    number = reading.take(4)
    return lambda: [*map(reading.address, places), reading.put(number, weight.nested_offset or 0.0)]


def _measure(
    kernels: Kernels[int],
    out: _Output,
    base: int,
    rows: Sequence[Row],
    scales: Sequence[Sequence[int]],
) -> Iterator[Launch]:
    """What measures the errors of packed weights.

    Rows are as of `_quantize`, scales the addresses of absmax or of its codes, of nested_absmax if
    there is one, and of nested_offset.
    """
    for (weight, codes, _, elements), (absmax, *nested), place in zip(
        rows, scales, out.sums_starts, strict=False
    ):
        programs, sums, tables = (
            -(-elements // kernels.numbers["tile"]),
            base + out.sums + place,
            kernels.tables,
        )
        decoding = (
            absmax,
            tables["nested"],
            nested[0],
            nested[-1],
            tables["values"],
            tables["bounds"],
        )
        written = (sums, sums + 8 * programs, sums + 24 * programs)
        yield (
            kernels.functions["compare"],
            programs,
            (weight, codes, *decoding, *written, elements, programs),
        )


def _errors(view: memoryview, out: _Output) -> Iterator[PieceErrors]:
    """What has been measured of each weight, whose codes and scales are taken to be right."""
    for start, stop in pairwise(out.sums_starts):
        sums, programs = view[out.sums + start : out.sums + stop], (stop - start) // _SUMS
        peaks, squares = (
            sums[: 8 * programs].cast("f"),
            sums[8 * programs : 24 * programs].cast("d"),
        )
        errors, values = (math.fsum(half) for half in (squares[:programs], squares[programs:]))
        largest, relative = (
            max(half, default=0.0) for half in (peaks[:programs], peaks[programs:])
        )
        yield PieceErrors(
            errors, values, largest, relative, sum(sums[24 * programs :].cast("q")), 0, 0
        )
