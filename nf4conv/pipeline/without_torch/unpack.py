"""Packed weights unpacked by workers without torch: the counterpart of with_torch/unpack.py, with the same values.

The codes and scales of some weights, or of a piece of one, go up in one copy; a launch decodes each weight; the values
come down in one copy. Parts of a weight in a worker's input:

    values, absmax, nested_absmax, nested_quant_map, nested_offset      and its JSON blob, which stays on the host
    values, absmax                                                      without double quantization
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from nf4conv.checkpoint.encoded_pieces import cut_parts, packed_spans
from nf4conv.checkpoint.header import DTYPE_BITS, FileRange, TensorInfo
from nf4conv.checkpoint.plan import CopyJob, Plan
from nf4conv.errors import CodecError, SourceError
from nf4conv.format.encodings import Method
from nf4conv.format.layout import DTYPE_NAMES, QUANT_STATE_PREFIX, nested_offset_of, parse_quant_state
from nf4conv.pipeline.loop import Activity, aligned, batches
from nf4conv.pipeline.shards import ShardProgress, ShardTask, fill
from nf4conv.pipeline.without_torch.bundle import Action, Purpose
from nf4conv.pipeline.without_torch.worker import CudaWorker, Launch

_LARGEST_BATCH: Final = 1024
_PLAIN_PARTS: Final = ("values", "absmax")
_NESTED_PARTS: Final = ("values", "absmax", "nested_absmax", "nested_quant_map")
_OFFSET_ROOM: Final = 64
"""Bytes of a worker's input for a nested_offset, aligned."""


def purpose_of(plan: Plan) -> Purpose | None:
    """What kernels a plan needs; None if it needs more than is here: casts, transposed weights, several formats."""
    purposes = set()
    for job in plan.jobs:
        if not isinstance(job, CopyJob) or job.dtype != job.source.dtype:
            return None
        encoding = job.source.encoding
        if encoding is None:
            continue
        if encoding.method is not Method.BITSANDBYTES_4BIT or job.elements == 0:
            return None
        quant_type = _blob_role(dict(encoding.parts)).removeprefix(QUANT_STATE_PREFIX)
        purposes.add(Purpose(Action.UNPACK, DTYPE_NAMES[job.dtype], quant_type, encoding.block[0]))
    return purposes.pop() if len(purposes) == 1 else None


def shard_tasks(progress: ShardProgress, piece: int) -> list[ShardTask[CudaWorker]]:
    """Everything that is to be done for a shard, in pieces of so many bytes of values."""

    def room_of(span: Span) -> int:
        return max(span.nbytes, sum(aligned(part.nbytes) for part in span.parts().values()) + _OFFSET_ROOM)

    groups = batches(_spans(progress, piece), room_of, piece, lambda span: span.job.source.file, _LARGEST_BATCH)
    return fill(progress, [Unpack(progress, spans[0].job.source.file, spans) for spans in groups], piece)


class Span(NamedTuple):
    """Elements start … stop of a weight that is stored decoded."""

    job: CopyJob
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * DTYPE_BITS[self.job.dtype] // 8

    @property
    def offset(self) -> int:
        """Of its values in the shard's data."""
        return self.job.offset + self.start * DTYPE_BITS[self.job.dtype] // 8

    def parts(self) -> dict[str, TensorInfo]:
        """What it is decoded from."""
        encoding = self.job.source.encoding
        assert encoding is not None
        return cut_parts(dict(encoding.parts), encoding.block[0], self.start, self.stop)


def _spans(progress: ShardProgress, piece: int) -> Iterator[Span]:
    for job in progress.shard.jobs:
        if isinstance(job, CopyJob) and job.source.encoding is not None:
            most = piece * 8 // DTYPE_BITS[job.dtype]
            for start, stop in packed_spans(job.elements, job.source.encoding.block[0], most):
                yield Span(job, start, stop)


