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
from nf4conv.run.device.protocol import Gathered, NonFiniteError, Scales
from nf4conv.run.pieces import WeightPiece, whole_weight
from nf4conv.run.worker import Activity, Destination, Worker


def pack_batch(destination: Destination, jobs: Sequence[PackJob], worker: Worker) -> None:
    """Packs weights that fit into a worker's buffer together and are neighbours in the shard.

    Raises a NonFiniteError if a weight holds NaN or infinity, or its scales are too large.
    """
    _pack(destination, [whole_weight(job) for job in jobs], None, worker)


def pack_pieces(
    destination: Destination,
    pieces: Sequence[WeightPiece],
    gathered: Gathered,
    worker: Worker,
) -> None:
    """Packs some pieces of a large weight; the last piece completes the weight.

    Raises a NonFiniteError if the weight holds NaN or infinity, or its scales are too large.
    """
    for piece in pieces:
        _pack(destination, [piece], gathered, worker)


def _pack(
    destination: Destination,
    pieces: Sequence[WeightPiece],
    gathered: Gathered | None,
    worker: Worker,
) -> None:
    """Packs whole weights, or a piece of one whose absmax is gathered."""
    format = destination.format
    jobs = [piece.job for piece in pieces]
    measured = destination.measured
    stored = [] if measured is None else [measured[job.name].weight for job in jobs]
    packed = worker.device.pack(pieces, format, gathered, stored)
    if measured is not None:
        for piece, errors in zip(pieces, packed.errors, strict=True):
            measured[piece.job.name].add_piece(piece.start, errors)
    with worker.timed(Activity.WRITE):
        destination.write(jobs[0].offsets[0] + pieces[0].start // 2, packed.codes)
    scales = packed.scales
    if gathered is not None and gathered.count_piece():
        scales = worker.device.compress(gathered, format)
    if scales is not None:
        _write_scales(destination, jobs, scales, worker)


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
    """Returns the quant states of packed weights by name, given the nested_offset of each.

    Raises a NonFiniteError if the scales of a weight are so large that their mean is not finite.
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
