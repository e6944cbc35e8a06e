"""`quantize --verify`: what has been written is read back and held against its source, as soon as
it is written.

The worker that has completed a weight looks at it while the source is in the page cache, and on
disk, where that of a stream does not stay. As with `nf4conv verify`, what comes out the same once
more is right (tasks/prove.py). Anything else was damaged on its way, which is all that is said.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from nf4conv.format.layout import Format, parse_quant_state
from nf4conv.options import VerifyOptions
from nf4conv.output.writer import ShardWriter
from nf4conv.plan.jobs import CopyJob, PackJob, component_name
from nf4conv.plan.rows import distance
from nf4conv.report.measured import ScaleErrors, WeightResult
from nf4conv.report.results import VerificationSummary
from nf4conv.run.device.protocol import CopyPart
from nf4conv.run.tasks.compare_bytes import StoredBytes, stored_from
from nf4conv.run.tasks.keep import write_converted
from nf4conv.run.tasks.prove import Proof, placed_parts, prove_kept_weight
from nf4conv.run.worker import Backend, Worker
from nf4conv.sources.cutting import Piece
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit, described_weight
from nf4conv.sources.tensors import TensorInfo

_DAMAGED: Final = "is not stored as it was written; is the disk, or the memory, failing?"


class AuditOfWritten:
    """Looks at what workers have written to a shard."""

    def __init__(
        self, backend: Backend, tolerance: float | None, format: Format, writer: ShardWriter
    ) -> None:
        self._backend = backend
        self._options = VerifyOptions(tolerance=tolerance)
        self._format = format
        self._place = writer.place
        self._weights: dict[str, WeightResult] = {}
        self._copies: set[str] = set()
        self._damaged: set[str] = set()  # the names of what is not as it was written
        self._lock = threading.Lock()

    def check_weights(
        self, worker: Worker, jobs: Sequence[PackJob], blobs: Mapping[str, bytes]
    ) -> None:
        """Looks at weights, all of which but their JSON blobs is in the shard's file."""
        stored = {job.name: self._stored(job, blobs[job.name]) for job in jobs}
        results = self._packed_again([job for job in jobs if job.stored is None], stored, worker)
        for job in jobs:
            if job.stored is None:
                continue
            result = WeightResult(stored[job.name])
            prove_kept_weight(result, job, worker.piece, worker)
            if result.scales is None:
                with self._lock:
                    self._damaged.add(job.name)
            elif job.original is not None:  # what it was calibrated from, which tells its errors
                result = self._compared(worker, stored[job.name], job.original)
            results[job.name] = result
        with self._lock:
            self._weights.update(results)

    def _packed_again(
        self, jobs: Sequence[PackJob], stored: Mapping[str, Bitsandbytes4bit], worker: Worker
    ) -> dict[str, WeightResult]:
        """Packs weights once more, and compares their bytes."""
        if not jobs:
            return {}
        parts: dict[int, TensorInfo] = {}
        for job in jobs:
            parts.update(placed_parts(stored[job.name], job))
        compared = StoredBytes(worker.reader, parts, worker.advance)
        proof = Proof(self._format, jobs, compared, stored)
        for task in proof.tasks(self._backend, worker.piece):
            task(worker)
        with self._lock:
            self._damaged |= proof.unlike
        for result in proof.measured.values():
            result.scales = ScaleErrors()
        return proof.measured

    def _compared(self, worker: Worker, weight: Bitsandbytes4bit, job: PackJob) -> WeightResult:
        """Compares a calibrated weight with what it was made from."""
        from nf4conv.run.tasks.diagnose import weight_tasks  # importing torch takes seconds

        result = WeightResult(weight)
        for task in weight_tasks(result, job, worker.piece):
            task(worker)
        return result

    def check_copy(self, worker: Worker, job: CopyJob, piece: Piece) -> None:
        """Reads, and converts, a kept tensor or a piece of it once more, and compares its bytes."""
        stored = stored_from(worker, *self._place(0))
        if job.is_changed:
            write_converted(stored, [CopyPart(job, piece)], worker)
        else:
            offset = job.offset + piece.tensor.start - job.source.start
            worker.copy(*piece.tensor.file_range, stored, offset)
        with self._lock:
            self._copies.add(job.name)
            if stored.unlike:
                self._damaged.add(job.name)

    def _stored(self, job: PackJob, blob: bytes) -> Bitsandbytes4bit:
        """Describes a weight as it lies in a shard that is not complete."""
        parts = {}
        # the blob, which is the last component, has no offset yet
        for component, offset in zip(job.components, job.offsets, strict=False):
            file, start = self._place(offset)
            parts[component.suffix] = TensorInfo(
                component_name(job, component),
                component.dtype,
                component.shape,
                file,
                start,
                start + component.nbytes,
            )
        fields = parse_quant_state(blob, job.format.double_quant)
        weight = described_weight(parts.pop(""), parts, fields, job.format.scales)
        return replace(weight, blob=blob)

    def faults(self) -> Iterator[str]:
        """Yields what is wrong: what is damaged, then weights, the largest error first."""
        for name in sorted(self._damaged):
            yield f"{name}: {_DAMAGED}"
        for result in sorted(self._weights.values(), key=_error, reverse=True):
            for _, text in result.faults(self._options):
                yield f"{result.weight.values.name}: {text}"

    def summary(self) -> VerificationSummary:
        largest = max((_error(result) for result in self._weights.values()), default=0.0)
        return VerificationSummary(len(self._weights), len(self._copies), round(largest, 6))


def _error(result: WeightResult) -> float:
    """Returns the relative error of a weight by which errors sort; no finite one if it is NaN."""
    errors = result.errors
    return 0.0 if errors is None else distance(errors.relative_error)
