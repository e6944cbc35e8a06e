"""A plan's shards as pipeline tasks: read a piece of a weight, pack it, write the codes to their place.

A large weight is packed in pieces that end at block boundaries; its absmax gathers on the device, and whoever packs the
last piece does the nested step, which needs all of it. Small tensors are taken many at a time: their outputs are
neighbours in the shard (checkpoint/plan.py), so each kind of component of a whole batch is one write.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nf4conv.checkpoint.encoded_pieces import EncodedPiece, encoded_pieces, matrix_pieces
from nf4conv.checkpoint.header import DTYPE_BITS, TensorInfo
from nf4conv.checkpoint.plan import CopyJob, PackJob
from nf4conv.codec.ops import compress_absmax, encoder
from nf4conv.codec.quant_state import DTYPES, code_table, dynamic_table
from nf4conv.format.layout import Format, block_count
from nf4conv.pipeline import shards
from nf4conv.pipeline.loop import Activity
from nf4conv.pipeline.shards import CopyPart, Gathered, NonFiniteError, ShardProgress, ShardTask
from nf4conv.pipeline.with_torch.reading import (
    TORCH_DTYPES,
    check_cast,
    exactly_decoded,
    read_decoded,
    read_matrix,
)
from nf4conv.pipeline.with_torch.unpack import UnpackPiece, packed_spans_of
from nf4conv.pipeline.with_torch.worker import TorchWorker


def shard_tasks(progress: ShardProgress, piece: int) -> list[ShardTask[TorchWorker]]:
    """Everything that is to be done for a shard, in pieces of so many source bytes."""
    tasks: list[ShardTask[TorchWorker]] = []
    for jobs in shards.pack_groups(progress.shard, piece):
        job, pieces = jobs[0], _pieces(jobs[0], piece, progress.format.blocksize)
        if len(pieces) > 1:
            absmax: Gathered[torch.Tensor] = Gathered(block_count(job.elements, progress.format.blocksize), len(pieces))
            tasks += [PackPiece(progress, job.source.file, job, absmax, *part) for part in pieces]
        else:
            tasks.append(PackBatch(progress, job.source.file, jobs))
    for kept in progress.shard.jobs:
        if isinstance(kept, CopyJob) and kept.source.encoding is not None:
            file, encoded = kept.source.file, encoded_pieces(kept.source, piece // 2)
            parts = packed_spans_of(kept, piece) if progress.audit is None else []
            tasks += [UnpackPiece(progress, file, kept, *part) for part in parts]
            tasks += [] if parts else [CopyDecoded(progress, file, kept, part) for part in encoded]
    return shards.fill(progress, tasks, piece, CastCopies)


def _pieces(job: PackJob, piece: int, blocksize: int) -> list[tuple[int, int, TensorInfo | None]]:
    """(start, stop, encoded elements) of the pieces of a large weight; none, or one, for a weight that is taken whole.

    A weight that is cut out of its source can be taken piece by piece only if it is encoded by rows.
    """
    if job.is_cut_out:
        encoded = matrix_pieces(job, piece // 2, blocksize)  # elements: as many as a piece holds in 16 bits
        return [(start, start + tensor.elements, tensor) for tensor, start in encoded]
    return [(*span, None) for span in shards.spans(job, piece)]


def part_of(absmax: Gathered[torch.Tensor], start: int, stop: int, device: torch.device) -> torch.Tensor:
    """[stop - start] float32: where a piece of a weight writes its share of the absmax."""
    return absmax.memory(lambda blocks: torch.empty(blocks, dtype=torch.float32, device=device))[start:stop]


@dataclass(frozen=True)
class PackPiece(ShardTask[TorchWorker]):
    """Elements start … stop of a large weight; `encoded` holds them if the weight is encoded."""

    job: PackJob
    absmax: Gathered[torch.Tensor]
    start: int
    stop: int
    encoded: TensorInfo | None

    def run(self, worker: TorchWorker) -> None:
        blocksize = self.progress.format.blocksize
        weight = self._read(worker)
        with worker.timed(Activity.COMPUTE):
            absmax = part_of(self.absmax, self.start // blocksize, block_count(self.stop, blocksize), worker.device)
            packed = _pack(self.progress.format, weight, absmax)
        worker.write([(self.progress.writer, self.job.offsets[0] + self.start // 2, packed)])
        _check_finite([self.job], [weight])
        whole = self.absmax.done()
        self.progress.done(None if whole is None else _complete(worker, self.progress, [self.job], [whole]))

    def _read(self, worker: TorchWorker) -> torch.Tensor:
        """[stop - start] in the format's dtype."""
        format = self.progress.format
        if self.encoded is not None:
            return read_decoded(worker, self.encoded).to(DTYPES[format.dtype]).view(-1)
        [weight] = _read_weights(worker, format, [self.job], self.start, self.stop)
        return weight


@dataclass(frozen=True)
class PackBatch(ShardTask[TorchWorker]):
    """Weights that fit into a worker's buffer together and are neighbours in the shard.

    One that is stored transposed, encoded, or as a part of a larger tensor is alone, and taken whole.
    """

    jobs: tuple[PackJob, ...]

    def run(self, worker: TorchWorker) -> None:
        format = self.progress.format
        if self.jobs[0].is_cut_out:
            weights = [read_matrix(worker, self.jobs[0], DTYPES[format.dtype])]
        else:
            weights = _read_weights(worker, format, self.jobs)
        with worker.timed(Activity.COMPUTE):
            absmaxes = [
                torch.empty(block_count(weight.numel(), format.blocksize), dtype=torch.float32, device=weight.device)
                for weight in weights
            ]
            packed = [_pack(format, weight, absmax) for weight, absmax in zip(weights, absmaxes, strict=True)]
            together = torch.cat(packed)
        worker.write([(self.progress.writer, self.jobs[0].offsets[0], together)])
        _check_finite(self.jobs, weights)
        self.progress.done(_complete(worker, self.progress, self.jobs, absmaxes))


