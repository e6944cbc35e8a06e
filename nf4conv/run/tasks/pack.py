"""Tasks that pack weights.

A large weight is packed in pieces that end at block boundaries. Its absmax gathers on the device,
and whoever packs the last piece does the nested step, which needs all of it. Small weights are
taken many at a time: they are neighbours in the shard (plan/), so each kind of component of a whole
batch is one write.
"""

import math
from collections.abc import Sequence

from nf4conv.format.layout import NESTED_QUANT_MAP, QUANT_MAPS, Format, quant_state_json
from nf4conv.plan.jobs import PackJob
from nf4conv.plan.rows import Errors
from nf4conv.run.device.protocol import Gathered, NonFiniteError, Scales
from nf4conv.run.pieces import WeightPiece, whole_weight
from nf4conv.run.shards import Destination
from nf4conv.run.worker import Activity, Backend, Worker
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit


def pack_batch(
    destination: Destination, backend: Backend, jobs: Sequence[PackJob], worker: Worker
) -> None:
    """Packs weights that fit into a worker's buffer together and are neighbours in the shard.

    Raises:
        NonFiniteError: a weight holds NaN or infinity, or its scales are too large.
    """
    format = destination.format
    pieces = [whole_weight(job) for job in jobs]
    packed = worker.device(backend).pack(pieces, format, None, _stored(destination, jobs))
    _keep_errors(destination, pieces, packed.errors)
    with worker.timed(Activity.WRITE):
        destination.write(jobs[0].offsets[0], packed.codes)
    assert packed.scales is not None
    _write_scales(destination, jobs, packed.scales, worker)
    destination.count_task()


def pack_pieces(
    destination: Destination,
    backend: Backend,
    pieces: Sequence[WeightPiece],
    gathered: Gathered,
    worker: Worker,
) -> None:
    """Packs some pieces of a large weight; the last piece completes the weight.

    Raises:
        NonFiniteError: the weight holds NaN or infinity, or its scales are too large.
    """
    for piece in pieces:
        _pack_piece(destination, backend, piece, gathered, worker)
    destination.count_task()


def _pack_piece(
    destination: Destination,
    backend: Backend,
    piece: WeightPiece,
    gathered: Gathered,
    worker: Worker,
) -> None:
    format = destination.format
    job = piece.job
    device = worker.device(backend)
    packed = device.pack([piece], format, gathered, _stored(destination, [job]))
    _keep_errors(destination, [piece], packed.errors)
    with worker.timed(Activity.WRITE):
        destination.write(job.offsets[0] + piece.start // 2, packed.codes)
    if gathered.count_piece():
        scales = device.compress(gathered, format)
        _write_scales(destination, [job], scales, worker)


def _stored(destination: Destination, jobs: Sequence[PackJob]) -> list[Bitsandbytes4bit]:
    """Returns the stored weights whose errors are measured; none if that is not asked."""
    measured = destination.measured
    if measured is None:
        return []
    return [measured[job.name].weight for job in jobs]


def _keep_errors(
    destination: Destination, pieces: Sequence[WeightPiece], errors: Sequence[Errors]
) -> None:
    measured = destination.measured
    if measured is None:
        return
    for piece, of_piece in zip(pieces, errors, strict=True):
        measured[piece.job.name].add_piece(piece.start, of_piece)


def _write_scales(
    destination: Destination, jobs: Sequence[PackJob], scales: Scales, worker: Worker
) -> None:
    """Writes all components of neighbouring weights but the codes, which completes them."""
    format = destination.format
    quant_maps = memoryview(QUANT_MAPS[format.quant_type] * len(jobs))
    # in the order of layout.components, of which the packed codes are the first
    components = [scales.absmax, quant_maps]
    if scales.nested_absmax is not None:
        components.append(scales.nested_absmax)
        components.append(memoryview(NESTED_QUANT_MAP * len(jobs)))
    with worker.timed(Activity.WRITE):
        for offset, component in zip(jobs[0].offsets[1:], components, strict=True):
            destination.write(offset, component)
    destination.finish_weights(worker, jobs, _json_blobs(format, jobs, scales.nested_offsets))


def _json_blobs(
    format: Format, jobs: Sequence[PackJob], offsets: Sequence[float] | None
) -> dict[str, bytes]:
    """Returns the quant states of packed weights, by name.

    Args:
        format: how the weights are packed.
        jobs: the weights.
        offsets: the nested_offset of each; None without double quantization.

    Raises:
        NonFiniteError: the scales of a weight are so large that their mean is not finite.
    """
    blobs = {}
    for number, job in enumerate(jobs):
        offset = None
        if offsets is not None:
            offset = offsets[number]
            if not math.isfinite(offset):
                raise NonFiniteError(job)
        blobs[job.name] = quant_state_json(format, job.matrix.shape, offset)
    return blobs
