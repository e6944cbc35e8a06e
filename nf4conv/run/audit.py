"""`quantize --verify`: what has been written is read back and held against its source, as soon as
it is written.

The worker that has completed a weight compares its codes and scales, while the source is in the
page cache, and on disk, where that of a stream does not stay. The comparison is that of `nf4conv
verify`: a worker without torch proves what is right (without_torch/proof.py); at the rest torch
looks (with_torch/check.py).
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nf4conv.format.layout import DTYPE_NAMES
from nf4conv.options import VerifyOptions
from nf4conv.plan.jobs import CopyJob, PackJob, component_name
from nf4conv.report.measured import CopyResult, WeightResult
from nf4conv.report.rows import VerificationSummary, distance
from nf4conv.report.weights import weight_faults, weight_row
from nf4conv.run.shards import ShardProgress
from nf4conv.run.without_torch.proof import prove_kept, prove_written
from nf4conv.run.without_torch.worker import CudaWorker
from nf4conv.sources.encodings.pieces import Piece
from nf4conv.sources.stored_weights import StoredWeight
from nf4conv.sources.tensors import TensorInfo

if TYPE_CHECKING:
    from nf4conv.run.with_torch.worker import TorchWorker


class AuditOfWritten:
    """Looks at what workers have written.

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
        self,
        worker: Any,
        progress: ShardProgress,
        jobs: Sequence[PackJob],
        blobs: Mapping[str, bytes],
    ) -> None:
        stored = {job.name: _stored(progress, job, blobs[job.name]) for job in jobs}
        results: dict[str, WeightResult] = {}
        if isinstance(worker, CudaWorker):
            results |= prove_written(worker, progress, stored, jobs, self._piece)
        for job in jobs:
            if job.name not in results:
                from nf4conv.run.with_torch.check import (
                    tasks_of_weight,  # importing torch takes seconds
                )

                results[job.name] = WeightResult(stored[job.name])
                with _torch_worker(worker, self._piece) as by_torch:
                    for task in tasks_of_weight(results[job.name], job, self._piece):
                        task(by_torch)
        with self._lock:
            self._weights |= results

    def check_copy(self, worker: Any, progress: ShardProgress, job: CopyJob, piece: Piece) -> None:
        copy = self._copy(progress, job)
        if isinstance(worker, CudaWorker) and prove_kept(worker, progress, job, piece):
            return
        from nf4conv.run.with_torch.check import compare_copy  # importing torch takes seconds

        with _torch_worker(worker, self._piece) as by_torch:
            compare_copy(copy, piece, by_torch)

    def _copy(self, progress: ShardProgress, job: CopyJob) -> CopyResult:
        with self._lock:
            if job.name not in self._copies:
                file, start = progress.writer.place(job.offset)
                stored = TensorInfo(
                    job.name, job.dtype, job.source.shape, file, start, start + job.nbytes
                )
                self._copies[job.name] = CopyResult(stored)
            return self._copies[job.name]

    def faults(self) -> Iterator[str]:
        """Of weights, the one with the largest error first, and of kept tensors."""
        for result in sorted(
            self._weights.values(), key=lambda result: -distance(result.relative_error)
        ):
            yield from (
                f"{result.weight.name}: {text}" for _, text in weight_faults(result, self._options)
            )
        for copy in self._copies.values():
            if copy.differing:
                yield f"{copy.tensor.name}: {copy.differing:,} of {copy.tensor.elements:,} values are not the source's"

    def summary(self) -> VerificationSummary:
        rows = [weight_row(self._weights[name], self._options) for name in sorted(self._weights)]
        return VerificationSummary.of(rows, len(self._copies))


def _stored(progress: ShardProgress, job: PackJob, blob: bytes) -> StoredWeight:
    """A weight as it lies in a shard that is not complete."""
    parts = {}
    for component, offset in zip(
        job.components, job.offsets, strict=False
    ):  # the blob, which is the last, has none
        file, start = progress.writer.place(offset)
        name, stop = component_name(job, component), start + component.nbytes
        parts[component.suffix] = TensorInfo(
            name, component.dtype, component.shape, file, start, stop
        )
    dtype = DTYPE_NAMES[job.source.dtype] if job.stored is not None else progress.format.dtype
    format, offset = replace(progress.format, dtype=dtype), json.loads(blob).get("nested_offset")
    return StoredWeight(parts.pop(""), parts, format, job.matrix.shape, offset, blob)


def _torch_worker(worker: Any, piece: int) -> "AbstractContextManager[TorchWorker]":
    """A worker with torch: this one, or one for what another has not proved."""
    from nf4conv.run.with_torch.worker import (  # importing torch takes seconds
        TorchEngine,
        TorchWorker,
    )

    if isinstance(worker, TorchWorker):
        return nullcontext(worker)
    return TorchEngine(worker.engine.device).worker(worker.reader, piece, worker.advance)
