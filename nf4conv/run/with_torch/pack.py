"""A plan's shards as pipeline tasks: read a piece of a weight, pack it, write the codes to their
place.

A large weight is packed in pieces that end at block boundaries; its absmax gathers on the device,
and whoever packs the last piece does the nested step, which needs all of it. Small tensors are
taken many at a time: their outputs are neighbours in the shard (plan/jobs.py), so each kind of
component of a whole batch is one write.
"""

from collections.abc import Sequence
from functools import partial

import torch

from nf4conv.codec.backends import encoder
from nf4conv.codec.ops import compress_absmax
from nf4conv.codec.quant_state import DTYPES, code_table
from nf4conv.format.layout import Format, block_count
from nf4conv.plan.jobs import CopyJob, PackJob
from nf4conv.run import shards
from nf4conv.run.loop import Activity, aligned
from nf4conv.run.shards import CopyPart, Gathered, NonFiniteError, ShardProgress, ShardTask
from nf4conv.run.with_torch.reading import (
    TORCH_DTYPES,
    check_cast,
    exactly_decoded,
    read_matrix,
    read_values,
)
from nf4conv.run.with_torch.worker import TorchWorker
from nf4conv.sources.encodings.pieces import Piece
from nf4conv.sources.tensors import DTYPE_BITS, TensorInfo, packed_in_order


def shard_tasks(progress: ShardProgress, piece: int) -> list[ShardTask[TorchWorker]]:
    """Everything that is to be done for a shard, in pieces of so many source bytes."""
    tasks = shards.weight_tasks(
        progress,
        piece,
        lambda job: (
            2 * job.elements if job.is_cut_out else aligned(job.source_bytes)
        ),  # as a piece holds in 16 bits
        lambda job: job.name if job.is_cut_out else None,
        _pack_piece,
        _pack_batch,
    )
    return shards.fill(progress, tasks, piece, partial(_most_elements, piece), _convert)


def _most_elements(piece: int, job: CopyJob) -> int:
    """Of a tensor that is decoded or cast, those that are taken at a time: a piece of so many
    bytes, or a share.
    """
    source = job.source
    is_unpacked = packed_in_order(source) is not None and job.dtype == source.dtype
    if source.encoding is None or is_unpacked:
        return piece * 8 // DTYPE_BITS[source.dtype]
    return piece // 2


def part_of(
    absmax: Gathered[torch.Tensor], start: int, stop: int, device: torch.device
) -> torch.Tensor:
    """[stop - start] float32: where a piece of a weight writes its share of the absmax."""
    return absmax.memory(lambda blocks: torch.empty(blocks, dtype=torch.float32, device=device))[
        start:stop
    ]


def _pack_piece(
    progress: ShardProgress,
    job: PackJob,
    piece: Piece,
    gathered: Gathered[torch.Tensor],
    worker: TorchWorker,
) -> None:
    """A piece of a large weight."""
    format, (tensor, start) = progress.format, piece
    weight = read_values(worker, tensor)
    with worker.timed(Activity.COMPUTE):
        weight = weight.to(DTYPES[format.dtype])
        stop = block_count(start + tensor.elements, format.blocksize)
        absmax = part_of(gathered, start // format.blocksize, stop, worker.device)
        packed = _pack(format, weight, absmax)
    worker.write([(progress.writer, job.offsets[0] + start // 2, packed)])
    _check_finite([job], [weight])
    whole = gathered.done()
    if whole is None:
        progress.done()
    else:
        _complete(worker, progress, [job], [whole])


def _pack_batch(progress: ShardProgress, jobs: tuple[PackJob, ...], worker: TorchWorker) -> None:
    """Weights that fit into a worker's buffer together and are neighbours in the shard.

    One that is stored transposed, encoded, or as a part of a larger tensor is alone, and taken
    whole.
    """
    format = progress.format
    if jobs[0].is_cut_out:
        weights = [read_matrix(worker, jobs[0], DTYPES[format.dtype])]
    else:
        weights = _read_weights(worker, format, jobs)
    with worker.timed(Activity.COMPUTE):
        absmaxes = [
            torch.empty(
                block_count(weight.numel(), format.blocksize),
                dtype=torch.float32,
                device=weight.device,
            )
            for weight in weights
        ]
        packed = [
            _pack(format, weight, absmax) for weight, absmax in zip(weights, absmaxes, strict=True)
        ]
        together = torch.cat(packed)
    worker.write([(progress.writer, jobs[0].offsets[0], together)])
    _check_finite(jobs, weights)
    _complete(worker, progress, jobs, absmaxes)


def _convert(progress: ShardProgress, parts: tuple[CopyPart, ...], worker: TorchWorker) -> None:
    """Tensors, or parts of them, that are kept in another dtype, or that the source holds encoded."""
    for job, piece in parts:
        values = _converted(worker, job, piece.tensor)
        worker.write([(progress.writer, job.offset + piece.start * values.element_size(), values)])
        if progress.audit is not None:
            progress.audit.check_copy(worker, progress, job, piece)
    progress.done()


def _converted(worker: TorchWorker, job: CopyJob, tensor: TensorInfo) -> torch.Tensor:
    """[elements] of a piece of a kept tensor in the dtype that it is stored in."""
    values = read_values(worker, tensor)
    with worker.timed(Activity.COMPUTE):
        cast = values.to(TORCH_DTYPES[job.dtype])
        if len(job.steps) > 1:
            is_exact = tensor.encoding is None
            check_cast(
                cast,
                job,
                lambda: values if is_exact else read_values(worker, exactly_decoded(tensor)),
            )
    return cast


def _read_weights(
    worker: TorchWorker, format: Format, jobs: Sequence[PackJob]
) -> list[torch.Tensor]:
    """Weights, flat and cast to the format's dtype."""
    raws = worker.read([(job.source.file, *job.source_range) for job in jobs])
    with worker.timed(Activity.COMPUTE):
        return [
            raw.view(TORCH_DTYPES[job.source.dtype]).to(DTYPES[format.dtype])
            for job, raw in zip(jobs, raws, strict=True)
        ]


def _pack(format: Format, weight: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    packed = torch.empty(-(-weight.numel() // 2), dtype=torch.uint8, device=weight.device)
    encoder(weight.device, format.scales)(
        weight, packed, absmax, format.quant_type, format.blocksize
    )
    return packed


def _complete(
    worker: TorchWorker,
    progress: ShardProgress,
    jobs: Sequence[PackJob],
    absmaxes: Sequence[torch.Tensor],
) -> None:
    """Write all components of neighbouring weights but the codes; they are complete then."""
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
                code_table("dynamic", worker.device).repeat(len(jobs)),
            ]
            offsets = list(torch.stack([offset for _, offset, _ in nested]).tolist())
        else:
            parts = [torch.cat(list(absmaxes)), quant_map]
    # parts stand in the order of layout.components, of which the packed codes are the first
    worker.write(
        [
            (progress.writer, offset, part)
            for offset, part in zip(jobs[0].offsets[1:], parts, strict=True)
        ]
    )
    progress.packed(worker, jobs, shards.json_blobs(format, jobs, offsets))


def _check_finite(jobs: Sequence[PackJob], weights: Sequence[torch.Tensor]) -> None:
    # A sum is NaN or infinite if any term is; a finite weight whose sum overflows is looked at
    # again.
    sums = torch.stack([weight.sum(dtype=torch.float32) for weight in weights])
    if bool(torch.isfinite(sums).all()):
        return
    for job, weight in zip(jobs, weights, strict=True):
        if not bool(torch.isfinite(weight).all()):
            raise NonFiniteError(job)