@dataclass(frozen=True)
class CopyDecoded(ShardTask[TorchWorker]):
    """A kept tensor, or a piece of it, that the source holds encoded."""

    job: CopyJob
    piece: EncodedPiece

    def run(self, worker: TorchWorker) -> None:
        tensor = read_decoded(worker, self.piece.tensor)
        with worker.timed(Activity.COMPUTE):
            cast = tensor.to(TORCH_DTYPES[self.job.dtype])
            if cast is not tensor or cast.dtype is torch.float16:  # the other dtypes hold whatever decoding gives
                check_cast(cast, self.job, lambda: read_decoded(worker, exactly_decoded(self.piece.tensor)))
        offset = self.job.offset + self.piece.start * cast.element_size()
        worker.write([(self.progress.writer, offset, cast)])
        if self.progress.audit is not None:
            self.progress.audit.check_decoded(worker, self.progress, self.job, self.piece)
        self.progress.done()


@dataclass(frozen=True)
class CastCopies(ShardTask[TorchWorker]):
    """Tensors, or parts of them, that are kept in another dtype."""

    parts: tuple[CopyPart, ...]

    def run(self, worker: TorchWorker) -> None:
        for job, start, stop in self.parts:
            begin = job.source.start + start
            [raw] = worker.read([(job.source.file, begin, begin + stop - start)])
            with worker.timed(Activity.COMPUTE):
                cast = _cast(raw, job)
            offset = job.offset + start * DTYPE_BITS[job.dtype] // DTYPE_BITS[job.source.dtype]
            worker.write([(self.progress.writer, offset, cast)])
            if self.progress.audit is not None:
                self.progress.audit.check_copy(worker, self.progress, job, start, stop)
        self.progress.done()


def _cast(raw: torch.Tensor, job: CopyJob) -> torch.Tensor:
    """The values of some bytes of a kept tensor in the dtype that it is stored in."""
    values = raw.view(TORCH_DTYPES[job.source.dtype])
    cast = values.to(TORCH_DTYPES[job.dtype])
    check_cast(cast, job, lambda: values)
    return cast


def _read_weights(
    worker: TorchWorker, format: Format, jobs: Sequence[PackJob], start: int = 0, stop: int | None = None
) -> list[torch.Tensor]:
    """Weights, or elements start … stop of them, flat and cast to the format's dtype."""
    ranges = []
    for job in jobs:
        begin, end = job.source_range
        itemsize = DTYPE_BITS[job.source.dtype] // 8
        ranges.append((job.source.file, begin + start * itemsize, end if stop is None else begin + stop * itemsize))
    raws = worker.read(ranges)
    with worker.timed(Activity.COMPUTE):
        return [
            raw.view(TORCH_DTYPES[job.source.dtype]).to(DTYPES[format.dtype])
            for job, raw in zip(jobs, raws, strict=True)
        ]


def _pack(format: Format, weight: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    packed = torch.empty(-(-weight.numel() // 2), dtype=torch.uint8, device=weight.device)
    encoder(weight.device, format.scales)(weight, packed, absmax, format.quant_type, format.blocksize)
    return packed


def _complete(
    worker: TorchWorker, progress: ShardProgress, jobs: Sequence[PackJob], absmaxes: Sequence[torch.Tensor]
) -> dict[str, bytes]:
    """Write all components of neighbouring weights but the codes and the JSON blobs; the latter, by the weights' names.

    What is written is looked at, if there is an audit.
    """
    format = progress.format
    quant_map = code_table(format.quant_type, worker.device).repeat(len(jobs))
    offsets: list[float | None] = [None] * len(jobs)
    with worker.timed(Activity.COMPUTE):
        if format.double_quant:
            nested = [compress_absmax(absmax) for absmax in absmaxes]
            parts = [
                torch.cat([codes for codes, _, _ in nested]),
                quant_map,
                torch.cat([state2.absmax for _, _, state2 in nested]),
                dynamic_table(worker.device).repeat(len(jobs)),
            ]
            offsets = list(torch.stack([offset for _, offset, _ in nested]).tolist())
        else:
            parts = [torch.cat(list(absmaxes)), quant_map]
    # parts stand in the order of layout.components, of which the packed codes are the first
    worker.write([(progress.writer, offset, part) for offset, part in zip(jobs[0].offsets[1:], parts, strict=True)])
    blobs = shards.json_blobs(format, jobs, offsets)
    if progress.audit is not None:
        progress.audit.check_weights(worker, progress, jobs, blobs)
    return blobs


def _check_finite(jobs: Sequence[PackJob], weights: Sequence[torch.Tensor]) -> None:
    # A sum is NaN or infinite if any term is; a finite weight whose sum overflows is looked at again.
    sums = torch.stack([weight.sum(dtype=torch.float32) for weight in weights])
    if bool(torch.isfinite(sums).all()):
        return
    for job, weight in zip(jobs, weights, strict=True):
        if not bool(torch.isfinite(weight).all()):
            raise NonFiniteError(job)
