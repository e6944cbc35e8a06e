"""`quantize --verify`: what has been written is read back and held against its source, as soon as
it is written.

The worker that has completed a weight looks at it while the source is in the page cache, and on
disk, where that of a stream does not stay. As with `nf4conv verify`, what comes out the same once
more is right (tasks/prove.py); torch looks at the rest (tasks/diagnose.py).
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from nf4conv.format.layout import Format, parse_quant_state
from nf4conv.options import VerifyOptions
from nf4conv.output.writer import ShardWriter
from nf4conv.plan.jobs import CopyJob, PackJob, component_name, format_of
from nf4conv.plan.rows import distance
from nf4conv.report.measured import TensorDifference, WeightResult
from nf4conv.report.results import VerificationSummary
from nf4conv.run.device.choice import Devices
from nf4conv.run.device.protocol import CopyPart
from nf4conv.run.tasks.compare_bytes import stored_from
from nf4conv.run.tasks.keep import write_converted
from nf4conv.run.tasks.prove import Proof, prove_kept_weight
from nf4conv.run.worker import Worker
from nf4conv.sources.cutting import Piece
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit, described_weight
from nf4conv.sources.tensors import TensorInfo


class AuditOfWritten:
    """Looks at what workers have written to a shard."""

    def __init__(
        self, devices: Devices, tolerance: float | None, format: Format, writer: ShardWriter
    ) -> None:
        self._devices = devices
        self._options = VerifyOptions(tolerance=tolerance)
        self._format = format
        self._place = writer.place
        self._weights: dict[str, WeightResult] = {}
        self._copies: dict[str, TensorDifference] = {}
        self._lock = threading.Lock()

    def check_weights(
        self, worker: Worker, jobs: Sequence[PackJob], blobs: Mapping[str, bytes]
    ) -> None:
        """Looks at weights, all of which but their JSON blobs is in the shard's file."""
        stored = {job.name: self._stored(job, blobs[job.name]) for job in jobs}
        results = self._proved(worker, stored, jobs)
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

    def _proved(
        self, worker: Worker, stored: Mapping[str, Bitsandbytes4bit], jobs: Sequence[PackJob]
    ) -> dict[str, WeightResult]:
        """Returns the weights that are right; of those that one task has packed, all or none."""
        found = {}
        to_pack = []
        for job in jobs:
            if job.stored is None:
                to_pack.append(job)
            else:
                result = WeightResult(stored[job.name])
                prove_kept_weight(result, job, worker.piece, worker)
                if result.scales is not None:
                    found[job.name] = result
        if to_pack:
            proof = Proof(self._format, to_pack, stored_from(worker, *self._place(0)), stored)
            for task in proof.tasks(self._devices, worker.piece):
                task(worker)
            if not proof.unlike:
                found.update(proof.proved())
        return found

    def _diagnosed(self, worker: Worker, weight: Bitsandbytes4bit, job: PackJob) -> WeightResult:
        """Compares a weight with what quantizing its source gives."""
        from nf4conv.run.tasks.diagnose import weight_tasks  # importing torch takes seconds

        result = WeightResult(weight)
        for task in weight_tasks(result, job, self._devices.torch, worker.piece):
            task(worker)
        return result

    def check_copy(self, worker: Worker, job: CopyJob, piece: Piece) -> None:
        """Looks at a kept tensor, or a piece of it."""
        result = self._copy(job)
        if self._is_same(worker, job, piece):
            return
        from nf4conv.run.tasks.diagnose import compare_copy  # importing torch takes seconds

        compare_copy(self._devices.torch, result, piece, worker)

    def _is_same(self, worker: Worker, job: CopyJob, piece: Piece) -> bool:
        """Returns True if a kept tensor, or a piece of it, comes out as it is written."""
        stored = stored_from(worker, *self._place(0))
        if job.is_changed:
            backend = self._devices.backend_for(job.name)
            write_converted(stored, backend, [CopyPart(job, piece)], worker)
        else:
            offset = job.offset + piece.tensor.start - job.source.start
            worker.copy(*piece.tensor.file_range, stored, offset)
        return not stored.unlike

    def _copy(self, job: CopyJob) -> TensorDifference:
        """Returns what is known of a kept tensor, pieces of which several workers look at."""
        with self._lock:
            if job.name not in self._copies:
                file, start = self._place(job.offset)
                stop = start + job.nbytes
                stored = TensorInfo(job.name, job.dtype, job.source.shape, file, start, stop)
                self._copies[job.name] = TensorDifference(job.source, stored)
            return self._copies[job.name]

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
        format = format_of(job, self._format)
        fields = parse_quant_state(blob, format.double_quant)
        return replace(described_weight(parts.pop(""), parts, fields, format.scales), blob=blob)

    def faults(self) -> Iterator[str]:
        """Yields what is wrong: with weights, the largest error first; with other tensors."""
        for result in sorted(self._weights.values(), key=_by_error):
            for _, text in result.faults(self._options):
                yield f"{result.weight.values.name}: {text}"
        for copy in self._copies.values():
            if copy.fault:
                yield f"{copy.b.name}: {copy.fault}"

    def summary(self) -> VerificationSummary:
        rows = [self._weights[name].row(self._options) for name in sorted(self._weights)]
        return VerificationSummary.of(rows, len(self._copies))


def _by_error(result: WeightResult) -> float:
    errors = result.errors
    return -distance(None if errors is None else errors.relative_error)