def _blob_role(roles: Iterable[str]) -> str:
    return next(role for role in roles if role.startswith(QUANT_STATE_PREFIX))


@dataclass(frozen=True)
class Unpack(ShardTask[CudaWorker]):
    """Weights that fit into a worker's buffer together, or a piece of one."""

    spans: tuple[Span, ...]

    def run(self, worker: CudaWorker) -> None:
        starts = list(accumulate((span.nbytes for span in self.spans), initial=0))
        launches, upload = _prepare(worker, self.spans, starts)
        with worker.timed(Activity.COMPUTE):
            worker.execute(upload, launches, starts[-1])
        with worker.timed(Activity.WRITE):
            for offset, start, stop in _runs(self.spans, starts):
                self.progress.writer.write(offset, worker.result.view[start:stop])
        self.progress.done()


def _runs(spans: Sequence[Span], starts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(offset in the shard, start, stop) of values that are neighbours in the output too."""
    offset, first = spans[0].offset, 0
    for span, start in zip(spans, starts, strict=False):
        if span.offset - offset != start - first:
            yield offset, first, start
            offset, first = span.offset, start
    yield offset, first, starts[-1]


def _prepare(worker: CudaWorker, spans: Sequence[Span], starts: Sequence[int]) -> tuple[list[Launch], int]:
    """Read what is needed to the worker's input; the launches that decode it, and how many bytes they need of it."""
    layouts: list[tuple[Span, dict[str, int], int]] = []
    ranges: list[FileRange] = []
    positions: list[int] = []
    end = 0
    for span in spans:
        parts = span.parts()
        blob = _blob_role(parts)
        roles = _NESTED_PARTS if "nested_absmax" in parts else _PLAIN_PARTS
        places = {}
        for role in (*roles, blob):
            places[role] = end
            ranges.append(parts[role].file_range)
            positions.append(end)
            end += aligned(parts[role].nbytes)
        layouts.append((span, places, parts[blob].nbytes))
        end += _OFFSET_ROOM
    if end > len(worker.source.view):
        raise SourceError(f"{spans[0].job.source.file}: {spans[0].job.source.name}: a quant state of impossible size")
    worker.fill(worker.source.view, ranges, positions)
    launches = [
        _launch(worker, span, places, blob, start)
        for (span, places, blob), start in zip(layouts, starts, strict=False)
        if span.nbytes
    ]
    return launches, end


def _launch(worker: CudaWorker, span: Span, places: Mapping[str, int], blob_size: int, start: int) -> Launch:
    role = _blob_role(places)
    is_nested = "nested_absmax" in places
    nested_offset = _read_blob(worker, span, places[role], blob_size, is_nested)
    numbers, base = worker.engine.bundle.numbers, worker.input.address
    codes, absmax = base + places["values"], base + places["absmax"]
    nested = (absmax, absmax, absmax)
    if is_nested:
        offset = places[role] + aligned(blob_size)
        worker.source.view[offset : offset + 4] = struct.pack("<f", nested_offset)
        nested = (base + places["nested_quant_map"], base + places["nested_absmax"], base + offset)
    out, elements = worker.output.address + start, span.stop - span.start
    kind = "aligned" if elements % numbers["slot"] == 0 and out % 16 == 0 else "any"
    arguments = (codes, absmax, *nested, worker.engine.tables["values"], out, elements)
    return f"{'nested' if is_nested else 'plain'}_{kind}", -(-elements // numbers["tile"]), arguments


def _read_blob(worker: CudaWorker, span: Span, place: int, size: int, is_nested: bool) -> float:
    """Check a JSON blob; its nested_offset, or 0.0."""
    try:
        fields = parse_quant_state(bytes(worker.source.view[place : place + size]))
        return nested_offset_of(fields) if is_nested else 0.0
    except CodecError as error:
        raise SourceError(f"{span.job.source.file}: {span.job.source.name}: {error}") from error
