"""`quantize --verify`: what has been written is read back and held against its source, as soon as
it is written.

The worker that has completed a weight looks at it while the source is in the page cache, and on
disk, where that of a stream does not stay. As with `nf4conv verify`, what comes out the same once
more is right (tasks/prove.py); torch looks at the rest (tasks/diagnose.py).
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from nf4conv.format.layout import parse_quant_state
from nf4conv.options import VerifyOptions
from nf4conv.plan.jobs import CopyJob, PackJob, component_name, format_of
from nf4conv.plan.rows import distance
from nf4conv.report.measured import CopyResult, WeightResult
from nf4conv.report.results import VerificationSummary
from nf4conv.run.device.choice import Devices
from nf4conv.run.shards import ShardProgress
from nf4conv.run.tasks.prove import prove_copy, prove_written
from nf4conv.run.worker import Worker
from nf4conv.sources.cutting import Piece
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit, described_weight
from nf4conv.sources.tensors import TensorInfo


class AuditOfWritten:
    """Looks at what workers have written to a shard.

    Args:
        devices: of the run.
        tolerance: the largest relative error of a weight; None for that of its format.
    """

    def __init__(self, devices: Devices, tolerance: float | None) -> None:
        self._devices = devices
        self._options = VerifyOptions(tolerance=tolerance)
        self._weights: dict[str, WeightResult] = {}
        self._copies: dict[str, CopyResult] = {}
        self._lock = threading.Lock()

    def check_weights(
        self,
        worker: Worker,
        progress: ShardProgress,
        jobs: Sequence[PackJob],
        blobs: Mapping[str, bytes],
    ) -> None:
        stored = {job.name: _stored(progress, job, blobs[job.name]) for job in jobs}
        place = progress.writer.place(0)
        results = prove_written(worker, self._devices, progress.format, stored, jobs, place)
        for job in jobs:
            if job.original is not None:
                # its bytes are proved by those of the finished block, and its errors measured here
                is_damaged = job.name not in results
                results[job.name] = self._diagnosed(worker, stored[job.name], job.original)
                results[job.name].is_damaged = is_damaged
            elif job.name not in results:
                results[job.name] = self._diagnosed(worker, stored[job.name], job)
        with self._lock:
            self._weights.update(results)

    def _diagnosed(self, worker: Worker, weight: Bitsandbytes4bit, job: PackJob) -> WeightResult:
        """Compares a weight with what quantizing its source gives."""
        from nf4conv.run.tasks.diagnose import weight_tasks  # importing torch takes seconds

        result = WeightResult(weight)
        for task in weight_tasks(result, job, self._devices.torch, worker.piece):
            task(worker)
        return result

    def check_copy(
        self, worker: Worker, progress: ShardProgress, job: CopyJob, piece: Piece
    ) -> None:
        result = self._copy(progress, job)
        if prove_copy(worker, self._devices, job, piece, progress.writer.place(0)):
            return
        from nf4conv.run.tasks.diagnose import compare_copy  # importing torch takes seconds

        compare_copy(self._devices.torch, result, piece, worker)

    def _copy(self, progress: ShardProgress, job: CopyJob) -> CopyResult:
        """Returns what is known of a kept tensor, pieces of which several workers look at."""
        with self._lock:
            if job.name not in self._copies:
                file, start = progress.writer.place(job.offset)
                stop = start + job.nbytes
                stored = TensorInfo(job.name, job.dtype, job.source.shape, file, start, stop)
                self._copies[job.name] = CopyResult(stored)
            return self._copies[job.name]

    def faults(self) -> Iterator[str]:
        """Yields what is wrong: with weights, the largest error first; with other tensors."""
        for result in sorted(self._weights.values(), key=_by_error):
            for _, text in result.faults(self._options):
                yield f"{result.weight.values.name}: {text}"
        for copy in self._copies.values():
            if copy.fault:
                yield f"{copy.tensor.name}: {copy.fault}"

    def summary(self) -> VerificationSummary:
        rows = [self._weights[name].row(self._options) for name in sorted(self._weights)]
        return VerificationSummary.of(rows, len(self._copies))


def _by_error(result: WeightResult) -> float:
    errors = result.errors
    return -distance(None if errors is None else errors.relative_error)


def _stored(progress: ShardProgress, job: PackJob, blob: bytes) -> Bitsandbytes4bit:
    """Describes a weight as it lies in a shard that is not complete."""
    parts = {}
    # the blob, which is the last component, has no offset yet
    for component, offset in zip(job.components, job.offsets, strict=False):
        file, start = progress.writer.place(offset)
        parts[component.suffix] = TensorInfo(
            component_name(job, component),
            component.dtype,
            component.shape,
            file,
            start,
            start + component.nbytes,
        )
    format = format_of(job, progress.format)
    fields = parse_quant_state(blob, format.double_quant)
    return replace(described_weight(parts.pop(""), parts, fields, format.scales), blob=blob)
