"""`quantize --verify`: what has been written is read back and held against its source, as soon as it is written.

The worker that has completed a weight compares its codes and scales, while the source is in the page cache, and on
disk, where that of a stream does not stay. The comparison is that of `nf4conv verify` (check.py).
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from nf4conv.checkpoint.encoded_pieces import Piece
from nf4conv.checkpoint.header import TensorInfo
from nf4conv.checkpoint.plan import CopyJob, PackJob, component_name
from nf4conv.checkpoint.structure import StoredWeight
from nf4conv.format.layout import DTYPE_NAMES
from nf4conv.options import VerifyOptions
from nf4conv.pipeline.shards import ShardProgress
from nf4conv.pipeline.with_torch.check import compare_copy, tasks_of_weight
from nf4conv.pipeline.with_torch.worker import TorchWorker
from nf4conv.report.measured import CopyResult, WeightResult, weight_faults, weight_row
from nf4conv.report.rows import VerificationSummary, distance


class TorchAudit:
    """Looks at what workers with torch have written; a pipeline.shards.Audit.

    Args:
        piece: bytes that a worker reads at a time.
        tolerance: the largest relative error of a weight; None for that of its format.
    """

    def __init__(self, piece: int, tolerance: float | None) -> None:
        self._piece = piece
        self._options = VerifyOptions(tolerance)
        self._weights: dict[str, WeightResult] = {}
        self._copies: dict[str, CopyResult] = {}
        self._lock = threading.Lock()

    def check_weights(
        self, worker: TorchWorker, progress: ShardProgress, jobs: Sequence[PackJob], blobs: Mapping[str, bytes]
    ) -> None:
        for job in jobs:
            result = WeightResult(_stored(progress, job, blobs[job.name]))
            with self._lock:
                self._weights[job.name] = result
            for task in tasks_of_weight(result, job, self._piece):
                task(worker)

    def check_copy(self, worker: TorchWorker, progress: ShardProgress, job: CopyJob, piece: Piece) -> None:
        compare_copy(self._copy(progress, job), piece, worker)

    def _copy(self, progress: ShardProgress, job: CopyJob) -> CopyResult:
        with self._lock:
            if job.name not in self._copies:
                file, start = progress.writer.place(job.offset)
                stored = TensorInfo(job.name, job.dtype, job.source.shape, file, start, start + job.nbytes)
                self._copies[job.name] = CopyResult(stored)
            return self._copies[job.name]

    def faults(self) -> Iterator[str]:
        """Of weights, the one with the largest error first, and of kept tensors."""
        for result in sorted(self._weights.values(), key=lambda result: -distance(result.relative_error)):
            yield from (f"{result.weight.name}: {text}" for _, text in weight_faults(result, self._options))
        for copy in self._copies.values():
            if copy.differing:
                yield f"{copy.tensor.name}: {copy.differing:,} of {copy.tensor.elements:,} values are not the source's"

    def summary(self) -> VerificationSummary:
        rows = [weight_row(self._weights[name], self._options) for name in sorted(self._weights)]
        return VerificationSummary.of(rows, len(self._copies))


def _stored(progress: ShardProgress, job: PackJob, blob: bytes) -> StoredWeight:
    """A weight as it lies in a shard that is not complete."""
    parts = {}
    for component, offset in zip(job.components, job.offsets, strict=False):  # the blob, which is the last, has none
        file, start = progress.writer.place(offset)
        name, stop = component_name(job, component), start + component.nbytes
        parts[component.suffix] = TensorInfo(name, component.dtype, component.shape, file, start, stop)
    dtype = DTYPE_NAMES[job.source.dtype] if job.stored is not None else progress.format.dtype
    return StoredWeight(parts.pop(""), parts, replace(progress.format, dtype=dtype), job.matrix.shape, blob=blob)
